"""Rules of single equations: which results still show a leaf, and which are products to look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from . import products, views
from .frame import Frame, Tracked, bind, dense, rule
from .views import View, _NotFollowed

# -- operations after which an array still shows its leaf --------------------------------------------------------------


def _moved(frame: Frame, primitive: Any, operands: list[Any], params: dict[str, Any], move: Any) -> Any:
    """One result, a view by `move` of what its first operand shows."""
    out, operand = bind(primitive, operands, params), operands[0]
    if not isinstance(operand, Tracked):
        return out
    try:
        return followed(frame, out, [move(view) for view in operand.views])
    except _NotFollowed as why:
        frame.note(frame.other, operand, str(why))
        return out


def followed(frame: Frame, value: Any, shown: Sequence[View]) -> Any:
    """A value with its views, if they are of matrices: a row of a table is an activation, and to read it a lookup."""
    kept = tuple(view for view in shown if view.is_matrix)
    frame.note(frame.other, Tracked(value, tuple(view for view in shown if not view.is_matrix)), "lookup")
    return Tracked(value, kept) if kept else value


@rule(*views.MOVES)
def _same(frame: Frame, primitive: Any, operands: list[Any], params: dict[str, Any]) -> Any:
    move, shape = views.MOVES[primitive.name], jnp.shape(dense(operands[0]))
    return _moved(frame, primitive, operands, params, lambda view: move(view, params, shape))


@rule("optimization_barrier", "device_put")
def _same_many(frame: Frame, primitive: Any, operands: list[Any], params: dict[str, Any]) -> Any:
    out = bind(primitive, operands, params)
    pairs = zip(out, operands, strict=True)
    return [Tracked(o, x.views) if isinstance(x, Tracked) else o for o, x in pairs]


@rule("convert_element_type")
def _convert(frame: Frame, primitive: Any, operands: list[Any], params: dict[str, Any]) -> Any:
    if not jnp.issubdtype(params["new_dtype"], jnp.floating):
        frame.note(frame.other, operands[0], f"a conversion to {jnp.dtype(params['new_dtype']).name}")
        return bind(primitive, operands, params)
    return _moved(frame, primitive, operands, params, lambda view: view)


@rule("rev")
def _rev(frame: Frame, primitive: Any, operands: list[Any], params: dict[str, Any]) -> Any:
    shape = jnp.shape(dense(operands[0]))
    positions = [np.arange(n)[:: -1 if axis in params["dimensions"] else 1] for axis, n in enumerate(shape)]
    return _moved(frame, primitive, operands, params, lambda view: views.cut(view, positions, shape))


@rule("dynamic_slice")
def _dynamic_slice(frame: Frame, primitive: Any, operands: list[Any], params: dict[str, Any]) -> Any:
    shape, sizes, starts = jnp.shape(dense(operands[0])), params["slice_sizes"], operands[1:]
    positions = [
        np.arange(n) if size == n else jnp.clip(dense(start), 0, n - size) + jnp.arange(size)
        for n, size, start in zip(shape, sizes, starts, strict=True)
    ]
    return _moved(frame, primitive, operands, params, lambda view: views.cut(view, positions, shape))


@rule("split", "unstack")
def _split(frame: Frame, primitive: Any, operands: list[Any], params: dict[str, Any]) -> Any:
    axis, (operand,), end, results = params["axis"], operands, 0, []
    one = primitive.name == "unstack"
    sizes = [1] * jnp.shape(operand.value)[axis] if one else params["sizes"]
    for out, size in zip(bind(primitive, operands, params), sizes, strict=True):
        start, end = end, end + size
        try:
            shown = [views.pick(view, axis, np.arange(start, end)) for view in operand.views]
            results.append(followed(frame, out, [views.squeeze(view, [axis]) for view in shown] if one else shown))
        except _NotFollowed as why:
            frame.note(frame.other, operand, str(why))
            results.append(out)
    return results


@rule("gather")
def _gather(frame: Frame, primitive: Any, operands: list[Any], params: dict[str, Any]) -> Any:
    """Matrices of a stack by their numbers. Rows of a table, which is a lookup, are activations."""
    numbers, shape, sizes = params["dimension_numbers"], jnp.shape(dense(operands[0])), params["slice_sizes"]
    indices = dense(operands[1])
    out = bind(primitive, operands, params)
    if not isinstance(operands[0], Tracked):
        return out
    axis = tuple(numbers.start_index_map)
    plain = len(axis) == 1 and tuple(numbers.collapsed_slice_dims) == axis and not numbers.operand_batching_dims
    plain = plain and all(size == n for i, (size, n) in enumerate(zip(sizes, shape, strict=True)) if i != axis[0])
    if not plain or len(shape) < 3 or indices.ndim > 2:
        one = sum(size == 1 and n > 1 for size, n in zip(sizes, shape, strict=True))
        frame.note(frame.other, operands[0], "lookup" if one and len(shape) - one < 2 else "gather")
        return out
    ids = jnp.clip(indices.reshape(-1), 0, shape[axis[0]] - 1)
    try:
        shown = [views.pick(view, axis[0], ids) for view in operands[0].views]
        rest = [i for i in range(jnp.ndim(out)) if i not in numbers.offset_dims]
        if not rest:
            return followed(frame, out, [views.squeeze(view, axis) for view in shown])
        others = [i for i in range(len(shape)) if i != axis[0]]
        order = [axis[0] if i in rest else others[list(numbers.offset_dims).index(i)] for i in range(jnp.ndim(out))]
        return followed(frame, out, [views.transpose(view, order) for view in shown])
    except _NotFollowed as why:
        frame.note(frame.other, operands[0], str(why))
        return out


@rule("concatenate", "stack")
def _concatenate(frame: Frame, primitive: Any, operands: list[Any], params: dict[str, Any]) -> Any:
    stacks = primitive.name == "stack"
    axis, start, shown = params["axis" if stacks else "dimension"], 0, []
    for operand in operands:
        shape = jnp.shape(dense(operand))
        for view in operand.views if isinstance(operand, Tracked) else ():
            if stacks:
                others = [i for i in range(len(shape) + 1) if i != axis]
                view = views.broadcasted(view, (*view.shape[:axis], 1, *view.shape[axis:]), others)
            shown.append(views.concatenated(view, axis, start))
        start += 1 if stacks else shape[axis]
    return followed(frame, bind(primitive, operands, params), shown)


# -- products ----------------------------------------------------------------------------------------------------------


@rule("dot_general")
def _dot_general(frame: Frame, primitive: Any, operands: list[Any], params: dict[str, Any]) -> Any:
    lhs, rhs = operands
    contracted, batch = params["dimension_numbers"]
    if isinstance(lhs, Tracked):
        frame.product(lhs, dense(rhs), [list(zip(*axes, strict=True)) for axes in (contracted, batch)], "dot_general")
    if isinstance(rhs, Tracked):
        pairs = [list(zip(*axes[::-1], strict=True)) for axes in (contracted, batch)]
        frame.product(rhs, dense(lhs), pairs, "dot_general")
    return bind(primitive, operands, params)


@rule("ragged_dot_general")
def _ragged_dot_general(frame: Frame, primitive: Any, operands: list[Any], params: dict[str, Any]) -> Any:
    numbers = params["ragged_dot_dimension_numbers"]
    (x_axes, w_axes), batch = numbers.dot_dimension_numbers
    ragged = tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions)
    x, weight = operands[:2]
    plain = (tuple(x_axes), tuple(map(tuple, batch)), ragged[0], len(ragged[1])) == ((1,), ((), ()), (0,), 1)
    plain = plain and jnp.ndim(dense(x)) == 2 and params.get("group_offset") is None and not isinstance(x, Tracked)
    if plain and isinstance(weight, Tracked):
        frame.grouped(weight, x, dense(operands[2]), ragged[1][0], w_axes[0])
    else:
        for operand in operands:
            if isinstance(operand, Tracked):
                frame.note(frame.unseen, operand, "a grouped product of another form than lax.ragged_dot")
    return bind(primitive, operands, params)


@rule("conv_general_dilated")
def _conv(frame: Frame, primitive: Any, operands: list[Any], params: dict[str, Any]) -> Any:
    x, kernel = operands
    if isinstance(x, Tracked):
        frame.note(frame.unseen, x, "a convolution over it")
    if isinstance(kernel, Tracked):
        try:
            cut, x_axes, axes = products.patches(dense(x), jnp.shape(kernel.value), params)
            frame.product(kernel, cut, (list(zip(axes, x_axes, strict=True)), []), "conv_general_dilated")
        except _NotFollowed as why:
            frame.note(frame.unseen, kernel, str(why))
    return bind(primitive, operands, params)
