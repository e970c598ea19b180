"""`implicit_box`: an implicit array as an operand of another trace.

A raw implicit array inside `jax.jit`, `vmap` or `grad` (closed over, or handed to a jnp function) is bound as one
primitive, `implicit_box(*leaves)`. Under a trace of ours it turns back into the array, so the operation around it still
dispatches when a scope encloses the jit; everywhere else it lowers to `materialize()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from eformer._jax import callers, jaxprs, primitives
from eformer._jax.avals import ShapedArray

from . import shape_dtype as _shape_dtype
from .materialization import OUTSIDE, dense_for, during, notice
from .operators import ArrayOperators

box_p = primitives.Primitive("implicit_box")


def box(q: Any) -> Any:
    """`q` as an ordinary operand of whatever trace is current."""
    leaves, treedef = jtu.tree_flatten(q)
    return box_p.bind(*leaves, treedef=treedef)


def unbox(leaves: Any, treedef: Any) -> Any:
    q = jtu.tree_unflatten(treedef, leaves)
    implicit = {id(leaf) for leaf in leaves if isinstance(leaf, ArrayOperators)}
    if implicit:  # it was made of tracers of ours, which were single leaves then
        _shape_dtype.expand_ranks(q, lambda x: id(x) in implicit)
    return q


def _dense(*leaves: Any, treedef: Any) -> Any:
    return dense_for(OUTSIDE, unbox(leaves, treedef))


def _abstract(*avals: Any, treedef: Any) -> Any:
    return ShapedArray(*_shape_dtype.shape_and_dtype(_described(avals, treedef)))


def _described(avals: Any, treedef: Any) -> Any:
    return unbox([jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals], treedef)


def notice_boxes(jaxpr: Any) -> None:
    """Notice what becomes dense when a traced program is compiled: all that is still boxed in it."""
    for avals, params, origin in jaxprs.equations_of(jaxpr, box_p):
        with callers.at_origin(origin), during(primitive=OUTSIDE, requested=False):
            notice(_described(avals, **params))


def _jvp(primals: Any, tangents: Any, *, treedef: Any) -> Any:
    _, tangent = jvp_of_moving(lambda *leaves: _dense(*leaves, treedef=treedef), primals, tangents)
    return box_p.bind(*primals, treedef=treedef), tangent


def _transpose(cotangent: Any, *leaves: Any, treedef: Any) -> Any:
    raise unbox([None] * len(leaves), treedef).tangent_error()


def jvp_of_moving(f: Any, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """`jax.jvp` of `f` with respect to the operands that have a tangent.

    The others stay as they are: a type may refuse to be differentiated, and must be told apart from one that is not.
    """
    moving = [i for i, t in enumerate(tangents) if not jaxprs.is_symbolic_zero(t)]

    def along(*operands: Any) -> Any:
        return f(*(dict(zip(moving, operands, strict=True)).get(i, p) for i, p in enumerate(primals)))

    return jax.jvp(along, tuple(primals[i] for i in moving), tuple(tangents[i] for i in moving))


def _series(primals: Any, series: Any, *, treedef: Any) -> Any:
    """`jet`: only what is stored as floating-point numbers has a Taylor series."""
    moving = [i for i, p in enumerate(primals) if jnp.issubdtype(p.dtype, jnp.inexact)]

    def along(*operands: Any) -> Any:
        given = dict(zip(moving, operands, strict=True))
        return _dense(*(given.get(i, p) for i, p in enumerate(primals)), treedef=treedef)

    chosen = ([operands[i] for i in moving] for operands in (primals, series))
    return primitives.jet.jet(along, *chosen, factorial_scaled=False)


def _batch(args: Any, dims: Any, *, treedef: Any) -> Any:
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    stacked = [
        jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
        for a, d in zip(args, dims, strict=True)
    ]
    q = unbox(stacked, treedef)
    one = unbox([jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in stacked], treedef)
    if can_stack(one) and q.shape == (size, *one.shape):
        return box_p.bind(*stacked, treedef=treedef), 0
    return jax.vmap(lambda *leaves: _dense(*leaves, treedef=treedef))(*stacked), 0


def can_stack(q: Any) -> bool:
    """May the leaves of `q` gain a leading axis, and mean a stack of such arrays?"""
    return q.core_ndim is not None or bool(q.__dict__.get("_ranks"))  # without leaves there is nothing to gain an axis


box_p.def_impl(_dense)
box_p.def_abstract_eval(_abstract)
primitives.define_lowering(box_p, _dense)
primitives.ad.primitive_jvps[box_p] = _jvp
primitives.ad.primitive_transposes[box_p] = _transpose
primitives.batching.primitive_batchers[box_p] = _batch
primitives.define_series(box_p, _series)
