"""Handlers every quantized array shares, written once for the base class: whatever keeps a type exactly, and products.

A handler that cannot keep the type returns NotImplemented; the core then materializes under the policy in force.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer._core import materialize_handler, register
from eformer._jax import traces

from . import dot as _dot
from . import gradients as _gradients
from . import lookup as _lookup
from . import shapes as _shapes
from .base import QuantizedArray
from .blocks import wide


@register("transpose")
def transpose(q: QuantizedArray, *, permutation: Any, **params: Any) -> Any:
    return _shapes.transpose(q, permutation)


@register("reshape")
def reshape(q: QuantizedArray, *, new_sizes: Any, dimensions: Any = None, **params: Any) -> Any:
    if dimensions is not None or params.get("sharding") is not None:
        return NotImplemented
    return q if tuple(new_sizes) == q.shape else _shapes.reshape(q, new_sizes)


@register("broadcast_in_dim")
def broadcast_in_dim(q: QuantizedArray, *, shape: Any, broadcast_dimensions: Any, **params: Any) -> Any:
    if params.get("sharding") is not None:
        return NotImplemented
    return _shapes.broadcast_in_dim(q, shape, broadcast_dimensions)


@register("squeeze")
def squeeze(q: QuantizedArray, *, dimensions: Any, **params: Any) -> Any:
    return _shapes.squeeze(q, dimensions)


@register("slice")
def slice_(q: QuantizedArray, *, start_indices: Any, limit_indices: Any, strides: Any = None, **params: Any) -> Any:
    return _shapes.slice_(q, start_indices, limit_indices, strides)


@register("dynamic_slice")
def dynamic_slice(q: QuantizedArray, *starts: jax.Array, slice_sizes: Any, **params: Any) -> Any:
    return _lookup.dynamic_slice(q, starts, slice_sizes)


@register("gather")
def gather(q: QuantizedArray, indices: jax.Array, **params: Any) -> Any:
    return _lookup.gather(q, indices, params)


@register("split")
def split(q: QuantizedArray, *, sizes: Any, axis: int, **params: Any) -> Any:
    pieces, start = [], 0
    for size in sizes:
        low, high = [0] * q.ndim, list(q.shape)
        low[axis], high[axis] = start, start + size
        pieces.append(_shapes.slice_(q, low, high, None))
        start += size
    return NotImplemented if any(p is NotImplemented for p in pieces) else pieces


@register("concatenate")
def concatenate(*operands: QuantizedArray, dimension: int, **params: Any) -> Any:
    return _shapes.concatenate(operands, dimension)


@register("stack")
def stack(*operands: QuantizedArray, axis: int, **params: Any) -> Any:
    """A new axis in every storage, then joined along it."""
    shape = (*operands[0].shape[:axis], 1, *operands[0].shape[axis:])
    dims = [i for i in range(len(shape)) if i != axis]
    widened = [_shapes.broadcast_in_dim(q, shape, dims) for q in operands]
    return _shapes.concatenate(widened, axis)


@register("rev")
def rev(q: QuantizedArray, *, dimensions: Any, **params: Any) -> Any:
    return _shapes.rev(q, dimensions)


@register("select_n")
def select_n(which: jax.Array, *cases: QuantizedArray, **params: Any) -> Any:
    return _shapes.select(which, cases)


@register("convert_element_type")
def convert_element_type(q: QuantizedArray, *, new_dtype: Any, **params: Any) -> Any:
    """Lazy: the values are decoded to the new dtype whenever they are decoded."""
    if params.get("sharding") is not None or not jnp.issubdtype(new_dtype, jnp.floating):
        return NotImplemented
    return q if jnp.dtype(new_dtype) == q.dtype else q.replaced(dtype=jnp.dtype(new_dtype))


# -- arithmetic that folds into the scale ------------------------------------------------------------------------------


@register("neg")
def neg(q: QuantizedArray, **params: Any) -> Any:
    if not jnp.issubdtype(q.dtype, jnp.floating):
        return NotImplemented
    return fold(q, np.array(-1, q.dtype))


@register("mul")
def mul(q: QuantizedArray, factor: jax.Array, **params: Any) -> Any:
    return fold(q, factor)


@register("div")
def div(q: QuantizedArray, divisor: jax.Array, **params: Any) -> Any:
    return fold(q, divisor, divide=True)


def fold(q: QuantizedArray, factor: Any, divide: bool = False) -> Any:
    """`q * factor` (or `/`) as a change of the scale, where the factor is constant along what one scale serves."""
    dtype = jnp.promote_types(q.dtype, factor.dtype)
    if not jnp.issubdtype(dtype, jnp.floating) or factor.ndim > q.ndim or not any(p.is_scale for p in q.parts):
        return NotImplemented
    traced = isinstance(factor, traces.Tracer)
    factor = factor.reshape((1,) * (q.ndim - factor.ndim) + factor.shape)
    free, blocked, part = _shapes.free(q), _shapes.blocked_axis(q), q.scale_part
    scale = q.part(part)
    varying = [axis for axis in range(q.ndim) if factor.shape[axis] != 1]
    if blocked in varying or any(factor.shape[axis] != q.shape[axis] for axis in varying):
        return NotImplemented
    # One scale for the whole array may become one per channel, no more.
    if scale is not None and scale.size > 1 and any(scale.shape[free.index(axis)] == 1 for axis in varying):
        return NotImplemented
    moved = factor.reshape(*[factor.shape[axis] for axis in free], *[1] * part.tail)
    moved = moved.astype(wide(moved.dtype))
    return q.scaled(1 / moved if divide else moved, dtype, traced=traced)


# -- products ----------------------------------------------------------------------------------------------------------


@register("dot_general")
def dot_general_right(primitive: Any, lhs: jax.Array, rhs: QuantizedArray, **params: Any) -> Any:
    return _gradients.product(
        lambda x, q: _dot.dot_general(primitive, x, q, q_first=False, params=params),
        lambda x, q: materialize_handler(primitive, x, q, params=params),
        lhs,
        rhs,
    )


@register("dot_general")
def dot_general_left(primitive: Any, lhs: QuantizedArray, rhs: jax.Array, **params: Any) -> Any:
    return _gradients.product(
        lambda x, q: _dot.dot_general(primitive, x, q, q_first=True, params=params),
        lambda x, q: materialize_handler(primitive, q, x, params=params),
        rhs,
        lhs,
    )


@register("dot_general")
def dot_general_both(primitive: Any, lhs: QuantizedArray, rhs: QuantizedArray, **params: Any) -> Any:
    """The smaller one is materialized; the other stays as it is."""
    if lhs.size <= rhs.size:
        return dot_general_right(primitive, lhs.materialize(), rhs, **params)
    return dot_general_left(primitive, lhs, rhs.materialize(), **params)


@register("ragged_dot_general")
def ragged_dot_general(
    primitive: Any, lhs: jax.Array, rhs: QuantizedArray, group_sizes: jax.Array, **params: Any
) -> Any:
    return _gradients.product(
        lambda x, q, sizes: _dot.ragged_dot(x, q, sizes, params),
        lambda x, q, sizes: materialize_handler(primitive, x, q, sizes, params=params),
        lhs,
        rhs,
        group_sizes,
    )
