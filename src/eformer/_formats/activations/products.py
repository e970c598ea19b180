"""Products of an `ActivationArray`: by the kernels that round x where they know the weight, else around its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eformer._core import register
from eformer._jax import jaxprs
from eformer._kernels.activations import holding, round_by

from .. import dot as _dot
from ..base import QuantizedArray
from ..blocks import wide
from ..wrapped import axes_of, is_plain_ragged, multiply, redo, register_product, result_dtype
from .array import ActivationArray
from .stochastic import with_rounded_gradient


@register_product
def product(primitive: Any, x: jax.Array, q: ActivationArray, q_first: bool, params: dict[str, Any]) -> Any:
    _check(x, q)
    (_, xc), (qb, xb) = axes_of(params["dimension_numbers"], q_first)
    x_scale = _static_scale(x, q, xc, xb, qb)
    y: Any = NotImplemented
    if isinstance(q.w, QuantizedArray) and not q.w.carries_factor and 0 not in (*x.shape, *q.shape):
        rounding = {**_settings(q), "x_scale": x_scale}
        y = _dot.multiply(primitive, x, q.w, q_first, params, **rounding)
    if y is NotImplemented:
        y = _around(primitive, x, q, q_first, params, x_scale)
    kept = [a for a in range(x.ndim) if a not in (*xc, *xb)]
    rows = range(len(xb)) if q_first else range(len(xb) + len(kept))
    outputs = [i for i in range(y.ndim) if i not in rows and not (q_first and i >= y.ndim - len(kept))]
    return with_rounded_gradient(y, q, outputs)


def _settings(q: ActivationArray) -> dict[str, Any]:
    """What the kernels round. A gradient that was rounded at random is multiplied as it is."""
    return {"activations": q.activations, "backward": q.backward if q.seed is None else None}


def _check(x: jax.Array, q: ActivationArray) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(
            f"x is {x.dtype}, and {q!r} rounds rows of floating values; convert x with astype, or multiply with `.w`, "
            "the weight alone."
        )


def _static_scale(
    x: jax.Array, q: ActivationArray, contracted: Sequence[int], x_axes: Sequence[int], q_axes: Sequence[int]
) -> Any:
    """`x_scale` with the axes of x, those that are contracted of size 1; the largest, where a row meets several."""
    if q.x_scale is None:
        return None
    others = tuple(a for a in range(q.ndim) if a not in q_axes)
    scale = lax.transpose(q.x_scale.max(others, keepdims=True), [*q_axes, *others])
    shape = [1] * x.ndim
    for i, axis in enumerate(x_axes):
        shape[axis] = scale.shape[i]
    order = sorted(range(len(x_axes)), key=lambda i: x_axes[i])
    moved = lax.transpose(scale.reshape(scale.shape[: len(q_axes)]), order)
    return jnp.broadcast_to(moved.reshape(shape), [1 if a in contracted else n for a, n in enumerate(x.shape)])


def _around(primitive: Any, x: jax.Array, q: ActivationArray, q_first: bool, params: Any, x_scale: Any) -> jax.Array:
    """The codes of x times the weight, by whatever the weight does in products, then the scales of rows."""
    (qc, xc), (qb, xb) = axes_of(params["dimension_numbers"], q_first)
    kept = [a for a in range(x.ndim) if a not in (*xc, *xb)]
    new = q.ndim - len(qc) - len(qb)

    def of_rows(factor: jax.Array) -> jax.Array:
        """(axes of x) -> the axes of the result."""
        moved = lax.squeeze(lax.transpose(factor, [*xb, *kept, *xc]), range(len(xb) + len(kept), x.ndim))
        first = len(xb) if q_first else moved.ndim
        return lax.expand_dims(moved, range(first, first + new))

    def product(x: Any, w: Any, out: Any) -> jax.Array:
        return multiply(primitive, x, w, q_first, {**params, "preferred_element_type": out})

    out = result_dtype(primitive, [q, x] if q_first else [x, q], params)
    return straight_through(product, of_rows, x, q, tuple(xc), x_scale, out)


def straight_through(
    product: Callable[..., jax.Array], of_rows: Callable[[jax.Array], jax.Array], x: jax.Array, q: ActivationArray,
    axes: tuple[int, ...], x_scale: Any, out: Any,
) -> jax.Array:  # fmt: skip
    """`product(x, w, dtype)`, linear in x, of codes of x; its derivative is that of x itself."""
    leaves, structure = jax.tree.flatten(q.w)

    def scaled(x: Any, leaves: Any, x_scale: Any) -> jax.Array:
        codes, factor = round_by(x, x_scale, q.activations, axes)
        y = product(codes.astype(holding(x.dtype)), jax.tree.unflatten(structure, leaves), wide(out))
        return (y * of_rows(factor).astype(y.dtype)).astype(out)

    # Everything traced is an argument: what a rule closes over may belong to a trace that is gone when it runs.
    run = jax.custom_jvp(scaled)

    def rule(primals: Any, tangents: Any) -> Any:
        x, leaves, x_scale = primals
        y, terms = run(*primals), []
        if not jaxprs.is_symbolic_zero(tangents[0]):
            terms.append(product(tangents[0], jax.tree.unflatten(structure, leaves), out))
        if not all(map(jaxprs.is_symbolic_zero, tangents[1])):
            changed = [i for i, t in enumerate(tangents[1]) if not jaxprs.is_symbolic_zero(t)]

            def with_changed(*values: Any) -> jax.Array:
                new = list(leaves)
                for i, value in zip(changed, values, strict=True):
                    new[i] = value
                return scaled(x, new, x_scale)

            terms.append(jax.jvp(with_changed, [leaves[i] for i in changed], [tangents[1][i] for i in changed])[1])
        return y, sum(terms[1:], terms[0]) if terms else jaxprs.symbolic_zero(jax.typeof(y))

    run.defjvp(rule, symbolic_zeros=True)
    return run(x, leaves, x_scale)


@register("ragged_dot_general")
def ragged_dot_general(
    primitive: Any, lhs: jax.Array, rhs: ActivationArray, group_sizes: jax.Array, **params: Any
) -> Any:
    """Rows of x in groups, each times its own matrix of a stack; a static scale is that of the matrix."""
    x, q = lhs, rhs
    _check(x, q)
    if not is_plain_ragged(params, x.ndim, q.ndim):
        return NotImplemented
    x_scale = None
    if q.x_scale is not None:
        each = jnp.broadcast_to(q.x_scale.max((1, 2)), q.shape[:1])
        x_scale = jnp.repeat(each, group_sizes, total_repeat_length=x.shape[0])
    y: Any = NotImplemented
    if isinstance(q.w, QuantizedArray) and not q.w.carries_factor:
        rounding = {**_settings(q), "x_scale": x_scale}
        y = _dot.multiply_groups(primitive, x, q.w, group_sizes, params, **rounding)
    if y is NotImplemented:

        def product(x: Any, w: Any, out: Any) -> jax.Array:
            return redo(primitive, {**params, "preferred_element_type": out}, x, w, group_sizes)

        out = result_dtype(primitive, [x, q, group_sizes], params)
        kept = None if x_scale is None else x_scale[:, None]
        y = straight_through(product, lambda factor: factor, x, q, (1,), kept, out)
    return with_rounded_gradient(y, q, [1])
