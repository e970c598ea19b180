"""Calling the TPU kernels on any machine: interpreted, or lowered for a TPU that is not there."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from eformer._kernels import tpu
from eformer._kernels.formats import FORMATS, float_scale
from eformer._kernels.parameters import Problem, product_problem

from ..cases import Case, relative_error

LIMIT = 2e-6


def problem(case: Case, form: str, x: Any, **options: Any) -> Problem:
    options = {"fmt": case.fmt, "form": form, "cols": case.cols, "offset": case.offset, "factor": case.factor} | options
    return product_problem(x, case.codes, case.scale, "tpu", **options)


def interpreted(calls: list[tuple[Case, str, Any]], **options: Any) -> list[np.ndarray]:
    """The float32 results of products of (case, form, x), all in one program. What lies behind an array is NaN."""
    problems = [problem(case, form, x, out_dtype=jnp.float32).with_float_scale() for case, form, x in calls]
    options = {"interpret": pltpu.InterpretParams(uninitialized_memory="nan")} | options

    def program(operands: Any) -> list[jax.Array]:
        return [tpu.qmatmul(p, *o, **named, **options) for p, (o, named) in zip(problems, operands, strict=True)]

    operands = []
    for case, _, x in calls:
        scale = None if case.scale is None else float_scale(jnp.asarray(case.scale), case.factor)
        named = {} if case.offset is None else {"offset": jnp.asarray(case.offset)}
        operands.append(((jnp.asarray(x), jnp.asarray(case.codes), scale), named))
    return [np.asarray(y) for y in jax.jit(program)(operands)]


def expected(case: Case, form: str, x: Any) -> np.ndarray:
    """The product in float64, of operands rounded as the kernel rounds them for bfloat16 x."""
    if x.dtype == np.float32:
        return case.expected(x, form)

    def rounded(value: Any) -> np.ndarray:
        return np.asarray(jnp.asarray(value, jnp.float32).astype(jnp.bfloat16), np.float64)

    wide, matrix = np.asarray(x, np.float64), case.dense
    if FORMATS[case.fmt].blocked:
        matrix = rounded(matrix)
    elif case.scale is not None and case.scale.shape[-1 if form == "dot" else -2] != 1:
        # A scale along the contraction is multiplied into x.
        matrix = case.dense / case.scale
        wide = rounded(np.asarray(x, np.float32) * np.swapaxes(case.scale, -1, -2 if form == "axpy" else -1))
    return wide @ (matrix.swapaxes(-1, -2) if form == "dot" else matrix)


def random_x(rng: np.random.Generator, case: Case, form: str, m: int, dtype: Any = np.float32) -> jax.Array:
    *batch, rows, cols = case.dense.shape
    return jnp.asarray(rng.standard_normal((*batch, m, cols if form == "dot" else rows)), dtype)


def check(calls: list[tuple[Case, str, Any]], **options: Any) -> None:
    for (case, form, x), y in zip(calls, interpreted(calls, **options), strict=True):
        assert tpu.refuses_operands(problem(case, form, x).with_float_scale()) is None
        error = relative_error(y, expected(case, form, x))
        scale = None if case.scale is None else case.scale.shape
        assert error < LIMIT, (case.fmt, form, case.codes.shape, x.shape, x.dtype, scale, error)


def lowered(function: Any, *operands: Any) -> str:
    """The program for a TPU, without the bodies of its kernels."""
    text = jax.jit(function).trace(*operands).lower(lowering_platforms=("tpu",)).as_text()
    return re.sub(r'backend_config = "[^"]*"', "", text)


def kernels_in(text: str) -> int:
    return text.count("@tpu_custom_call")


def tensors_in(text: str) -> set[tuple[int, ...]]:
    """The shapes of all floating tensors, leading axes of size 1 left out."""
    found = re.findall(r"tensor<((?:\d+x)+)(?:f|bf)\d+>", text)
    shapes = (tuple(map(int, shape.strip("x").split("x"))) for shape in found)
    return {shape[next((i for i, n in enumerate(shape) if n != 1), 0) :] for shape in shapes}
