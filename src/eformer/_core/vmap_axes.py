"""`jax.vmap` around a function maps the stored arrays, not the array: refuses the axes where that is not the same.

vmap takes axis `in_axes` of every child. For a batch axis (see `core_ndim`) that is the axis of the array. For an axis
among or behind those that belong together it is another one, and the values would be wrong.

A tracer of vmap knows its axis and the array it maps. If that is the very child of the array whose static data we were
rebuilt from, then vmap has taken that array apart: tracers of values that were computed inside may have their axis
anywhere. Nothing is left to see of `out_axes` when the result is put together, so those are not checked.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import jax.tree_util as jtu

from eformer import _messages, errors
from eformer._jax import traces

from .fields import layout
from .operators import ArrayOperators


class StaticData(tuple[Any, ...]):
    """The static data of an array, as its treedef keeps it; and, no part of the value, which array it was read from."""

    source: weakref.ref[Any]

    def __reduce__(self) -> Any:
        return tuple, (tuple(self),)


def static_data_of(q: Any, data: tuple[Any, ...]) -> StaticData:
    static = StaticData(data)
    static.source = weakref.ref(q)
    return static


def source_of(data: tuple[Any, ...]) -> Any:
    """The array this static data was read from, if it still lives; not known of data that was stored in between."""
    return data.source() if isinstance(data, StaticData) else None


def check(q: Any, source: Any) -> None:
    """Called when an array rebuilt from the static data of `source` is used for the first time."""
    if source is None:
        return
    axes = {axis for leaf, stored in _pairs(q, source) if (axis := traces.axis_mapped(leaf, stored)) is not None}
    if not axes or q.core_ndim is None:
        return
    if len(axes) == 1 and q.stores_axis_in_place(min(axes), q.ndim + 1):  # with the mapped axis
        return
    raise errors.SlicedBelowCoreError(_messages.MAPPED_CORE.format(name=type(q).__name__))


def _pairs(q: Any, source: Any) -> Iterator[tuple[Any, Any]]:
    """The leaves of both, without those of implicit arrays inside, which are checked themselves."""
    get_children = layout(type(q)).get_children
    for child, stored in zip(get_children(q), get_children(source), strict=True):
        if isinstance(child, traces.Tracer):
            yield child, stored
        elif child is not stored and not isinstance(child, ArrayOperators):
            yield from zip(jtu.tree_leaves(child), jtu.tree_leaves(stored), strict=False)
