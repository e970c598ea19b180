"""Embedding rows: a lookup in a packed table decodes only the requested rows."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import cpu, cuda, tpu
from .formats import FORMATS, check_storage, decode, one_of
from .operation import Operation, one_after_another
from .parameters import PREFERENCES, Parameters, Problem, as_operands, problem_of
from .partition import split_lookup
from .select import Candidate, always, anything


def qgather(
    codes: Any,
    scale: Any,
    indices: Any,
    *,
    offset: Any = None,
    factor: Any = None,
    fmt: str,
    cols: int,
    block: int | None = None,
    dtype: Any = jnp.float32,
    preference: str = "auto",
    in_bounds: bool = False,
) -> jax.Array:
    """Rows of the decoded matrix (R, cols): indices (...) -> (..., cols). Only the requested rows are decoded.

    Values are multiplied in float32 (or the type of the scale, where that is wider) and rounded once to `dtype`.
    Indices follow the rules of `jax.numpy` indexing: negative ones count from the end, others are clamped. A caller
    with rules of its own makes sure that 0 <= index < R, and passes `in_bounds=True`.

    >>> table = jnp.array([[1, 2], [3, 4]], jnp.int8)
    >>> qgather(table, jnp.full((1, 1), 10.0), jnp.array([1, 0, 1]), fmt="int8", cols=2)[:, 0]
    Array([30., 10., 30.], dtype=float32)
    """
    one_of("fmt", fmt, FORMATS)
    one_of("preference", preference, PREFERENCES)
    codes, indices, scale, offset, factor = as_operands(codes, indices, scale, offset, factor)
    block = check_storage(fmt, codes, scale, cols, block, offset, factor)
    if codes.ndim != FORMATS[fmt].core_ndim:
        raise ValueError(f"qgather takes one matrix, got codes of shape {list(codes.shape)}; use vmap for batch axes.")
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"indices must be integers, got {indices.dtype}.")
    if 0 in (*indices.shape, *codes.shape):
        return jnp.zeros((*indices.shape, cols), dtype)
    kind = None if offset is None else np.dtype(offset.dtype)
    how: Any = {"preference": preference, "offset": kind, "factored": factor is not None}
    parameters = Parameters(fmt, "lookup", cols, block, np.dtype(dtype), **how)
    indices = indices if in_bounds else _inside(indices, codes.shape[0])
    return LOOKUP.bind(parameters, codes, indices, *(array for array in (scale, offset, factor) if array is not None))


def _inside(indices: jax.Array, rows: int) -> jax.Array:
    indices = jnp.where(indices < 0, indices + rows, indices) if jnp.iinfo(indices.dtype).min else indices
    return jnp.clip(indices, 0, rows - 1)


def _problem(parameters: Parameters, platform: str, codes: Any, indices: Any, *numbers: Any) -> Problem:
    found = jax.ShapeDtypeStruct((math.prod(indices.shape), parameters.cols), np.float32)
    return problem_of(parameters, platform, found, codes, *numbers)


def _batch(bind: Any, parameters: Parameters, operands: Any, dims: Any) -> tuple[Any, int]:
    """Mapped indices are more indices; mapped tables are looked up one after the other."""
    if all(d is None for i, d in enumerate(dims) if i != 1):
        codes, indices, *scale = operands
        return bind(codes, jnp.moveaxis(indices, dims[1], 0), *scale), 0
    return one_after_another(bind, parameters, operands, dims)


def _with_flat_indices(run: Any, problem: Problem, codes: jax.Array, indices: jax.Array, *scale: Any) -> jax.Array:
    return run(problem, codes, indices.reshape(-1), *scale).reshape(*indices.shape, problem.cols)


def _decoded(
    problem: Problem, codes: jax.Array, indices: jax.Array, scale: Any = None, *, offset: Any = None
) -> jax.Array:
    """The lookup in plain JAX."""
    rows = codes.at[indices].get(mode="promise_in_bounds")
    if scale is not None and scale.shape[0] == codes.shape[0]:
        scale = scale.at[indices].get(mode="promise_in_bounds")
    if offset is not None:
        offset = offset.at[indices].get(mode="promise_in_bounds")
    wide = np.dtype(np.float32) if scale is None else jnp.promote_types(scale.dtype, jnp.float32)
    return decode(rows, scale, offset, fmt=problem.fmt, cols=problem.cols, dtype=wide).astype(problem.out_dtype)


LOOKUP = Operation(
    "qgather",
    ("codes", "indices", "scale"),
    result=lambda parameters, codes, indices, *scale: [((*indices.shape, parameters.cols), parameters.out_dtype)],
    problem=_problem,
    candidates=(
        Candidate(
            "native_cpu", "native", cpu.refuses_gather, cpu.qgather, takes_offsets=cpu.takes_offsets,
            takes_scales=cpu.takes_scales,
        ),
        Candidate("native_cuda", "native", cuda.refuses_gather, cuda.qgather, takes_offsets=always),
        Candidate(
            "pallas_tpu", "native", tpu.refuses_gather, tpu.qgather, takes_offsets=always, takes_scales=always,
        ),
        Candidate("xla", "xla", anything, _decoded, takes_offsets=always),
    ),
    batch=_batch,
    split=split_lookup,
    sharded_like=lambda _, codes, indices, *scale: [*((indices, i) for i in range(indices.ndim)), (codes, 1)],
    arrange=_with_flat_indices,
    derivative="refused",
)  # fmt: skip
