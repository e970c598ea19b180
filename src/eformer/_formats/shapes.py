"""What storage can do without decoding, for every quantized array: shapes, dtypes, factors.

Each handler is exact and returns an array of the same type, or NotImplemented: the core then materializes under the
policy in force. Logical axes are non-negative here. `free(q)` lists those that are not blocked, in the order every part
stores them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eformer._core import register
from eformer._core.materialization import decode, dense_for
from eformer._jax import traces

from . import sharding as _sharding
from . import turned
from .base import Part, QuantizedArray, same_scales
from .blocks import wide
from .gradients import FactoredScale


def blocked_axis(q: Any) -> int | None:
    return None if q.blocked is None else q.ndim + q.blocked


def free(q: Any) -> list[int]:
    return [axis for axis in range(q.ndim) if axis != blocked_axis(q)]


def rebuilt(q: Any, change: Callable[[Part, jax.Array], Any], blocked: int | None, ndim: int, **more: Any) -> Any:
    """`q` with every stored part changed; `blocked` is where the blocked axis is among `ndim` axes afterwards."""
    parts = {}
    for part in q.parts:
        array = q.part(part)
        made: Any = None if array is None else change(part, array)
        if made is NotImplemented:
            return NotImplemented
        parts[part.field] = FactoredScale(made) if part.is_scale and q.carries_factor else made
    return q.moved(parts, None if blocked is None else blocked - ndim, **more)


def _sharding_after(q: Any, order: Sequence[int | None]) -> Any:
    """The sharding carried along when new axis i is old axis order[i] (None: a new axis)."""
    if not isinstance(q.sharding, jax.sharding.NamedSharding) or len(q.sharding.spec) > q.ndim:
        return None
    spec = (*q.sharding.spec, *[None] * (q.ndim - len(q.sharding.spec)))
    moved = jax.sharding.PartitionSpec(*(None if axis is None else spec[axis] for axis in order))
    return jax.sharding.NamedSharding(q.sharding.mesh, moved)


@register("transpose")
def transpose(q: QuantizedArray, *, permutation: Sequence[int], **params: Any) -> Any:
    blocked, axes = blocked_axis(q), free(q)
    order = [axes.index(axis) for axis in permutation if axis != blocked]

    def change(part: Part, array: jax.Array) -> jax.Array:
        same = order == sorted(order)
        return array if same else lax.transpose(array, [*order, *range(len(order), array.ndim)])

    where = None if blocked is None else list(permutation).index(blocked)
    made = rebuilt(q, change, where, q.ndim, sharding=_sharding_after(q, permutation))
    moved = order != sorted(order) and isinstance(q.part(q.parts[0]), traces.Tracer)
    return turned.remember(made, q, permutation) if moved else made


@register("broadcast_in_dim")
def broadcast_in_dim(q: QuantizedArray, *, shape: Any, broadcast_dimensions: Any, **params: Any) -> Any:
    blocked, axes, dims = blocked_axis(q), free(q), list(broadcast_dimensions)
    resized = blocked is not None and shape[dims[blocked]] != q.shape[blocked]
    if resized or params.get("sharding") is not None:
        return NotImplemented
    where = None if blocked is None else dims[blocked]
    kept = [axis for axis in range(len(shape)) if axis != where]

    def change(part: Part, array: jax.Array) -> jax.Array:
        source = {dims[axis]: i for i, axis in enumerate(axes)}
        sizes = []
        for axis in kept:
            i = source.get(axis)
            shared = i is not None and array.shape[i] == 1 and q.shape[axes[i]] != 1
            sizes.append(1 if shared else shape[axis])
        tail = array.shape[len(axes) :]
        places = [kept.index(dims[axis]) for axis in axes] + list(range(len(kept), len(kept) + len(tail)))
        return lax.broadcast_in_dim(array, (*sizes, *tail), places)

    order: list[int | None] = [dims.index(axis) if axis in dims else None for axis in range(len(shape))]
    return rebuilt(q, change, where, len(shape), sharding=_sharding_after(q, order))


@register("squeeze")
def squeeze(q: QuantizedArray, *, dimensions: Sequence[int], **params: Any) -> Any:
    blocked, axes = blocked_axis(q), free(q)
    if blocked in dimensions:
        return NotImplemented
    kept = [axis for axis in range(q.ndim) if axis not in dimensions]

    def change(part: Part, array: jax.Array) -> jax.Array:
        return lax.squeeze(array, [i for i, axis in enumerate(axes) if axis in dimensions])

    where = None if blocked is None else kept.index(blocked)
    return rebuilt(q, change, where, len(kept), sharding=_sharding_after(q, kept))


@register("reshape")
def reshape(q: QuantizedArray, *, new_sizes: Any, dimensions: Any = None, **params: Any) -> Any:
    new = tuple(new_sizes)
    if dimensions is not None or params.get("sharding") is not None:
        return NotImplemented
    if new == q.shape:
        return q
    if math.prod(new) != q.size:  # `lax.reshape` leaves this to the compiler
        raise ValueError(
            f"{q.size} values of shape {q.shape} cannot be reshaped to {new}, which has {math.prod(new)}. "
            f"Give sizes whose product is {q.size}."
        )
    groups = reshape_groups(q.shape, new)
    if groups is None:
        return NotImplemented
    blocked, axes = blocked_axis(q), free(q)
    where = None
    if blocked is not None:
        where = _blocked_after(q, blocked, new, groups)
        if where is None:
            return NotImplemented

    def change(part: Part, array: jax.Array) -> Any:
        sizes: list[int] = []
        for old_axes, new_axes in groups:
            held = [array.shape[axes.index(a)] for a in old_axes if a != blocked]
            logical = [q.shape[a] for a in old_axes if a != blocked]
            wanted = [new[a] for a in new_axes if a != where]
            if held == logical:
                sizes += wanted
            elif math.prod(held) == 1:
                sizes += [1] * len(wanted)
            else:
                return NotImplemented
        return array.reshape(*sizes, *array.shape[len(axes) :])

    return rebuilt(q, change, where, len(new), sharding=_sharding.after_reshape(q, new, groups))


def reshape_groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]] | None:
    """Cut both shapes into runs of equal size, as fine as possible. Sizes of 1 join a neighbour.

    >>> reshape_groups((2, 3, 4), (6, 4))
    [([0, 1], [0]), ([2], [1])]
    """
    if 0 in old:
        return None
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        left, right = [i] if i < len(old) else [], [j] if j < len(new) else []
        a, b = (old[i] if left else 1), (new[j] if right else 1)
        i, j = i + len(left), j + len(right)
        while a != b:
            if a < b:
                a, left, i = a * old[i], [*left, i], i + 1
            else:
                b, right, j = b * new[j], [*right, j], j + 1
        groups.append((left, right))
    return groups


def _blocked_after(q: Any, blocked: int, new: Sequence[int], groups: Any) -> int | None:
    """Where the blocked axis is after the reshape, if it survives as an axis of its own."""
    old_axes, new_axes = next(g for g in groups if blocked in g[0])
    size = q.shape[blocked]
    if size == 1 or math.prod(q.shape[a] for a in old_axes) != size:
        return None
    same = [a for a in new_axes if new[a] == size]
    return same[0] if same else None


@register("slice")
def slice_(
    primitive: Any, q: QuantizedArray, *, start_indices: Any, limit_indices: Any, strides: Any = None, **params: Any
) -> Any:
    """Whole blocks stay packed. What begins or ends inside of one is dense, and only the blocks it touches are decoded.

    Vectors are activations, as those of a lookup are; the blocks of a matrix are materialized, under the policy.
    """
    blocked, steps = blocked_axis(q), strides or (1,) * q.ndim
    found = _stored_slice(q, start_indices, limit_indices, steps)
    cuts = list(zip(start_indices, limit_indices, steps, strict=True))
    if found is not NotImplemented or blocked is None or any(b <= a for a, b, _ in cuts):
        return found
    low, high, step = cuts[blocked]
    unit, size = max(p.unit for p in q.parts), q.shape[blocked]
    first, last = low // unit * unit, min(-(-high // unit) * unit, size)
    piece = _stored_slice(
        q,
        [first if axis == blocked else a for axis, (a, _, _) in enumerate(cuts)],
        [last if axis == blocked else b for axis, (_, b, _) in enumerate(cuts)],
        [1 if axis == blocked else s for axis, (_, _, s) in enumerate(cuts)],
    )
    if piece is NotImplemented or piece.shape == q.shape:
        return NotImplemented
    vector = sum(len(range(*cut)) != 1 for cut in cuts) <= 1 < q.ndim
    dense = decode(piece, q) if vector else dense_for(primitive, piece)
    return lax.slice_in_dim(dense, low - first, high - first, step, blocked)


def _stored_slice(q: Any, start: Sequence[int], limit: Sequence[int], strides: Sequence[int]) -> Any:
    """A slice of codes and scales; NotImplemented where it would cut a block."""
    cuts = [slice(*cut) for cut in zip(start, limit, strides, strict=True)]
    pad = pad_after(q, cuts)
    if pad is None or any(b <= a for a, b in zip(start, limit, strict=True)):
        return NotImplemented

    def change(part: Part, array: jax.Array) -> jax.Array:
        index = zip(cuts_of_part(q, part, array.shape, cuts), array.shape, strict=True)
        return lax.slice(array, *zip(*(cut.indices(n) for cut, n in index), strict=True))

    return rebuilt(q, change, blocked_axis(q), q.ndim, pad=pad)


def pad_after(q: Any, cuts: Sequence[slice]) -> int | None:
    """The padding of what these slices, one for every axis, take; None where they would cut a block."""
    if (blocked := blocked_axis(q)) is None:
        return q.pad
    cut, size, unit = cuts[blocked], q.shape[blocked], max(part.unit for part in q.parts)
    if cut.step != 1 or cut.start % unit or (cut.stop % unit and cut.stop != size):
        return None
    return q.pad if cut.stop == size else 0


def cuts_of_part(q: Any, part: Part, shape: Sequence[int], cuts: Sequence[slice]) -> tuple[slice, ...]:
    """The slices of one stored part, of whole blocks; an axis of size 1 serves all entries of the logical axis."""
    axes, blocked = free(q), blocked_axis(q)
    found = [cuts[axis] if shape[i] == q.shape[axis] else slice(None) for i, axis in enumerate(axes)]
    for i, size in enumerate(shape[len(axes) :]):
        if blocked is not None and i == 0 and size != 1:
            found.append(slice(cuts[blocked].start // part.unit, -(-cuts[blocked].stop // part.unit)))
        else:
            found.append(slice(None))
    return tuple(found)


@register("split")
def split(q: QuantizedArray, *, sizes: Any, axis: int, **params: Any) -> Any:
    pieces, start = [], 0
    for size in sizes:
        low, high = [0] * q.ndim, list(q.shape)
        low[axis], high[axis] = start, start + size
        pieces.append(_stored_slice(q, low, high, (1,) * q.ndim))
        start += size
    return NotImplemented if any(p is NotImplemented for p in pieces) else pieces


@register("unstack")
def unstack(q: QuantizedArray, *, axis: int, **params: Any) -> Any:
    """One array for each place of an axis, such as the layers of a stack."""
    pieces = split(q, sizes=(1,) * q.shape[axis], axis=axis) if axis != blocked_axis(q) else NotImplemented
    return pieces if pieces is NotImplemented else [squeeze(piece, dimensions=(axis,)) for piece in pieces]


@register("rev")
def rev(q: QuantizedArray, *, dimensions: Sequence[int], **params: Any) -> Any:
    blocked, axes = blocked_axis(q), free(q)
    if blocked in dimensions:
        return NotImplemented
    return rebuilt(
        q, lambda part, array: lax.rev(array, [i for i, a in enumerate(axes) if a in dimensions]), blocked, q.ndim
    )


def same_layout(arrays: Sequence[Any]) -> bool:
    first = arrays[0]
    return all(
        type(a) is type(first)
        and a.ndim == first.ndim
        and a.dtype == first.dtype
        and a.static_layout() == first.static_layout()
        and all(
            (x is None) == (y is None) and (x is None or x.dtype == y.dtype)
            for x, y in ((a.part(p), first.part(p)) for p in first.parts)
        )
        for a in arrays
    )


def _with_like_scales(arrays: Sequence[Any]) -> Sequence[Any]:
    """Bare codes next to scaled ones get a scale of one, stored scales next to multiplied ones are guarded as those."""
    bare = [isinstance(a, QuantizedArray) and not a.has_scale for a in arrays]
    if any(bare) and not all(bare):
        arrays = [a.scaled(jnp.ones((1,) * a.ndim), a.dtype) if b else a for a, b in zip(arrays, bare, strict=True)]
    if all(isinstance(a, QuantizedArray) for a in arrays) and not all(bare) and not same_scales(*arrays):
        arrays = [a.with_plain_scale() for a in arrays]
    if any(isinstance(a, QuantizedArray) and a.carries_factor for a in arrays):
        arrays = [a.with_factor(a.frozen_scale()) if isinstance(a, QuantizedArray) else a for a in arrays]
    return arrays


@register("concatenate")
def concatenate(*operands: QuantizedArray, dimension: int, **params: Any) -> Any:
    """Join arrays of one layout: along a free axis, or along the blocked one where it ends on whole blocks."""
    arrays = _with_like_scales(operands)
    first = arrays[0]
    if not same_layout(arrays):
        return NotImplemented
    blocked, axes = blocked_axis(first), free(first)
    along_blocked = dimension == blocked
    if along_blocked and (any(a.pad for a in arrays[:-1]) or not first.blocks_carry_scales):
        return NotImplemented
    if not along_blocked and any(a.pad != first.pad for a in arrays):
        return NotImplemented

    def change(part: Part, _: jax.Array) -> Any:
        pieces = [a.part(part) for a in arrays]
        i = len(axes) if along_blocked else axes.index(dimension)
        if not along_blocked and any(p.shape[i] != a.shape[dimension] for p, a in zip(pieces, arrays, strict=True)):
            return NotImplemented  # a scale shared along this axis, and each piece has its own
        if len({p.shape[:i] + p.shape[i + 1 :] for p in pieces}) > 1:
            return NotImplemented
        return lax.concatenate(pieces, i)

    return rebuilt(first, change, blocked, first.ndim, pad=arrays[-1].pad)


@register("stack")
def stack(*operands: QuantizedArray, axis: int, **params: Any) -> Any:
    """A new axis in every storage, then joined along it."""
    shape = (*operands[0].shape[:axis], 1, *operands[0].shape[axis:])
    dims = [i for i in range(len(shape)) if i != axis]
    widened = [broadcast_in_dim(q, shape=shape, broadcast_dimensions=dims) for q in operands]
    return concatenate(*widened, dimension=axis)


@register("select_n")
def select_n(which: jax.Array, *operands: QuantizedArray, **params: Any) -> Any:
    """One predicate for whole arrays."""
    cases = _with_like_scales(operands)
    if which.ndim or not same_layout(cases) or any(c.pad != cases[0].pad or c.shape != cases[0].shape for c in cases):
        return NotImplemented

    def change(part: Part, _: jax.Array) -> Any:
        pieces = [c.part(part) for c in cases]
        same = all(p.shape == pieces[0].shape for p in pieces)
        return lax.select_n(which, *pieces) if same else NotImplemented

    return rebuilt(cases[0], change, blocked_axis(cases[0]), cases[0].ndim)


@register("convert_element_type")
def convert_element_type(q: QuantizedArray, *, new_dtype: Any, **params: Any) -> Any:
    """Lazy: the values are decoded to the new dtype whenever they are decoded. These arrays have no weak types."""
    if params.get("sharding") is not None or params.get("weak_type") or not jnp.issubdtype(new_dtype, jnp.floating):
        return NotImplemented
    return q if jnp.dtype(new_dtype) == q.dtype else q.replaced(dtype=jnp.dtype(new_dtype))


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
    axes, blocked, part = free(q), blocked_axis(q), q.scale_part
    scale = q.part(part)
    varying = [axis for axis in range(q.ndim) if factor.shape[axis] != 1]
    if blocked in varying or any(factor.shape[axis] != q.shape[axis] for axis in varying):
        return NotImplemented
    # One scale for the whole array may become one per channel, no more.
    if scale is not None and scale.size > 1 and any(scale.shape[axes.index(axis)] == 1 for axis in varying):
        return NotImplemented
    moved = factor.reshape([*(factor.shape[axis] for axis in axes), *[1] * part.tail])
    moved = moved.astype(wide(moved.dtype))
    return q.scaled(1 / moved if divide else moved, dtype, traced=traced)
