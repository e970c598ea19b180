"""`jax.vmap` around a function maps the stored arrays, not the array: refuses the axes where that is not the same.

vmap takes axis `in_axes` of every child. For a batch axis (see `core_ndim`) that is the axis of the array. For an axis
among or behind those that belong together it is another one, and the values would be wrong.
"""

from __future__ import annotations

from typing import Any

import jax.tree_util as jtu

from eformer import _jax, _messages, errors

from .fields import layout
from .operators import ArrayOperators


def check(q: Any) -> None:
    """Called with every array that was put together again; looks only where it is vmap that does that."""
    what = _jax.vmap_in_charge()
    if what is None or q.core_ndim is None:
        return
    children = [q.__dict__[name] for name in layout(type(q)).children]
    leaves = [x for x in jtu.tree_leaves(children, is_leaf=_is_implicit) if not _is_implicit(x)]
    if what == "in_axes":
        axes = {axis for leaf in leaves if (axis := _jax.vmapped_axis(leaf)) is not None}
    else:
        out = _jax.vmap_out_axes()
        axes = set() if out is None else {out % leaf.ndim for leaf in leaves}
    if not axes:
        return
    ndim = q.ndim + 1 if what == "in_axes" else q.ndim  # with the mapped axis
    if len(axes) == 1 and q.stores_axis_in_place(min(axes), ndim):
        return
    raise errors.SlicedBelowCoreError(_messages.MAPPED_CORE.format(name=type(q).__name__, what=what))


def _is_implicit(x: Any) -> bool:
    return isinstance(x, ArrayOperators)
