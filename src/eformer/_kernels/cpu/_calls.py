"""The custom calls. Sizes and dtypes have been checked (`_refusals`); what arrives here is what the handlers take.

`isa` and `threads` are there to be forced by tests and benchmarks: -1 is the best instruction set of the machine, 0 the
threads of XLA's own pool and 1 the calling thread alone.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer._jax.avals import result_type

from ..problem import FORMATS, FORMS, Problem, Spec, out_shape
from ._library import GATHER, NF4_ENCODE, QMATMUL, RAGGED, loaded
from .tuning import ENCODE_COST, threads_for

Result = tuple[tuple[int, ...], np.dtype]


def qmatmul(
    problem: Problem,
    x: jax.Array,
    codes: jax.Array,
    scale: jax.Array | None,
    *,
    isa: int = -1,
    threads: int | None = None,
) -> jax.Array:
    """The product of one problem, batch axes included."""
    axes = len(problem.batch)

    def flat(array: jax.Array) -> jax.Array:
        return array.reshape(math.prod(problem.batch), *array.shape[axes:])

    operands = (flat(x), flat(codes), _empty() if scale is None else flat(scale))
    spec = problem.spec
    result = (operands[0].shape[0], *out_shape(spec, x, codes)[axes:])
    work = math.prod(problem.batch) * problem.m * problem.rows * problem.cols
    threads = threads_for(work) if threads is None else threads
    (y,) = _call(QMATMUL, [(result, spec.out_dtype)], operands, **_attributes(spec), isa=isa, threads=threads)
    return y.reshape(out_shape(spec, x, codes))


def qragged(
    problem: Problem,
    x: jax.Array,
    codes: jax.Array,
    scale: jax.Array | None,
    group_sizes: jax.Array,
    *,
    isa: int = -1,
    threads: int | None = None,
) -> jax.Array:
    """Groups of rows of x (M, K), each times its own matrix; rows behind the last group give zeros."""
    spec = problem.spec
    result = (x.shape[0], problem.rows if spec.form == "dot" else spec.cols)
    threads = threads_for(problem.m * problem.rows * problem.cols) if threads is None else threads
    operands = (x, codes, _empty() if scale is None else scale, group_sizes.astype(jnp.int32))
    (y,) = _call(RAGGED, [(result, spec.out_dtype)], operands, **_attributes(spec), isa=isa, threads=threads)
    return y


def qgather(
    problem: Any,
    codes: jax.Array,
    scale: jax.Array | None,
    indices: jax.Array,
    *,
    isa: int = -1,
    threads: int | None = None,
) -> jax.Array:
    """Decoded rows for indices (n,) inside the table."""
    operands = (codes, _empty() if scale is None else scale, indices.astype(jnp.int32))
    result = ((indices.shape[0], problem.cols), problem.out_dtype)
    attributes = {"fmt": FORMATS.index(problem.fmt), "cols": problem.cols, "block": problem.block or 0}
    threads = threads_for(math.prod(result[0])) if threads is None else threads
    (rows,) = _call(GATHER, [result], operands, **attributes, isa=isa, threads=threads)
    return rows


def nf4_encode(problem: Any, x: jax.Array, *, isa: int = -1, threads: int | None = None) -> tuple[jax.Array, jax.Array]:
    """(rows, cols) -> codes (rows, blocks, block / 2) and absmax (rows, blocks)."""
    lead = (x.shape[0], -(-x.shape[1] // problem.block))
    results: list[Result] = [((*lead, problem.block // 2), np.dtype(np.uint8)), (lead, np.dtype(np.float32))]
    threads = threads_for(ENCODE_COST * x.size) if threads is None else threads
    codes, absmax = _call(NF4_ENCODE, results, (x,), block=problem.block, isa=isa, threads=threads)
    return codes, absmax


def _attributes(spec: Spec) -> dict[str, int]:
    return {
        "fmt": FORMATS.index(spec.fmt),
        "form": FORMS.index(spec.form),
        "cols": spec.cols,
        "block": spec.block or 0,
    }


def _empty() -> jax.Array:
    """Stands for a scale that is not there."""
    return jnp.zeros((0,), jnp.float32)


def _call(target: str, results: list[Result], operands: tuple[jax.Array, ...], **attributes: int) -> Any:
    loaded()  # registers the targets; whoever asked `_refusals` has done so before
    avals = [result_type(shape, dtype, operands[0]) for shape, dtype in results]
    return jax.ffi.ffi_call(target, avals)(*operands, **{name: np.int64(value) for name, value in attributes.items()})
