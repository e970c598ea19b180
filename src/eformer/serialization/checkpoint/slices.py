"""Slices of quantized arrays, read from storage: which part of each stored array a slice of the whole needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.tree_util as jtu

from eformer._formats.base import Part, QuantizedArray
from eformer._formats.shapes import blocked_axis, free
from eformer._lora.array import LoraArray
from eformer.errors import CheckpointError

Read = Callable[[str, Any], Any]


def read(q: Any, tensors: Mapping[int, str], index: Any, fetch: Read) -> Any:
    """`q`, whose arrays are shapes standing for `tensors` (by id), cut to `index`; `fetch` reads part of a tensor."""
    cuts = normalized(index, q.shape)
    blocked, pad = blocked_axis(q), q.pad
    if blocked is not None:
        pad = _checked_blocks(q, cuts[blocked], q.shape[blocked])
    parts = {}
    for part in q.parts:
        stored = getattr(q, part.field)
        if stored is None:
            parts[part.field] = None
        elif id(stored) in tensors:
            parts[part.field] = fetch(tensors[id(stored)], part_index(q, part, stored.shape, cuts))
        else:  # compressed: small, and not laid out like the others, so it is read whole
            whole = _filled(stored, tensors, fetch)
            parts[part.field] = whole.expanded()[part_index(q, part, whole.shape, cuts)]
    return q.moved(parts, q.blocked, pad=pad)


def read_lora(q: LoraArray, tensors: Mapping[int, str], index: Any, fetch: Read) -> LoraArray:
    """As `read`, for a weight with an adapter: each factor is cut along the axes it shares with the weight."""
    cuts = normalized(index, q.shape)
    middle = q.ndim - q.right
    batch, every = middle - q.left, slice(None)
    if isinstance(q.w, QuantizedArray):
        w = read(q.w, tensors, tuple(cuts), fetch)
    elif id(q.w) in tensors:
        w = fetch(tensors[id(q.w)], tuple(cuts))
    else:
        raise CheckpointError(f"is an adapter over a {type(q.w).__name__}, of which no slices can be read.")
    a = fetch(tensors[id(q.a)], (*cuts[:middle], every))
    b = fetch(tensors[id(q.b)], (*cuts[:batch], every, *cuts[middle:]))
    return LoraArray(w, a, b, scale=q.scale, left=q.left, right=q.right)


def normalized(index: Any, shape: tuple[int, ...]) -> list[slice]:
    """One slice of step 1 per axis, within bounds and not empty.

    >>> normalized((slice(1, None), ...), (4, 5))
    [slice(1, 4, 1), slice(0, 5, 1)]
    """
    given = list(index) if isinstance(index, tuple) else [index]
    missing = len(shape) - len(given) + given.count(...)
    if given.count(...) > 1 or missing < 0:
        raise IndexError(f"{index!r} does not index an array of shape {list(shape)}.")
    at = given.index(...) if ... in given else len(given)
    given[at : at + 1] = [slice(None)] * missing
    cuts = []
    for axis, (cut, size) in enumerate(zip(given, shape, strict=True)):
        if not isinstance(cut, slice):
            raise TypeError(f"axis {axis} of a quantized array is read by a slice, got {cut!r}.")
        start, stop, step = cut.indices(size)
        if step != 1 or stop <= start:
            raise IndexError(f"axis {axis}: {cut!r} of {size} entries is empty or has a step; read a plain range.")
        cuts.append(slice(start, stop, 1))
    return cuts


def part_index(q: Any, part: Part, shape: tuple[int, ...], cuts: list[slice]) -> tuple[slice, ...]:
    """The index into one part; an axis of size 1 serves all entries of the logical axis."""
    axes, blocked = free(q), blocked_axis(q)
    found = [cuts[axis] if shape[i] == q.shape[axis] else slice(None) for i, axis in enumerate(axes)]
    for i, size in enumerate(shape[len(axes) :]):
        if blocked is not None and i == 0 and size != 1:
            found.append(slice(cuts[blocked].start // part.unit, -(-cuts[blocked].stop // part.unit)))
        else:
            found.append(slice(None))
    return tuple(found)


def _checked_blocks(q: Any, cut: slice, size: int) -> int:
    """The padding of the slice; refuses one that would cut a block."""
    unit = max(part.unit for part in q.parts)
    if cut.start % unit or (cut.stop % unit and cut.stop != size):
        raise CheckpointError(
            f"holds blocks of {unit} values along axis {blocked_axis(q)}, and {cut.start}:{cut.stop} would cut one.",
            fix=f"Begin and end at multiples of {unit}, or slice another axis.",
        )
    return q.pad if cut.stop == size else 0


def _filled(stored: Any, tensors: Mapping[int, str], fetch: Read) -> Any:
    return jtu.tree_map(lambda shape: fetch(tensors[id(shape)], ...), stored)
