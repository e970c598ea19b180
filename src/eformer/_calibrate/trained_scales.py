"""The numbers of quantized arrays that can be trained while their codes stay: scales, and what is added to blocks.

A number is trained as its relative change, 0 at first: one learning rate fits every matrix and every format.

    scale = stored * (1 + change)        bias = stored + scale of the block * change        zero = stored + change
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from eformer._formats.base import QuantizedArray
from eformer._formats.nf4.array import CompressedAbsmax
from eformer._formats.nf4.codec import compress_absmax

Changes = dict[str, jax.Array]  # by field


def pieces(value: Any) -> tuple[list[Any], Any]:
    """The quantized arrays inside a leaf (an adapter or a permutation may be around them) and the rest, to rebuild."""
    return jtu.tree_flatten(value, is_leaf=lambda node: isinstance(node, QuantizedArray))


def obstacle(q: QuantizedArray) -> str:
    """Why the scale of an array cannot be trained, or nothing."""
    if not q.has_scale:
        return "it has no scale"
    scale = _plain(getattr(q, q.scale_part.field))
    if not _trainable(scale):
        return f"its scales are {'e8m0' if scale.dtype == jnp.uint8 else scale.dtype.name}, too coarse to be trained"
    return ""


def first_changes(q: QuantizedArray) -> Changes:
    """Zeros, one for each number."""
    stored = _stored(q)
    return {name: jnp.zeros(array.shape, jnp.float32) for name, array in stored.items()}


def changed(q: QuantizedArray, changes: Changes) -> QuantizedArray:
    """For use inside a program: an array that can be differentiated with respect to the changes."""
    numbers = _numbers(q, changes)
    return q.with_factor(numbers.pop(q.scale_part.field), **numbers)


def settled(q: QuantizedArray, changes: Changes) -> QuantizedArray:
    """The array with its numbers changed, stored as they were: in their own dtype, or compressed again."""
    made = {}
    for name, value in _numbers(q, changes).items():
        stored = getattr(q, name)
        if isinstance(stored, CompressedAbsmax):
            made[name] = CompressedAbsmax(*compress_absmax(value, core_ndim=stored.core), core=stored.core)
        else:
            made[name] = value.astype(stored.dtype)
    return q.replaced(**made)


def _numbers(q: QuantizedArray, changes: Changes) -> dict[str, jax.Array]:
    stored = {name: array.astype(jnp.float32) for name, array in _stored(q).items()}
    scale = q.scale_part.field
    made = {scale: stored[scale] * (1 + changes[scale])}
    if "bias" in stored:
        made["bias"] = stored["bias"] + jnp.abs(stored[scale]) * changes["bias"]
    if "zero" in stored:
        made["zero"] = stored["zero"] + changes["zero"]
    return made


def _stored(q: QuantizedArray) -> dict[str, jax.Array]:
    """What is trained, by field, as it is stored (a compressed absmax expanded)."""
    names = [q.scale_part.field, *(f.name for f in dataclasses.fields(q) if f.name in ("bias", "zero"))]  # pyright: ignore[reportArgumentType]
    held = {name: _plain(array) for name in names if (array := getattr(q, name)) is not None}
    return {name: array for name, array in held.items() if _trainable(array)}


def _plain(array: Any) -> Any:
    return array.expanded() if isinstance(array, CompressedAbsmax) else array


def _trainable(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize > 1
