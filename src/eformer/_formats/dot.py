"""`dot_general` with one quantized operand, brought to the one product the kernels know.

The axes of the quantized operand are batch axes, contracted axes and kept axes; at most one of them is blocked. If the
blocked axis is contracted the product is in dot form (rows of the stored matrix are kept axes), otherwise in axpy form
(rows are contracted axes). Further axes of the other kind become batch axes: contracted ones are summed afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eformer._core import register
from eformer._core.materialization import decode
from eformer._core.trace import switches
from eformer._kernels import activations as _activations
from eformer._kernels import qmatmul, qragged_dot
from eformer._kernels.scale_gradient import in_panels
from eformer._kernels.select import switches as kernel_switches
from eformer._record import record

from . import shapes as _shapes
from . import turned
from .base import QuantizedArray
from .wrapped import axes_of, is_plain_ragged, register_product, result_dtype

switches.append(kernel_switches)


class Plan:
    """The axes of a product, sorted by what happens to them. `q` axes and `x` axes correspond pairwise."""

    def __init__(self, x: Any, q: Any, dimension_numbers: Any, q_first: bool):
        (qc, xc), (qb, xb) = axes_of(dimension_numbers, q_first)
        self.blocked = _shapes.blocked_axis(q)
        self.batch = list(zip(qb, xb, strict=True))
        self.contracted = list(zip(qc, xc, strict=True))
        self.q_kept = [a for a in range(q.ndim) if a not in (*qc, *qb)]
        self.x_kept = [a for a in range(x.ndim) if a not in (*xc, *xb)]

    @property
    def dot_form(self) -> bool:
        return any(q == self.blocked for q, _ in self.contracted)


@register_product
def product(primitive: Any, x: jax.Array, q: QuantizedArray, q_first: bool, params: dict[str, Any]) -> Any:
    return multiply(primitive, x, q, q_first, params)


@register("dot_general")
def dot_general_both(primitive: Any, lhs: QuantizedArray, rhs: QuantizedArray, **params: Any) -> Any:
    """The smaller one is materialized; the other stays as it is."""
    if lhs.size <= rhs.size:
        return product(primitive, lhs.materialize(), rhs, False, params)
    return product(primitive, rhs.materialize(), lhs, True, params)


def multiply(primitive: Any, x: Any, q: Any, q_first: bool, params: dict[str, Any], **rounding: Any) -> Any:
    """x · q (or q · x) for a quantized q. NotImplemented where only the dense product would do.

    `rounding` has `activations`, `backward` and `x_scale` of a product that rounds x, the last one (or None) with all
    axes of x, those that are contracted of size 1.
    """
    while (known := turned.before(q)) is not None:
        numbers = known.numbers(axes_of(params["dimension_numbers"], q_first), q_first)
        if numbers is None:
            break
        q, params = known.source, {**params, "dimension_numbers": numbers}
    out = result_dtype(primitive, [q, x] if q_first else [x, q], params)
    if out is None or not jnp.issubdtype(out, jnp.inexact):
        return NotImplemented
    if q.kernel_format is None and (q.is_sharded or 0 in q.shape):  # panels would be taken from all devices
        return NotImplemented
    plan = Plan(x, q, params["dimension_numbers"], q_first)
    if plan.blocked is not None and any(a == plan.blocked for a, _ in plan.batch):
        return NotImplemented  # every matrix of the batch would hold one value of a block
    options = {"out_dtype": jnp.dtype(out), "precision": params.get("precision"), **rounding}
    wanted = params.get("out_sharding")
    if wanted is not None and (q.ndim, len(plan.q_kept), q_first) == (2, 1, False) and x.ndim > 1:
        options["out_sharding"] = wanted
    y = _unblocked(plan, x, q, options) if plan.blocked is None else _blocked(plan, x, q, options)
    if y is NotImplemented:
        return y
    if q_first:  # the kept axes of q come first
        n_batch, n_x = len(plan.batch), len(plan.x_kept)
        order = [*range(n_batch), *range(n_batch + n_x, y.ndim), *range(n_batch, n_batch + n_x)]
        y = lax.transpose(y, order)
    return y if wanted is None else jax.sharding.reshard(y, wanted)


def _blocked(plan: Plan, x: Any, q: Any, options: dict[str, Any]) -> Any:
    if plan.dot_form:
        rows = [(a, None) for a in plan.q_kept]
        extra = [(a, b) for a, b in plan.contracted if a != plan.blocked]
        last = next(b for a, b in plan.contracted if a == plan.blocked)
        order = [b for _, b in plan.batch] + [b for _, b in extra] + plan.x_kept + [last]
        form = "dot"
        if extra and options.get("activations") and options.get("x_scale") is None:  # of rows along several axes
            options["x_scale"] = scale_of_rows(x, [b for _, b in plan.contracted], options["activations"])
    else:
        rows = plan.contracted
        extra = [(a, None) for a in plan.q_kept if a != plan.blocked]
        order = [b for _, b in plan.batch] + plan.x_kept + [b for _, b in rows]
        form = "axpy"
    x = lax.transpose(x, order)
    matrix = _as_matrices(q, [a for a, _ in plan.batch], [a for a, _ in extra], [a for a, _ in rows])
    if matrix is NotImplemented:
        return NotImplemented
    if (scale := options.get("x_scale")) is not None:
        scale = lax.transpose(scale, order)
        scale = jnp.broadcast_to(scale, (*x.shape[:-1], 1)) if form == "dot" else scale
        options["x_scale"] = _as_rows(scale, plan, q, extra, form)[..., 0]
    y = _product(matrix, _as_rows(x, plan, q, extra, form), form, options)
    return y if y is NotImplemented else _arrange(y, plan, x, q, extra, form)


def scale_of_rows(x: jax.Array, axes: Sequence[int], activations: str) -> jax.Array:
    """The scale that rows of x along these axes, kept with size 1, are rounded with."""
    largest = _activations.largest_magnitude(x, tuple(axes))
    return lax.expand_dims(_activations.row_scale(largest, activations), sorted(axes))


def _as_matrices(q: Any, batch: list[int], extra: list[int], rows: list[int]) -> Any:
    """`q` as (batch..., extra..., R, K), the blocked axis last: a permutation and a reshape of the storage."""
    blocked = _shapes.blocked_axis(q)
    order = [*batch, *extra, *rows, blocked]
    moved = q if order == list(range(q.ndim)) else _shapes.transpose(q, permutation=order)
    lead = [q.shape[a] for a in (*batch, *extra)]
    shape = (*lead, math.prod(q.shape[a] for a in rows), q.shape[blocked])
    if moved.shape == shape:
        return moved
    if 0 in shape:
        return NotImplemented
    return _flattened(moved, len(lead), [q.ndim - 1])


def _flattened(q: Any, low: int, ends: Sequence[int]) -> Any:
    """`q` with the free axes from `low` to each of `ends` made one; a scale shared along some of them is spread out."""

    def flat(array: jax.Array) -> jax.Array:
        shape, merged, start = list(array.shape), list(array.shape[:low]), low
        for end in ends:
            if math.prod(array.shape[start:end]) == 1:
                merged.append(1)
            else:
                shape[start:end] = q.shape[start:end]
                merged.append(math.prod(q.shape[start:end]))
            start = end
        return jnp.broadcast_to(array, shape).reshape(*merged, *array.shape[start:])

    return _shapes.rebuilt(q, lambda part, array: flat(array), None if q.blocked is None else 0, 1, sharding=None)


def _as_rows(x: Any, plan: Plan, q: Any, extra: Any, form: str) -> Any:
    """x as (batch..., extra..., M, K), ready for the product; for one matrix the axes of M stay apart."""
    batch = [q.shape[a] for a, _ in plan.batch]
    more = [q.shape[a] for a, _ in extra]
    if plan.x_kept and not batch and not more:
        return x.reshape(*x.shape[: len(plan.x_kept)], math.prod(x.shape[len(plan.x_kept) :]))
    m = math.prod(x.shape[len(batch) + (len(more) if form == "dot" else 0) :][: len(plan.x_kept)])
    if form == "dot":
        return x.reshape(*batch, *more, m, x.shape[-1])
    x = x.reshape(*batch, *[1] * len(more), m, math.prod(x.shape[len(batch) + len(plan.x_kept) :]))
    return jnp.broadcast_to(x, (*batch, *more, *x.shape[-2:]))


def _product(matrix: Any, x: Any, form: str, options: dict[str, Any]) -> Any:
    if matrix.kernel_format is None:  # a user's own, which the kernels cannot read
        if options.get("activations"):
            return NotImplemented
        options.pop("out_sharding", None)
        return _in_panels(matrix, x, form, **options)
    codes, scale = matrix.kernel_operands()
    return qmatmul(
        x, codes, scale, offset=matrix.kernel_offset, factor=matrix.kernel_factor, fmt=matrix.kernel_format, form=form,
        cols=matrix.shape[-1], block=matrix.kernel_block, preference="auto" if matrix.use_kernel else "xla",
        by_scale=matrix.carries_factor, **options,
    )  # fmt: skip


def _arrange(y: Any, plan: Plan, x: Any, q: Any, extra: Any, form: str) -> Any:
    """(batch..., extra..., M, N) -> (batch..., kept axes of x..., kept axes of q...)."""
    n_batch, n_extra = len(plan.batch), len(extra)
    x_sizes = list(x.shape[n_batch + (n_extra if form == "dot" else 0) :][: len(plan.x_kept)])
    if form == "dot":
        y = y.sum(axis=tuple(range(n_batch, n_batch + n_extra))) if n_extra else y
        return y.reshape(*y.shape[:n_batch], *x_sizes, *[q.shape[a] for a in plan.q_kept])
    if n_extra:
        y = jnp.moveaxis(y, -2, n_batch)  # (batch, M, extra..., K)
    y = y.reshape(*y.shape[:n_batch], *x_sizes, *[q.shape[a] for a, _ in extra], y.shape[-1])
    stored = [*[a for a, _ in extra], plan.blocked]
    first = n_batch + len(x_sizes)
    order = [first + stored.index(a) for a in plan.q_kept]
    return lax.transpose(y, [*range(first), *order])


def _unblocked(plan: Plan, x: Any, q: Any, options: dict[str, Any]) -> Any:
    """INT8: either orientation is a stored matrix; take the one that needs no transpose of the codes."""
    batch, contracted = [a for a, _ in plan.batch], [a for a, _ in plan.contracted]
    dot_order = [*batch, *plan.q_kept, *contracted]
    form = "dot" if dot_order == list(range(q.ndim)) and contracted else "axpy"
    order = dot_order if form == "dot" else [*batch, *contracted, *plan.q_kept]
    moved = q if order == list(range(q.ndim)) else _shapes.transpose(q, permutation=order)
    lead = [q.shape[a] for a in batch]
    kept = [x.shape[a] for a in plan.x_kept]
    if 0 in q.shape or 0 in x.shape:  # nothing to sum, or nothing to return
        return jnp.zeros((*lead, *kept, *[q.shape[a] for a in plan.q_kept]), options["out_dtype"])
    first = plan.q_kept if form == "dot" else contracted
    matrix = _flattened(moved, len(batch), [len(batch) + len(first), q.ndim])
    x_order = [b for _, b in plan.batch] + plan.x_kept + [b for _, b in plan.contracted]
    rows = lax.transpose(x, x_order)
    m = [math.prod(kept)] if lead or not kept else kept
    if (scale := options.get("x_scale")) is not None:
        options["x_scale"] = lax.transpose(scale, x_order).reshape(*lead, *m)
    y = _product(matrix, rows.reshape(*lead, *m, -1), form, options)
    return y if y is NotImplemented else y.reshape(*lead, *kept, *[q.shape[a] for a in plan.q_kept])


@register("ragged_dot_general")
def ragged_dot_general(
    primitive: Any, lhs: jax.Array, rhs: QuantizedArray, group_sizes: jax.Array, **params: Any
) -> Any:
    return multiply_groups(primitive, lhs, rhs, group_sizes, params)


def multiply_groups(primitive: Any, x: Any, q: Any, group_sizes: Any, params: dict[str, Any], **rounding: Any) -> Any:
    """Rows of x in consecutive groups, each times its own matrix of a stack (…`lax.ragged_dot`)."""
    plain = is_plain_ragged(params, x.ndim, q.ndim) and (q.blocked is None or _shapes.blocked_axis(q) != 0)
    if not plain or q.kernel_format is None:
        return NotImplemented
    (_, (contracted,)), _ = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    out = result_dtype(primitive, [x, q, group_sizes], params)
    if 0 in q.shape or 0 in x.shape:
        return jnp.zeros((x.shape[0], q.shape[3 - contracted]), out)
    if q.blocked is None:
        form = "dot" if contracted == 2 else "axpy"
    else:
        form = "dot" if contracted == _shapes.blocked_axis(q) else "axpy"
        kept = 3 - contracted
        order = [0, kept, contracted] if form == "dot" else [0, contracted, kept]
        q = q if order == [0, 1, 2] else _shapes.transpose(q, permutation=order)
    codes, scale = q.kernel_operands()
    return qragged_dot(
        x, codes, scale, group_sizes, offset=q.kernel_offset, factor=q.kernel_factor, fmt=q.kernel_format, form=form,
        cols=q.shape[-1], block=q.kernel_block, precision=params.get("precision"), by_scale=q.carries_factor,
        out_dtype=out, preference="auto" if q.use_kernel else "xla", **rounding,
    )  # fmt: skip


# -- formats that the kernels do not know ------------------------------------------------------------------------------

ROWS, VALUES = 256, 1 << 17  # of a panel, at most: it should stay in a cache


def _in_panels(q: Any, x: jax.Array, form: str, *, out_dtype: Any, precision: Any) -> Any:
    """A panel of rows at a time, decoded by the format's own `materialize`.

    x @ D.T (`form="dot"`) or x @ D (`form="axpy"`), D being `q` of shape (batch..., R, C), packed along C if at all.

    The backward pass decodes again: between the passes nothing dense is kept.
    """
    lead, (rows, columns) = q.shape[:-2], q.shape[-2:]
    height = min(rows, ROWS, max(1, VALUES // columns))
    why = f"{q.format} has no kernel: {height} rows are decoded at a time"
    record("kernel", op="product", name="panels", reason=why, rows=rows, columns=columns)
    stored = {p.field: q.frozen_scale() if p.is_scale else q.part(p) for p in q.parts}
    absent = {name: None for name, array in stored.items() if array is None}
    parts = {
        name: jnp.broadcast_to(array, (*lead, rows, *array.shape[q.ndim - 1 :]))
        for name, array in stored.items()
        if array is not None
    }

    def one(x: jax.Array, parts: Any) -> jax.Array:
        wide = jnp.promote_types(x.dtype, q.dtype)

        def dot(x: jax.Array, panel: Any) -> jax.Array:
            contracted = 1 if form == "dot" else 0
            numbers = (((1,), (contracted,)), ((), ()))
            w = decode(q.moved({**absent, **panel}, q.blocked, sharding=None)).astype(wide)
            return lax.dot_general(x.astype(wide), w, numbers, precision=precision, preferred_element_type=sums)

        sums = jnp.promote_types(out_dtype, jnp.float32)
        run = _dot_form if form == "dot" else _axpy_form
        return run(jax.checkpoint(dot), x, parts, rows, height).astype(out_dtype)

    if not lead:
        return one(x.reshape(-1, x.shape[-1]), parts).reshape(*x.shape[:-1], rows if form == "dot" else columns)
    for _ in lead:
        one = jax.vmap(one)
    return one(x, parts)


def _dot_form(dot: Any, x: jax.Array, parts: Any, rows: int, height: int) -> jax.Array:
    return in_panels(lambda panel: dot(x, panel).T, parts, rows, height).T


def _axpy_form(dot: Any, x: jax.Array, parts: Any, rows: int, height: int) -> jax.Array:
    given, left = {"": x.T, **parts}, rows % height
    panels = {name: a[: rows - left].reshape(-1, height, *a.shape[1:]) for name, a in given.items()}
    rest = {name: a[rows - left :] for name, a in given.items()} if left else None

    def step(y: Any, panel: Any) -> tuple[Any, None]:
        stored = {name: a for name, a in panel.items() if name}
        return y + dot(panel[""].T, stored), None

    first = {name: a[0] for name, a in panels.items()}
    y = step(0, first)[0] if rest is None else step(step(0, first)[0], rest)[0]
    return lax.scan(step, y, {name: a[1:] for name, a in panels.items()})[0]
