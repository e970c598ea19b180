"""Puts one problem through the tiled path: folds scales where that is exact, picks panel sizes, calls the loop."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..problem import PER_CODE, Problem
from . import gpu, int8, nf4, one_row, onebit, panel
from .tuning import panel_rows


def qmatmul(problem: Problem, x: jax.Array, codes: jax.Array, scale: jax.Array | None) -> jax.Array:
    """The product of one problem without batch axes."""
    spec, dtype = problem.spec, problem.compute_dtype
    if problem.platform in gpu.PLATFORMS:
        return gpu.qmatmul(problem, x, codes, (None, scale, None) if spec.fmt == "nf4" else _fold(problem, scale))
    x = x.astype(dtype)
    if spec.fmt == "nf4":
        return _product(problem, x, codes, scale).astype(spec.out_dtype)
    before, inside, after = _fold(problem, None if scale is None else scale.astype(dtype))
    y = _product(problem, x if before is None else x * before, codes, inside)
    return (y if after is None else y * after).astype(spec.out_dtype)


def _fold(problem: Problem, scale: jax.Array | None) -> tuple[Any, Any, Any]:
    """Factors for x, for the decoded values and for y. A scale of one row or column need not touch the values."""
    if scale is None:
        return None, None, None
    per_row, per_column = scale.shape[0] != 1, scale.shape[1] != 1
    if per_row and per_column:
        return None, scale, None
    as_row = scale.reshape(1, -1)
    touches_y = per_column == (problem.spec.form == "axpy")
    return (None, None, as_row) if touches_y else (as_row, None, None)


def _planes(problem: Problem, codes: jax.Array, scale: Any) -> list[jax.Array]:
    fmt, dtype = problem.spec.fmt, problem.compute_dtype
    if fmt == "nf4":
        return nf4.planes(codes, scale, dtype)
    decoders = {"int8": int8.planes, "ternary": onebit.ternary, "binary": onebit.binary}
    values = decoders[fmt](codes, dtype)
    if scale is None:
        return values
    factors = panel.split_columns(scale, len(values), codes.shape[1])
    return [value * factor for value, factor in zip(values, factors, strict=True)]


def _product(problem: Problem, x: jax.Array, codes: jax.Array, scale: Any) -> jax.Array:
    spec, parts = problem.spec, PER_CODE[problem.spec.fmt]

    def planes(panel_codes: jax.Array, panel_scale: Any) -> list[jax.Array]:
        return _planes(problem, panel_codes, panel_scale)

    if 0 in (problem.m, problem.rows, spec.cols):
        return jnp.zeros((problem.m, problem.rows if spec.form == "dot" else spec.cols), x.dtype)
    one_dot = problem.m == 1 and spec.form == "dot" and problem.platform == "cpu"
    if one_dot and scale is None:
        return one_row.dot_form(x, codes, planes, parts=parts, precision=spec.precision)
    if one_dot and nf4.fits_one_row(spec.block):
        return nf4.one_row(x, codes, scale)
    if problem.m == 1 and spec.form == "axpy" and one_row.fits_axpy(problem.rows):
        return one_row.axpy_form(x, codes, scale, planes, parts=parts, cols=spec.cols)
    sizes = {"parts": parts, "panel": panel_rows(problem), "precision": spec.precision}
    if spec.form == "dot":
        return panel.dot_form(x, codes, scale, planes, **sizes)
    return panel.axpy_form(x, codes, scale, planes, cols=spec.cols, **sizes)
