"""The parts of adapters that are trained, for everything that takes models apart; and dropout, for training."""

from __future__ import annotations

import dataclasses
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from eformer._core.fields import layout
from eformer._formats.wrapped import Axes
from eformer._quantize.leaves import open_tree
from eformer._quantize.stored import behind
from eformer.errors import UnusedRuleWarning

from .array import LoraArray
from .dora import DoraArray

ADAPTERS = (LoraArray, DoraArray)
Adapter = LoraArray | DoraArray


def low_rank(q: Adapter) -> LoraArray:
    """The weight and the factors of an adapter."""
    return q.v if isinstance(q, DoraArray) else q


def with_trained(q: Any, new: Callable[[str, Any], Any], rest: Callable[[Any], Any] = lambda x: x) -> Any:
    """The adapter with `new(name, part)` for every part that is trained, and `rest(part)` for what is not.

    They need not be arrays.
    """

    def changed(name: str, part: Any) -> Any:
        if name == "v":
            return with_trained(part, new, rest)
        return new(name, part) if name in ("a", "b", "magnitude") else rest(part)

    parts = [changed(name, getattr(q, name)) for name in layout(type(q)).children]
    return type(q).tree_unflatten(q.tree_flatten_with_keys()[1], parts)


@dataclasses.dataclass
class DroppingLora(LoraArray):
    """A `LoraArray` inside a step of training: its factors see only a random part of the other operand.

    `key` is uint32 (batch..., 2). The same key drops the same values.
    """

    key: Any = None

    def dropped(self, x: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(self.key.reshape(-1, 2)[0], impl="threefry2x32")
        kept = jax.random.bernoulli(key, 1 - self.dropout, x.shape)
        return jnp.where(kept, x / (1 - self.dropout), jnp.zeros_like(x))

    def beside(self) -> dict[str, Axes]:
        return {**super().beside(), "key": [*range(self.w.ndim - self.core_ndim), None]}


def lora_dropout(params: Any, key: jax.Array) -> Any:
    """The model of one step of training: adapters with `dropout` see a random part of their inputs.

    Call it inside the loss, on what `merge` gives, with another key in every step. Without it nothing is dropped, as
    it should be where the model is used.

    Args:
        params: any pytree, or a Flax NNX module, with adapters that `add_lora(..., dropout=...)` made.
        key: of `jax.random`; every adapter, and every matrix of a stack, drops other values.
    """
    if not _is_key(key):
        raise TypeError(
            f"key is of type {type(key).__name__}, but must be a key of jax.random, after the model: "
            "lora_dropout(params, key)."
        )
    tree = open_tree(params)
    made: dict[int, Any] = {}
    for leaf in tree.leaves:
        q = behind(leaf.value)
        if isinstance(q, ADAPTERS) and low_rank(q).dropout and id(leaf.value) not in made:
            made[id(leaf.value)] = _dropping(q, jax.random.fold_in(key, zlib.crc32(leaf.path.encode())))
    if not made:
        message = "lora_dropout: no adapter of this model has dropout; add it with add_lora(..., dropout=0.05)"
        warnings.warn(message, UnusedRuleWarning, stacklevel=2)
    return tree.rebuild(made.get(id(leaf.value), leaf.value) for leaf in tree.leaves)


def _is_key(key: Any) -> bool:
    """Of the new kind, or of the old one, an array of uint32."""
    return hasattr(key, "dtype") and (key.dtype == jnp.uint32 or jnp.issubdtype(key.dtype, jax.dtypes.prng_key))


def _dropping(q: Any, key: jax.Array) -> Any:
    if isinstance(q, DoraArray):
        return dataclasses.replace(q, v=_dropping(q.v, key))
    batch = tuple(q.shape[: q.ndim - q.left - q.right])
    keys = jax.random.bits(key, (*batch, 2), jnp.uint32)
    return DroppingLora(q.w, q.a, q.b, q.scale, q.left, q.right, q.dropout, keys)
