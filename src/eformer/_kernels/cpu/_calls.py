"""The custom calls. Sizes and dtypes have been checked (`_refusals`); what arrives here is what the handlers take.

`isa` and `threads` are there to be forced by tests and benchmarks: -1 is the best instruction set of the machine, 0 the
threads of XLA's own pool and 1 the calling thread alone; None chooses by the work there is.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..native import Result, call, in_one_batch_axis, storage_attributes
from ..parameters import FORMS, Problem, out_shape
from ._library import LIBRARY
from .tuning import ENCODE_COST, threads_for


def qmatmul(
    problem: Problem, x: jax.Array, codes: jax.Array, scale: Any = None, *, isa: int = -1, threads: int | None = None
) -> jax.Array:
    """The product of one problem, batch axes included."""
    operands = tuple(in_one_batch_axis(problem, x, codes, scale))
    shape = out_shape(problem, x, codes)
    result = (operands[0].shape[0], *shape[len(problem.batch) :])
    work = math.prod(problem.batch) * problem.m * problem.rows * problem.cols
    return _product(problem, "qmatmul", result, operands, work, isa, threads).reshape(shape)


def qragged(
    problem: Problem,
    x: jax.Array,
    codes: jax.Array,
    group_sizes: jax.Array,
    scale: Any = None,
    *,
    isa: int = -1,
    threads: int | None = None,
) -> jax.Array:
    """Groups of rows of x (M, K), each times its own matrix; rows after the last group are zeros."""
    result = (x.shape[0], problem.rows if problem.form == "dot" else problem.cols)
    operands = (x, codes, scale, group_sizes.astype(jnp.int32))
    return _product(problem, "ragged", result, operands, problem.m * problem.rows * problem.cols, isa, threads)


def _product(
    problem: Problem, name: str, shape: tuple[int, ...], operands: Any, work: int, isa: int, threads: int | None
) -> jax.Array:
    attributes = {**storage_attributes(problem), "form": FORMS.index(problem.form), **_how(work, isa, threads)}
    (y,) = call(LIBRARY, name, [(shape, problem.out_dtype)], operands, **attributes)
    return y


def qgather(
    problem: Problem,
    codes: jax.Array,
    indices: jax.Array,
    scale: Any = None,
    *,
    isa: int = -1,
    threads: int | None = None,
) -> jax.Array:
    """Decoded rows for indices (n,) inside the table."""
    result = ((indices.shape[0], problem.cols), problem.out_dtype)
    operands = (codes, scale, indices.astype(jnp.int32))
    attributes = {**storage_attributes(problem), **_how(math.prod(result[0]), isa, threads)}
    (rows,) = call(LIBRARY, "gather", [result], operands, **attributes)
    return rows


def nf4_encode(
    problem: Problem, x: jax.Array, *, isa: int = -1, threads: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """(rows, cols) -> codes (rows, blocks, block / 2) and absmax (rows, blocks)."""
    assert problem.block is not None
    lead = (x.shape[0], -(-x.shape[1] // problem.block))
    results: list[Result] = [((*lead, problem.block // 2), np.uint8), (lead, np.float32)]
    codes, absmax = call(
        LIBRARY, "nf4_encode", results, (x,), block=problem.block, **_how(ENCODE_COST * x.size, isa, threads)
    )
    return codes, absmax


def _how(work: int, isa: int, threads: int | None) -> dict[str, int]:
    return {"isa": isa, "threads": threads_for(work) if threads is None else threads}
