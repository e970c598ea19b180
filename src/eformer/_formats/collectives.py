"""Collectives that move values between devices move codes and scales: what FSDP gathers and a pipeline sends on.

Each device of a `shard_map`, or place of a `vmap` with an axis name, has storage of one layout, and scales of its own.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from eformer._core import register
from eformer._jax.jaxprs import computed

from .base import Packed, Part, QuantizedArray
from .shapes import blocked_axis, broadcast_in_dim, free, rebuilt
from .wrapped import Wrapped


@register("ppermute")
def ppermute(primitive: Any, q: Packed, *, axis_name: Any, perm: Any, **params: Any) -> Any:
    """All that is stored travels. Who receives nothing has zeros, which mean zeros only beside a scale of zero."""
    filled = len({to for _, to in perm}) == lax.axis_size(axis_name)
    if not filled and not (isinstance(q, QuantizedArray) and q.has_scale):
        return NotImplemented
    send = {"axis_name": axis_name, "perm": perm, **params}
    return jax.tree.map(lambda leaf: computed(primitive, [leaf], send), q)


@register("all_gather")
@register("all_gather_invariant")
@register("all_gather_reduced")
def all_gather(primitive: Any, q: QuantizedArray, *, all_gather_dimension: int, tiled: bool, **params: Any) -> Any:
    """The arrays of all devices joined: along a free axis, along the blocked one at whole blocks, or along a new one.

    Not along an axis that shares a scale, because every device may have another one.
    """
    axis = all_gather_dimension
    if not tiled:
        dims = [i for i in range(q.ndim + 1) if i != axis]
        q = broadcast_in_dim(q, shape=(*q.shape[:axis], 1, *q.shape[axis:]), broadcast_dimensions=dims)
    blocked, axes = blocked_axis(q), free(q)
    if axis == blocked and (q.pad or not q.blocks_carry_scales):
        return NotImplemented

    def change(part: Part, array: jax.Array) -> Any:
        i = len(axes) if axis == blocked else axes.index(axis)
        if axis != blocked and array.shape[i] != q.shape[axis]:
            return NotImplemented
        return computed(primitive, [array], {"all_gather_dimension": i, "tiled": True, **params})

    return rebuilt(q, change, blocked, q.ndim)


@register("all_gather")
@register("all_gather_invariant")
@register("all_gather_reduced")
def all_gather_wrapped(primitive: Any, q: Wrapped, *, all_gather_dimension: int, tiled: bool, **params: Any) -> Any:
    """What is beside the weight must have the axis too, or each device may have something else there."""
    axis = all_gather_dimension
    full = all(
        axis in axes and getattr(q, name).shape[list(axes).index(axis)] == q.shape[axis]
        for name, axes in q.beside().items()
    )
    if not tiled or axis in q.uncut() or not full:
        return NotImplemented

    def join(x: Any, axes: Any) -> Any:
        return computed(primitive, [x], {"all_gather_dimension": list(axes).index(axis), "tiled": True, **params})

    return q.moved(join)
