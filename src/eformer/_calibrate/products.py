"""Second moments of what an array is multiplied with: one product at a time, as sums over its tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from eformer._formats.blocks import largest
from eformer._jax import avals
from eformer._kernels import group_tiles

from .views import Sums, _NotFollowed

TILE = 256  # rows of a group that are multiplied at a time


def moments(x: Any, batch: Sequence[int], contracted: Sequence[int], diagonal_only: bool) -> Sums:
    """Sums over the other axes of x, the tokens: axes as in `views.Sums`, in the order given.

    Products are exact in float32 or, for x in float32, rounded once; nothing is added in less than float32.
    """
    x = _floating(x)
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    tokens = tuple(axis for axis in range(x.ndim) if axis not in {*batch, *contracted})
    order = [*batch, *contracted]
    kept = [axis for axis in range(x.ndim) if axis not in tokens]
    sort = [kept.index(axis) for axis in order]
    wide = x.astype(dtype)
    found = {"absmax": lax.transpose(jnp.squeeze(largest(wide, tokens), tokens), sort)}
    if diagonal_only:
        found["diagonal"] = lax.transpose(jnp.sum(jnp.square(wide), axis=tokens), sort)
    else:
        found["moment"] = _second_moment(x, tuple(batch), tuple(contracted), tokens, dtype)
        found["diagonal"] = _diagonal(found["moment"], len(batch), len(contracted))
    sizes = tuple(x.shape[axis] for axis in batch)
    count = jnp.full(sizes, math.prod(x.shape[axis] for axis in tokens), jnp.float32)
    return {**{name: avals.on_every_device(array) for name, array in found.items()}, "count": count}


def _floating(x: Any) -> Any:
    narrow = not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2
    return x.astype(jnp.float32) if narrow else x


def _second_moment(x: Any, batch: tuple[int, ...], contracted: tuple[int, ...], tokens: Any, dtype: Any) -> Any:
    explicit = avals.explicit_sharding_of(x)
    out_sharding = None if explicit is None else explicit.update(spec=PartitionSpec())
    moment = lax.dot_general(
        x,
        x,
        ((tokens, tokens), (batch, batch)),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=dtype,
        out_sharding=out_sharding,
    )
    ascending = sorted(contracted)  # as dot_general has the axes that are left
    side = [ascending.index(axis) for axis in contracted]
    first, second = len(batch), len(batch) + len(contracted)
    return lax.transpose(moment, [*range(first), *(first + i for i in side), *(second + i for i in side)])


def _diagonal(moment: Any, batch: int, sides: int) -> Any:
    lead, sizes = moment.shape[:batch], moment.shape[batch : batch + sides]
    size = math.prod(sizes)
    flat = avals.on_every_device(moment).reshape(*lead, size, size)
    return jnp.diagonal(flat, axis1=-2, axis2=-1).reshape(*lead, *sizes)


def grouped(x: Any, group_sizes: Any, diagonal_only: bool) -> Sums:
    """Rows of x (M, K) in consecutive groups: sums of every group, (G, K, K) and so on."""
    x = avals.on_every_device(_floating(x))
    group_sizes = avals.on_every_device(group_sizes)
    dtype, (rows, channels), groups = jnp.promote_types(x.dtype, jnp.float32), x.shape, group_sizes.shape[0]
    tiles = group_tiles.cut(group_sizes, rows, min(TILE, max(rows, 1)))
    padded = jnp.concatenate([x, jnp.zeros((1, channels), x.dtype)])  # a row that is not there is a row of zeros
    zeros = {"diagonal": (groups, channels), "absmax": (groups, channels)}
    zeros |= {} if diagonal_only else {"moment": (groups, channels, channels)}

    def add(sums: Sums, tile: Any) -> tuple[Sums, None]:
        group, at = tile
        part = moments(padded[at], (), (1,), diagonal_only)
        added = {n: s.at[group].add(part[n]) for n, s in sums.items() if n != "absmax"}
        return {**added, "absmax": sums["absmax"].at[group].max(part["absmax"])}, None

    start = {name: avals.zeros_like_in(shape, dtype, x) for name, shape in zeros.items()}
    sums, _ = lax.scan(add, start, (tiles.group, tiles.rows))
    return {**sums, "count": group_sizes.astype(jnp.float32)}


def patches(x: Any, kernel: Sequence[int], params: dict[str, Any]) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
    """What a convolution multiplies its kernel (of this shape) with: patches of x, the axes of them that are
    contracted, and the axes of the kernel these are."""
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        raise _NotFollowed("a convolution in groups")
    numbers = params["dimension_numbers"]
    _, channel, *window = numbers.rhs_spec
    cut = lax.conv_general_dilated_patches(
        _floating(x),
        [kernel[axis] for axis in window],
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        dimension_numbers=numbers,
        precision=lax.Precision.HIGHEST,
    )
    feature = numbers.out_spec[1]
    sizes = (kernel[channel], *(kernel[axis] for axis in window))  # in this order in the features
    cut = jnp.moveaxis(cut, feature, -1)
    cut = cut.reshape(*cut.shape[:-1], *sizes)
    first = cut.ndim - len(sizes)
    order = sorted(range(len(sizes)), key=(channel, *window).__getitem__)
    return cut, tuple(first + i for i in order), tuple((channel, *window)[i] for i in order)


def added(a: Sums, b: Sums) -> Sums:
    """The sums of both."""
    return {name: jnp.maximum(x, b[name]) if name == "absmax" else x + b[name] for name, x in a.items()}


def added_at(sums: Sums, part: Sums, index: Sequence[Any]) -> Sums:
    """`sums` with `part` added at one index, or several positions, of some of the leading axes (None: all of one)."""
    where = [at for at, entry in enumerate(index) if entry is not None]
    if not where:
        return added(sums, part)
    if len(where) == 1:
        place = tuple(slice(None) if entry is None else entry for entry in index)
        return {
            name: x.at[place].max(part[name]) if name == "absmax" else x.at[place].add(part[name])
            for name, x in sums.items()
        }
    return {name: _added_at_many(x, part[name], index, where, name == "absmax") for name, x in sums.items()}


def _added_at_many(x: Any, part: Any, index: Sequence[Any], where: Sequence[int], largest: bool) -> Any:
    """Several indexed axes: moved to the front, where they are indexed together, as the product of their positions."""
    kept = [at for at in where if jnp.ndim(index[at])]
    before = {at: sum(1 for other in range(at) if index[other] is None or jnp.ndim(index[other])) for at in kept}
    part = jnp.moveaxis(part, [before[at] for at in kept], range(len(kept)))
    moved = jnp.moveaxis(x, where, range(len(where)))
    spread, depth = [], 0
    for at in where:
        entry = jnp.asarray(index[at])
        if entry.ndim:
            depth += 1
            entry = entry.reshape(-1, *[1] * (len(kept) - depth))
        spread.append(entry)
    placed = moved.at[tuple(spread)]
    moved = placed.max(part) if largest else placed.add(part)
    return jnp.moveaxis(moved, range(len(where)), where)


def reduced_over_devices(sums: Sums, axes: Sequence[str]) -> Sums:
    """Inside shard_map: sums over the tokens of all devices along these mesh axes.

    Devices may hold the same tokens, which are counted once. Types do not say so (JAX marks as varying what meets
    something that varies), but the largest values do: they are equal to the last bit.
    """
    for axis in axes:
        absmax = sums["absmax"]
        same = jnp.all(lax.pmax(absmax, axis) == lax.pmin(absmax, axis))
        share = jnp.where(same, 1.0 / lax.axis_size(axis), 1.0)
        sums = {
            name: lax.pmax(array, axis) if name == "absmax" else lax.psum(array, axis) * share
            for name, array in sums.items()
        }
    return sums


def same_on_devices(sums: Sums, axes: Sequence[str]) -> Sums:
    """Inside shard_map: numbers that are equal along these mesh axes, told to the types."""
    for axis in axes:
        sums = {name: lax.pmax(array, axis) for name, array in sums.items()}
    return sums


def zeros(shapes: dict[str, jax.ShapeDtypeStruct], axes: frozenset[str]) -> Sums:
    """Where sums of these shapes begin, varying over the mesh axes that they will vary over."""
    return {name: avals.vary(jnp.zeros(s.shape, s.dtype), axes) for name, s in shapes.items()}
