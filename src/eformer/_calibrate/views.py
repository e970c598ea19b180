"""How an array shows a leaf: which of its axes are which axes of the leaf, after transposes, slices and reshapes.

A piece (axis, stride, size) is an axis of the leaf or, after a reshape, a factor of one: index i of it stands for
i * stride along the axis. An axis of the array is a tuple of pieces, the slowest first; no pieces make an axis that the
leaf does not have (it was broadcast, or has length 1). An axis of the leaf may be gone: one index of it was taken.

What cannot be followed any further raises `_NotFollowed`, with the operation; rules turn it into a note.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from eformer._jax import avals, traces


class _NotFollowed(Exception):
    """A leaf is lost sight of, by an operation that the message names."""


Piece = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class View:
    """One array as a view of leaf number `source`, whose shape is `leaf`.

    `taken` holds the index of leaf axes that are gone, `picked` the positions along leaf axes of which a part is left;
    both may be traced. `starts` says where along an axis this part begins, for arrays that are concatenations.
    """

    source: int
    leaf: tuple[int, ...]
    axes: tuple[tuple[Piece, ...], ...]
    shape: tuple[int, ...]
    taken: Mapping[int, Any]
    picked: Mapping[int, Any]
    starts: tuple[int | None, ...]

    @property
    def is_matrix(self) -> bool:
        """Are two axes of the leaf left? A row of a table is an activation, no weight."""
        return len({axis for pieces in self.axes for axis, _, _ in pieces}) >= 2


def whole(source: int, shape: Sequence[int]) -> View:
    """The leaf itself."""
    axes = tuple(((axis, 1, size),) for axis, size in enumerate(shape))
    return View(source, tuple(shape), axes, tuple(shape), {}, {}, (None,) * len(shape))


def transpose(view: View, permutation: Sequence[int]) -> View:
    def moved(entries: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(entries[axis] for axis in permutation)

    return dataclasses.replace(view, axes=moved(view.axes), shape=moved(view.shape), starts=moved(view.starts))


def squeeze(view: View, dimensions: Sequence[int]) -> View:
    taken = dict(view.taken)
    picked = dict(view.picked)
    for dimension in dimensions:
        for axis, _, _ in view.axes[dimension]:
            if axis in picked:
                taken[axis] = picked.pop(axis)[0]
    kept = [axis for axis in range(len(view.shape)) if axis not in dimensions]
    return transpose(dataclasses.replace(view, taken=taken, picked=picked), kept)


def broadcasted(view: View, shape: Sequence[int], dimensions: Sequence[int]) -> View:
    """`lax.broadcast_in_dim`: operand axis i is axis `dimensions[i]` of the result."""
    grown = [i for i, d in enumerate(dimensions) if view.shape[i] != shape[d]]
    kept = squeeze(view, grown)
    place = {d: at for at, d in enumerate(d for i, d in enumerate(dimensions) if i not in grown)}
    axes = tuple(kept.axes[place[d]] if d in place else () for d in range(len(shape)))
    starts = tuple(kept.starts[place[d]] if d in place else None for d in range(len(shape)))
    return dataclasses.replace(kept, axes=axes, shape=tuple(shape), starts=starts)


def pick(view: View, axis: int, positions: Any) -> View:
    """Entries `positions` (known or traced) along one axis of the array."""
    size, pieces = len(positions), view.axes[axis]
    if view.starts[axis] is not None or len(pieces) > 1:
        raise _NotFollowed("a slice of joined axes")
    picked = dict(view.picked)
    if pieces:
        leaf_axis, _, length = pieces[0]
        if leaf_axis not in picked and length != view.leaf[leaf_axis]:
            raise _NotFollowed("a slice of a part of an axis")
        picked[leaf_axis] = jnp.asarray(picked[leaf_axis])[positions] if leaf_axis in picked else positions
        pieces = ((leaf_axis, 1, size),)
    axes = (*view.axes[:axis], pieces, *view.axes[axis + 1 :])
    shape = (*view.shape[:axis], size, *view.shape[axis + 1 :])
    return dataclasses.replace(view, axes=axes, shape=shape, picked=picked)


def cut(view: View, positions: Sequence[Any], shape: Sequence[int]) -> View:
    """`pick` along every axis of an array of this shape of which not all is left."""
    for axis, (at, size) in enumerate(zip(positions, shape, strict=True)):
        if len(at) != size or isinstance(at, traces.Tracer) or not np.array_equal(at, np.arange(size)):
            view = pick(view, axis, at)
    return view


def _sliced(view: View, params: Mapping[str, Any], shape: Sequence[int]) -> View:
    limits = zip(params["start_indices"], params["limit_indices"], params["strides"] or [1] * len(shape), strict=True)
    return cut(view, [np.arange(*limit) for limit in limits], shape)


def reshape(view: View, shape: Sequence[int]) -> View:
    """The same pieces in other groups; a piece is cut in two where that is needed."""
    if any(start is not None for start in view.starts):
        raise _NotFollowed("a reshape of a concatenation")
    # Axes of length 1 are nobody's: those of the leaf that vanish so count as taken at 0.
    items: list[tuple[Piece | None, int]] = []
    taken, picked = dict(view.taken), dict(view.picked)
    for pieces, size in zip(view.axes, view.shape, strict=True):
        if not pieces and size > 1:
            items.append((None, size))
        for piece in pieces:
            if piece[2] > 1:
                items.append((piece, piece[2]))
            elif piece[0] in picked:
                taken[piece[0]] = picked.pop(piece[0])[0]
    axes = tuple(_group(items, size, picked) for size in shape)
    return dataclasses.replace(
        view, axes=axes, shape=tuple(shape), taken=taken, picked=picked, starts=(None,) * len(shape)
    )


def _group(items: list[tuple[Piece | None, int]], size: int, picked: Mapping[int, Any]) -> tuple[Piece, ...]:
    """Take pieces off the front of `items` until they make an axis of this size."""
    group: list[Piece | None] = []
    while size > 1:
        piece, length = items.pop(0)
        if length > size:
            if length % size or (piece is not None and piece[0] in picked):
                raise _NotFollowed("a reshape across axes")
            rest = length // size
            items.insert(0, (None if piece is None else (piece[0], piece[1], rest), rest))
            piece, length = None if piece is None else (piece[0], piece[1] * rest, size), size
        elif size % length:
            raise _NotFollowed("a reshape across axes")
        size //= length
        group.append(piece)
    if None in group and any(group):
        raise _NotFollowed("a reshape that joins broadcast axes")
    return tuple(piece for piece in group if piece is not None)


def concatenated(view: View, axis: int, start: int) -> View:
    """This view as the part that begins at `start` of a concatenation along `axis`."""
    starts = (*view.starts[:axis], start + (view.starts[axis] or 0), *view.starts[axis + 1 :])
    return dataclasses.replace(view, starts=starts)


def numbered(view: View, axis: int) -> tuple[View, Any] | None:
    """If an axis holds matrices of a stack by traced numbers: the view of the whole stack there, and the numbers."""
    pieces = view.axes[axis]
    numbers = view.picked.get(pieces[0][0]) if len(pieces) == 1 else None
    if not isinstance(numbers, traces.Tracer) or len(numbers) == 1:
        return None
    leaf_axis = pieces[0][0]
    size = view.leaf[leaf_axis]
    axes = (*view.axes[:axis], ((leaf_axis, 1, size),), *view.axes[axis + 1 :])
    shape = (*view.shape[:axis], size, *view.shape[axis + 1 :])
    picked = {other: at for other, at in view.picked.items() if other != leaf_axis}
    return dataclasses.replace(view, axes=axes, shape=shape, picked=picked), numbers


# What becomes of a view of an array by operations without other operands: the parameters and the array's shape are
# given. A view of a concatenation has a shape of its own.
MOVES: dict[str, Callable[[View, Mapping[str, Any], Sequence[int]], View]] = {
    "transpose": lambda view, params, _: transpose(view, params["permutation"]),
    "squeeze": lambda view, params, _: squeeze(view, params["dimensions"]),
    "reshape": lambda view, params, _: reshape(view, params["new_sizes"]),
    "broadcast_in_dim": lambda view, params, _: broadcasted(view, params["shape"], params["broadcast_dimensions"]),
    "slice": _sliced,
}
MOVES |= dict.fromkeys(
    ("copy", "copy_p", "name", "pvary", "pcast", "stop_gradient", "sharding_constraint", "reshard", "mesh_cast")
    + ("reduce_precision",),
    lambda view, *_: view,
)


# -- from sums over products with the array to sums for the leaf -------------------------------------------------------

# Sums of a product: "moment" (batch..., K..., K...), which may be missing, "diagonal" and "absmax" (batch..., K...) and
# "count" (batch...), where K... are the contracted axes, one by one. See `LeafStatistics`.
Sums = dict[str, Any]
SIDES = {"moment": 2, "diagonal": 1, "absmax": 1, "count": 0}


@dataclasses.dataclass(frozen=True)
class Projected:
    """Sums for a leaf: its contracted axes, its stack axes, and where along each of those they belong (None: all)."""

    axes: tuple[int, ...]
    stack: tuple[int, ...]
    sums: Sums
    index: tuple[Any, ...]


def project(view: View, batch: Sequence[int], contracted: Sequence[int], sums: Sums, sizes: Sequence[int]) -> Projected:
    """Sums of a product that has these axes of the array as batch and contracted axes, in terms of the leaf.

    `sizes` are the lengths of the leaf's axes when they are contracted (whole, where a device holds a part of them).
    """
    part = {**dict.fromkeys(batch, "batch"), **dict.fromkeys(contracted, "contracted")}
    parts: dict[int, set[str]] = {}
    for axis, pieces in enumerate(view.axes):
        for leaf_axis, _, _ in pieces:
            parts.setdefault(leaf_axis, set()).add(part.get(axis, "kept"))
    if any(len(found) > 1 for found in parts.values()):
        raise _NotFollowed("a product that contracts a part of an axis")
    if any(not view.axes[axis] and view.shape[axis] > 1 for axis in contracted):
        raise _NotFollowed("a product over a broadcast axis")
    gone = [axis for axis in range(len(view.leaf)) if axis not in parts]
    if not any(found == {"kept"} for found in parts.values()):
        gone = gone[:-1]  # one column of a matrix, which is no stack of columns
    axes = tuple(sorted(axis for axis, found in parts.items() if found == {"contracted"}))
    stack = tuple(sorted([*gone, *(axis for axis, found in parts.items() if found == {"batch"})]))
    found = {name: _arranged(view, batch, contracted, name, array, sizes) for name, array in sums.items()}
    index = tuple(view.taken.get(axis, 0) if axis in gone else view.picked.get(axis) for axis in stack)
    return Projected(axes, stack, found, index)


def _arranged(
    view: View, batch: Sequence[int], contracted: Sequence[int], name: str, array: Any, sizes: Sequence[int]
) -> Any:
    """One of the sums, its axes in the order of the leaf's."""
    dims = [(0, axis) for axis in batch] + [(1 + i, axis) for i in range(SIDES[name]) for axis in contracted]
    labels: list[tuple[int, int, int]] = []  # of every axis: batch or which side, leaf axis, minus its stride
    shape: list[int] = []
    for at, (side, axis) in reversed(list(enumerate(dims))):
        start, pieces = view.starts[axis], view.axes[axis]
        if start is not None:
            array = lax.slice_in_dim(array, start, start + view.shape[axis], axis=at)
        if not pieces:
            array = (jnp.max if name == "absmax" else jnp.sum)(array, at)
            continue
        whole_axis = side > 0 and len(pieces) == 1 and pieces[0][2] == view.leaf[pieces[0][0]]
        labels[:0] = [(side, leaf_axis, -stride) for leaf_axis, stride, _ in pieces]
        shape[:0] = [sizes[leaf_axis] if whole_axis else size for leaf_axis, _, size in pieces]
    order = sorted(range(len(labels)), key=labels.__getitem__)
    array = lax.transpose(array.reshape(shape), order)
    merged: dict[tuple[int, int], int] = {}
    for at in order:
        merged[labels[at][:2]] = merged.get(labels[at][:2], 1) * shape[at]
    array = array.reshape(tuple(merged.values()))
    for at, (side, leaf_axis) in enumerate(merged):
        if side and leaf_axis in view.picked:  # the channels that are not there are zeros
            whole_shape = (*array.shape[:at], sizes[leaf_axis], *array.shape[at + 1 :])
            place = (slice(None),) * at + (view.picked[leaf_axis],)
            array = avals.zeros_like_in(whole_shape, array.dtype, array).at[place].add(array)
    return array
