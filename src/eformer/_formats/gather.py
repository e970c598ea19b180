"""`gather` on storage: rows are picked as codes and scales, so a lookup decodes nothing but what was looked up.

Where every index asks for one vector (a row of an embedding), the result is noted as picked: it keeps the type, and
the first operation that needs values decodes it, which is not a materialization. Indices that ask for whole matrices
(experts) give weights, and those stay under the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .base import Part
from .shapes import blocked_axis, free


def gather(q: Any, indices: jax.Array, params: dict[str, Any]) -> Any:
    """The same type with the entries of free axes that `indices` name, or NotImplemented."""
    indices, params = without_whole_axes(q, indices, params)
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    blocked = blocked_axis(q)
    if blocked is not None and _picks_blocked(q, numbers, sizes, blocked) and 0 not in q.shape:
        return _pick(q, indices, params)
    if not _fits(q, numbers, sizes, blocked) or 0 in indices.shape or 0 in q.shape:
        return NotImplemented
    fill = params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    value = params.get("fill_value")
    if fill and value is not None and value == value:  # anything but NaN, which a NaN scale gives
        return NotImplemented
    parts = {}
    for part in q.parts:
        array = q.part(part)
        if array is None:
            if fill:  # nowhere to put the NaN of an index out of range
                return NotImplemented
            parts[part.field] = None
            continue
        parts[part.field] = _gather_part(q, part, array, indices, params, fill)
    if any(p is NotImplemented for p in parts.values()):
        return NotImplemented
    ndim = indices.ndim - 1 + len(numbers.offset_dims)
    where = None if blocked is None else _position(q, numbers, blocked) - ndim
    one_vector = sum(size != 1 for size in sizes) <= 1 < q.ndim
    return q.moved(parts, where, sharding=None).as_picked(q.is_picked or one_vector)


def without_whole_axes(q: Any, indices: jax.Array, params: dict[str, Any]) -> tuple[jax.Array, dict[str, Any]]:
    """A slice as long as its axis starts at 0, whatever its index: `vmap` of `dynamic_slice` names such axes too."""
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    where = numbers.start_index_map
    kept = [i for i, axis in enumerate(where) if sizes[axis] != q.shape[axis] or q.shape[axis] == 1]
    if len(kept) == len(where) or not kept or params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
        return indices, params
    numbers = lax.GatherDimensionNumbers(
        offset_dims=numbers.offset_dims,
        collapsed_slice_dims=numbers.collapsed_slice_dims,
        start_index_map=tuple(where[i] for i in kept),
        operand_batching_dims=numbers.operand_batching_dims,
        start_indices_batching_dims=numbers.start_indices_batching_dims,
    )
    return indices[..., jnp.asarray(kept)], {**params, "dimension_numbers": numbers}


def _fits(q: Any, numbers: Any, sizes: Sequence[int], blocked: int | None) -> bool:
    indexed = set(numbers.start_index_map) | set(numbers.operand_batching_dims)
    whole = all(sizes[axis] == q.shape[axis] for axis in range(q.ndim) if axis not in indexed)
    return whole and blocked not in indexed and blocked not in numbers.collapsed_slice_dims


def _picks_blocked(q: Any, numbers: Any, sizes: Sequence[int], blocked: int) -> bool:
    """Is this a lookup along the blocked axis itself, whole along all others?"""
    one = (tuple(numbers.start_index_map), tuple(numbers.collapsed_slice_dims)) == ((blocked,), (blocked,))
    whole = all(sizes[axis] == q.shape[axis] for axis in free(q))
    return one and whole and not numbers.operand_batching_dims


def _pick(q: Any, indices: jax.Array, params: dict[str, Any]) -> Any:
    """Entries of the blocked axis, decoded one by one: the result is dense, and the table never is."""
    size, index = q.shape[q.blocked], indices[..., 0]
    value = params.get("fill_value")
    values = q.decoded_entries(jnp.clip(index, 0, size - 1)).astype(q.dtype)  # (free axes..., index axes...)
    if params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
        if value is None:
            value = jnp.nan if jnp.issubdtype(q.dtype, jnp.floating) else jnp.iinfo(q.dtype).min
        values = jnp.where((index < 0) | (index >= size), jnp.asarray(value, q.dtype), values)
    kept = q.ndim - 1
    offsets = params["dimension_numbers"].offset_dims
    order = iter(range(kept, values.ndim))
    places = [offsets.index(p) if p in offsets else next(order) for p in range(values.ndim)]
    return lax.transpose(values, places)


def _position(q: Any, numbers: Any, axis: int) -> int:
    """Where an operand axis that is kept appears in the result."""
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [a for a in range(q.ndim) if a not in gone]
    return numbers.offset_dims[kept.index(axis)]


def _gather_part(q: Any, part: Part, array: jax.Array, indices: jax.Array, params: dict[str, Any], fill: bool) -> Any:
    numbers, axes = params["dimension_numbers"], free(q)
    indexed = [*numbers.start_index_map, *numbers.operand_batching_dims]
    shared = [array.shape[axes.index(a)] == 1 and q.shape[a] != 1 for a in indexed]
    if not any(shared):
        return _bind(q, part, array, indices, params)
    if not all(shared) or not part.is_scale:
        return NotImplemented
    # One scale for all rows: it stays as it is, but an index out of range must still give NaN.
    sizes = [q.shape[a] if a in indexed else 1 for a in axes]
    ones = jnp.ones((*sizes, *[1] * part.tail), array.dtype)
    mask = _bind(q, part, ones, indices, params) if fill else None
    spread = _spread(q, array, indices, numbers)
    return spread if mask is None else spread * mask


def _spread(q: Any, array: jax.Array, indices: jax.Array, numbers: Any) -> jax.Array:
    """A part without the indexed axes, with size-1 axes where the batch axes of the result are."""
    axes, blocked = free(q), blocked_axis(q)
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [a for a in axes if a not in gone]
    ndim = indices.ndim - 1 + len(numbers.offset_dims)
    skip = None if blocked is None else _position(q, numbers, blocked)
    order = [p for p in range(ndim) if p != skip]
    sizes = [1] * len(order)
    for axis in kept:
        sizes[order.index(_position(q, numbers, axis))] = array.shape[axes.index(axis)]
    return array.reshape(*sizes, *array.shape[len(axes) :])


def _bind(q: Any, part: Part, array: jax.Array, indices: jax.Array, params: dict[str, Any]) -> jax.Array:
    """The gather of one part: axis numbers translated to where the part keeps them, the tail appended."""
    numbers, axes, blocked = params["dimension_numbers"], free(q), blocked_axis(q)
    tail = list(range(len(axes), array.ndim))
    skip = None if blocked is None else _position(q, numbers, blocked)
    offsets = [p - (skip is not None and p > skip) for p in numbers.offset_dims if p != skip]
    rank = indices.ndim - 1 + len(offsets)
    translated = lax.GatherDimensionNumbers(
        offset_dims=(*offsets, *range(rank, rank + len(tail))),
        collapsed_slice_dims=tuple(axes.index(a) for a in numbers.collapsed_slice_dims),
        start_index_map=tuple(axes.index(a) for a in numbers.start_index_map),
        operand_batching_dims=tuple(axes.index(a) for a in numbers.operand_batching_dims),
        start_indices_batching_dims=numbers.start_indices_batching_dims,
    )
    sizes = [1 if array.shape[i] == 1 else params["slice_sizes"][a] for i, a in enumerate(axes)]
    return lax.gather(
        array,
        indices,
        translated,
        (*sizes, *array.shape[len(axes) :]),
        indices_are_sorted=params["indices_are_sorted"],
        unique_indices=params["unique_indices"],
        mode=params["mode"],
    )
