"""The pure JAX path, for every platform: one decoded panel at a time, and on GPUs what XLA fuses (`gpu`).

Folds scales where that is exact, picks the sizes of panels, and calls the loop.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ..parameters import Problem
from . import gpu, one_row, panel

# On a GPU so many matrices of so few columns are one product: keys and values of heads, not weights.
MANY, NARROW = 4, 256


def qmatmul(problem: Problem, x: jax.Array, codes: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """The product of one problem without batch axes."""
    dtype = problem.compute_dtype
    if problem.platform in gpu.PLATFORMS:
        return gpu.qmatmul(problem, x, codes, _fold(problem, scale))
    before, inside, after = _fold(problem, None if scale is None else scale.astype(dtype))
    x = x.astype(dtype)
    y = _product(problem, x if before is None else x * before, codes, inside)
    return (y if after is None else y * after).astype(problem.out_dtype)


def refuses_batch(problem: Problem) -> str | None:
    if problem.platform not in gpu.PLATFORMS:
        return "only on a GPU all matrices of a batch are one product"
    if math.prod(problem.batch) < MANY:
        return f"there are fewer than {MANY} matrices"
    return None if problem.cols <= NARROW else f"{problem.cols} columns are more than {NARROW}: one matrix at a time"


def batched_qmatmul(problem: Problem, *operands: jax.Array) -> jax.Array:
    """All matrices of a batch at once, by what XLA fuses into one product."""
    one, axes = problem.replace(batch=()), len(problem.batch)
    flat = [operand.reshape(math.prod(problem.batch), *operand.shape[axes:]) for operand in operands]
    y = jax.vmap(lambda *operands: qmatmul(one, *operands))(*flat)
    return y.reshape(*problem.batch, *y.shape[1:])


def _fold(problem: Problem, scale: jax.Array | None) -> tuple[Any, Any, Any]:
    """Factors for x, for the decoded values and for y. A scale of one row or column need not touch the values."""
    if scale is None or problem.format.blocked or problem.scaled_both_ways:
        return None, scale, None
    as_row = scale.reshape(1, -1)
    touches_y = (scale.shape[1] != 1) == (problem.form == "axpy")
    return (None, None, as_row) if touches_y else (as_row, None, None)


def _product(problem: Problem, x: jax.Array, codes: jax.Array, scale: Any) -> jax.Array:
    row, cols, precision = problem.format, problem.cols, problem.precision

    def decoded(panel_codes: jax.Array, panel_scale: Any) -> list[jax.Array]:
        return panel.planes(problem.fmt, panel_codes, panel_scale, problem.compute_dtype)

    if problem.is_empty:
        return jnp.zeros((problem.m, problem.outs), x.dtype)
    one_dot = problem.m == 1 and problem.form == "dot" and problem.platform == "cpu"
    if one_dot and scale is None:
        return one_row.dot_form(x, codes, decoded, row=row, precision=precision)
    if one_dot and one_row.fits_nibbles(row, problem.block):
        return one_row.nibble_dot_form(x, codes, scale, row=row)
    if problem.m == 1 and problem.form == "axpy" and problem.rows >= one_row.PANEL:
        return one_row.axpy_form(x, codes, scale, decoded, row=row, cols=cols)
    sizes = {"row": row, "panel": panel.panel_rows(problem), "precision": precision}
    if problem.form == "dot":
        return panel.dot_form(x, codes, scale, decoded, **sizes)
    return panel.axpy_form(x, codes, scale, decoded, cols=cols, **sizes)
