"""Splitting a model into trainable and frozen parts for `jax.grad` and optax, and joining them again."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer._core import ImplicitArray
from eformer._formats.arguments import is_storage
from eformer._quantize.leaves import map_tree, open_tree
from eformer._quantize.plan import Rule
from eformer.errors import UnusedRuleWarning

from .array import LoraArray, check_shapes


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Hole:
    """Where a trainable array belongs. Static, so it passes through `jax.jit` inside the frozen part."""

    name: str


def split_trainable(params: Any, also: str | Iterable[str] = ()) -> tuple[dict[str, jax.Array], Any]:
    """A flat dict of what is trained (the factors of every `LoraArray`), and the model with holes in their place.

    Differentiate with respect to the first, `merge` both inside the loss. A leaf that appears twice is trained once.

    Args:
        params: any pytree, or a Flax NNX module.
        also: patterns of dense floating leaves to train as well; "*" for all of them.

    >>> params = {"norm": jnp.ones(2), "w": LoraArray(jnp.ones((2, 2)), jnp.ones((2, 1)), jnp.ones((1, 2)))}
    >>> trainable, frozen = split_trainable(params, also="*norm")
    >>> list(trainable)
    ['norm', 'w/a', 'w/b']
    >>> merge(trainable, frozen)["norm"]
    Array([1., 1.], dtype=float32)
    """
    patterns = [Rule(p, None) for p in ([also] if isinstance(also, str) else also)]
    tree, used = open_tree(params), set()
    trainable: dict[str, Any] = {}
    opened: dict[int, Any] = {}
    for leaf in tree.leaves:
        value = leaf.value
        if id(value) in opened:
            continue
        if isinstance(value, LoraArray):
            opened[id(value)] = _opened(value, leaf.path, trainable)
        elif _is_dense(value) and (hits := [p.pattern for p in patterns if p.matches(leaf.path)]):
            used.update(hits)
            opened[id(value)] = _hole(leaf.path, value, trainable)
    unused = [p.pattern for p in patterns if p.pattern not in used]
    if unused:
        warnings.warn(f"split_trainable: {unused} match no dense leaf", UnusedRuleWarning, stacklevel=2)
    return trainable, tree.rebuild(opened.get(id(leaf.value), leaf.value) for leaf in tree.leaves)


def merge(trainable: Mapping[str, Any], frozen: Any) -> Any:
    """Join the two parts of `split_trainable` into one model."""
    seen: set[str] = set()

    def fill(x: Any) -> Any:
        if isinstance(x, LoraArray):
            return _checked(_with_parts(x, x.w, fill(x.a), fill(x.b)), x)
        if not isinstance(x, Hole):
            return x
        if x.name not in trainable:
            raise ValueError(f"the trainable part lacks {x.name!r}; it holds {sorted(trainable)[:5]}.")
        seen.add(x.name)
        return trainable[x.name]

    merged = map_tree(fill, frozen, lambda x: isinstance(x, (Hole, LoraArray)))
    extra = sorted(set(trainable) - seen)
    if extra:
        raise ValueError(f"the frozen part has no place for {extra[:5]}; both must come from one split_trainable.")
    return merged


def lora_mask(params: Any) -> Any:
    """A tree like `params` of booleans, True for the factors of adapters.

    For what treats the two differently: a count, a decay mask, the labels of `optax.multi_transform`. To freeze the
    rest, `optax.masked` is not enough: it hands updates outside of the mask through as they are, and `apply_updates`
    adds them. Give those to `optax.set_to_zero`, or train what `split_trainable` returns.
    """

    def mask(leaf: Any) -> Any:
        if not isinstance(leaf, LoraArray):
            return jax.tree.map(lambda _: False, leaf)
        return _with_parts(leaf, jax.tree.map(lambda _: False, leaf.w), True, True)

    return map_tree(mask, params, lambda x: isinstance(x, ImplicitArray))


def _is_dense(value: Any) -> bool:
    is_array = isinstance(value, (jax.Array, np.ndarray)) and not isinstance(value, ImplicitArray)
    return is_array and jnp.issubdtype(value.dtype, jnp.floating)


def _opened(q: LoraArray, path: str, trainable: dict[str, Any]) -> LoraArray:
    prefix = f"{path}/" if path else ""
    return _with_parts(q, q.w, _hole(f"{prefix}a", q.a, trainable), _hole(f"{prefix}b", q.b, trainable))


def _with_parts(q: LoraArray, *parts: Any) -> LoraArray:
    """The same array with other parts, which need not be arrays."""
    return LoraArray.tree_unflatten(q.tree_flatten_with_keys()[1], parts)


def _checked(filled: LoraArray, opened: LoraArray) -> LoraArray:
    """Factors that were filled in must fit `w`: of one layer inside a scan, of one device inside `shard_map`."""
    if is_storage(filled.w, filled.a, filled.b):
        try:
            check_shapes(filled)
        except ValueError as err:
            raise ValueError(f"{opened.a!r} and {opened.b!r} cannot be filled: {err}") from err
    return filled


def _hole(name: str, value: Any, trainable: dict[str, Any]) -> Hole:
    free, number = name, 1
    while free in trainable:  # two keys that print the same
        number += 1
        free = f"{name}#{number}"
    trainable[free] = value
    return Hole(free)
