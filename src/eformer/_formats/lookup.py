"""`gather` and `dynamic_slice`: parts of a quantized array, at indices that a program computes.

An index that asks for one vector (a row of an embedding) is a lookup, and its result dense: rows are activations. Where
the vector is a stored row, a kernel decodes it; along the packed axis single entries are decoded; otherwise codes and
scales are taken out first. Indices that ask for whole matrices (experts) give weights, which keep the type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eformer._core import register
from eformer._core.materialization import decode, notice_lookup
from eformer._kernels import qgather

from . import shapes as _shapes
from .base import Part, QuantizedArray
from .shapes import blocked_axis, free

Starts = dict[int, jax.Array]  # for every indexed axis, where its slices start: one array per axis, all of one shape


@register("gather")
def gather(q: QuantizedArray, indices: jax.Array, **params: Any) -> Any:
    """What `indices` name: dense for vectors, of the same type for larger slices."""
    indices, params = without_whole_axes(q, indices, params)
    numbers, sizes = params["dimension_numbers"], tuple(params["slice_sizes"])
    if 0 in q.shape or 0 in sizes:
        return NotImplemented
    asked = {int(axis): indices[..., i] for i, axis in enumerate(numbers.start_index_map)}
    for axis, place in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        asked[int(axis)] = lax.broadcasted_iota(jnp.int32, indices.shape[:-1], place)
    starts = {axis: _clamped(start, q.shape[axis] - sizes[axis]) for axis, start in asked.items()}
    held, found = _taken(q, starts, sizes)
    if found is NotImplemented:
        return NotImplemented
    outside = None
    if params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
        wrong = [(s < 0) | (s > q.shape[axis] - sizes[axis]) for axis, s in asked.items()]
        outside = jnp.any(jnp.stack(wrong), axis=0)
    if isinstance(found, jax.Array):
        return _placed(_filled(found, outside, params.get("fill_value")), held, numbers, indices.ndim - 1)
    found = _filled_scales(found, outside, params.get("fill_value"))
    return found if found is NotImplemented else _placed_weights(found, numbers, indices.ndim - 1)


@register("dynamic_slice")
def dynamic_slice(q: QuantizedArray, *starts: jax.Array, slice_sizes: Any, **params: Any) -> Any:
    """As `gather` with one index."""
    sizes = slice_sizes
    if tuple(sizes) == q.shape:
        return q
    if 0 in sizes:
        return NotImplemented
    cut = [axis for axis, size in enumerate(sizes) if size != q.shape[axis]]
    held, found = _taken(q, {axis: _clamped(starts[axis], q.shape[axis] - sizes[axis]) for axis in cut}, sizes)
    if not isinstance(found, jax.Array):
        return found
    return lax.expand_dims(found, [axis for axis in range(q.ndim) if axis not in held])


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


def _clamped(start: Any, last: int) -> jax.Array:
    wide = jnp.promote_types(start.dtype, jnp.int32)  # which the last place fits into
    return jnp.clip(lax.convert_element_type(start, wide), 0, last).astype(jnp.int32)


def _taken(q: Any, starts: Starts, sizes: Sequence[int]) -> tuple[list[int], Any]:
    """The slices, behind the axes of the indices: logical axes that are left, and a dense array of them, or weights."""
    blocked, whole = blocked_axis(q), [axis for axis in range(q.ndim) if axis not in starts]
    if any(sizes[axis] != q.shape[axis] for axis in whole):
        return [], NotImplemented
    if blocked in starts:
        if sizes[blocked] != 1 or any(sizes[axis] != 1 for axis in starts) or not hasattr(q, "decoded_entries"):
            return [], NotImplemented
        notice_lookup(q, (*starts[blocked].shape, *(q.shape[axis] for axis in whole)))
        return whole, _entries(q, starts, blocked, sizes).astype(q.dtype)
    vectors = sum(size != 1 for size in sizes) <= 1 < q.ndim
    if vectors and len(whole) == 1 and (rows := _rows(q, whole[0], starts)) is not None:
        return whole, rows
    taken = _shapes.rebuilt(q, lambda part, array: _slices(q, part, array, starts, sizes), blocked, q.ndim)
    return list(range(q.ndim)), decode(taken, q) if vectors else taken


def _rows(q: Any, axis: int, starts: Starts) -> jax.Array | None:
    """Vectors along `axis`, one for every index, (index axes..., size), by a kernel; None where it cannot read them."""
    last = q.ndim - 1 if q.blocked is None else blocked_axis(q)
    if q.kernel_format is None or not q.kernel_offset_is_exact or q.carries_factor or axis != last:
        return None
    if q.kernel_factor is not None and q.kernel_factor.size > 1:  # one for each table of a stack
        q = q.with_plain_scale()
    (codes, scale), offset, factor = q.kernel_operands(), q.kernel_offset, q.kernel_factor
    lead = [q.shape[a] for a in range(q.ndim) if a != axis]
    index = next(iter(starts.values()))
    if len(lead) > 1:  # a stack of tables: one long table
        if scale is not None and (scale := _long_scale(scale, lead)) is None:
            return None
        codes = codes.reshape(math.prod(lead), *codes.shape[len(lead) :])
        offset = None if offset is None else _long_scale(offset, lead)
        index = jnp.zeros_like(index)
        for a, size in zip(sorted(starts), lead, strict=True):
            index = index * size + starts[a]
    notice_lookup(q, (*index.shape, q.shape[axis]))
    return qgather(
        codes, scale, index, offset=offset, factor=None if factor is None else factor.reshape(1, 1),
        fmt=q.kernel_format, cols=q.shape[axis], block=q.kernel_block, dtype=q.dtype,
        preference="auto" if q.use_kernel else "xla", in_bounds=True,
    )  # fmt: skip


def _entries(q: Any, starts: Starts, blocked: int, sizes: Sequence[int]) -> jax.Array:
    """Single entries of the packed axis, (index axes..., free axes that are whole...)."""
    others = {axis: start for axis, start in starts.items() if axis != blocked}
    if not others:
        values = q.decoded_entries(starts[blocked])  # (free axes..., index axes...)
        return jnp.moveaxis(values, range(q.ndim - 1), range(-q.ndim + 1, 0))
    cut = [sizes[axis] if axis in others else n for axis, n in enumerate(q.shape)]

    def one(entry: jax.Array, *at: jax.Array) -> jax.Array:
        named = dict(zip(others, at, strict=True))
        piece = _shapes.rebuilt(q, lambda part, array: _slices(q, part, array, named, cut), blocked, q.ndim)
        return piece.decoded_entries(entry).reshape([q.shape[axis] for axis in free(q) if axis not in others])

    return _mapped(one, starts[blocked].ndim)(starts[blocked], *others.values())


def _long_scale(scale: jax.Array, lead: list[int]) -> jax.Array | None:
    """The scale of a stack of tables as that of one; None where it would have to be spread over all values."""
    held, tail = scale.shape[: len(lead)], scale.shape[len(lead) :]
    if math.prod(held) == 1:
        return scale.reshape(1, *tail)
    if list(held) != lead and math.prod(tail) > 1:
        return None
    return jnp.broadcast_to(scale, (*lead, *tail)).reshape(math.prod(lead), *tail)


def _slices(q: Any, part: Part, array: jax.Array, starts: Starts, sizes: Sequence[int]) -> jax.Array:
    """The slices of one part, behind the axes of the indices."""
    axes = free(q)
    shared = {axis for i, axis in enumerate(axes) if array.shape[i] == 1 and q.shape[axis] != 1}
    tail = array.shape[len(axes) :]
    count = (*(1 if axis in shared else sizes[axis] for axis in axes), *tail)

    def one(*at: jax.Array) -> jax.Array:
        named = dict(zip(starts, at, strict=True))
        zero = jnp.zeros((), jnp.int32)
        places = [zero if axis in shared else named.get(axis, zero) for axis in axes]
        return lax.dynamic_slice(array, [*places, *[zero] * len(tail)], count)

    return _mapped(one, next(iter(starts.values())).ndim)(*starts.values())


def _mapped(function: Callable[..., Any], times: int) -> Callable[..., Any]:
    for _ in range(times):
        function = jax.vmap(function)
    return function


def _filled(values: jax.Array, outside: Any, fill: Any) -> jax.Array:
    """`values`, those of an index out of range replaced as JAX does."""
    if outside is None:
        return values
    if fill is None:
        fill = jnp.nan if jnp.issubdtype(values.dtype, jnp.inexact) else jnp.iinfo(values.dtype).min
    outside = lax.expand_dims(outside, range(outside.ndim, values.ndim))
    return jnp.where(outside, jnp.asarray(fill, values.dtype), values)


def _filled_scales(q: Any, outside: Any, fill: Any) -> Any:
    """The same for weights: a scale of NaN makes every value NaN, and no other value can be had."""
    if outside is None:
        return q
    scale = q.part(q.scale_part)
    if scale is None or (fill is not None and fill == fill):
        return NotImplemented
    scale = _filled(scale, outside, q.nan_scale)
    return q.with_factor(scale) if q.carries_factor else q.replaced(**{q.scale_part.field: scale})


def _order(numbers: Any, n_index: int) -> list[int]:
    """The axes of the result, given (index axes..., axes that are kept...)."""
    offsets, index = list(numbers.offset_dims), iter(range(n_index))
    rank = n_index + len(offsets)
    return [n_index + offsets.index(place) if place in offsets else next(index) for place in range(rank)]


def _placed(values: jax.Array, held: list[int], numbers: Any, n_index: int) -> jax.Array:
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    values = lax.squeeze(values, [n_index + i for i, axis in enumerate(held) if axis in gone])
    kept = [axis for axis in range(len(gone) + len(numbers.offset_dims)) if axis not in gone]
    values = lax.expand_dims(values, [n_index + i for i, axis in enumerate(kept) if axis not in held])
    return lax.transpose(values, _order(numbers, n_index))


def _placed_weights(q: Any, numbers: Any, n_index: int) -> Any:
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    q = _shapes.squeeze(q, dimensions=[n_index + axis for axis in gone])
    return _shapes.transpose(q, permutation=_order(numbers, n_index)).replaced(sharding=None)
