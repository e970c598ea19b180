"""Encoding NF4 blocks. The codec of the format brings the JAX implementation; a native one may take its place."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer._jax import avals

from . import cpu
from .operation import Operation
from .parameters import Parameters, Problem
from .select import Candidate, Choice, anything

# (..., cols), block -> codes (..., blocks, block / 2), absmax (..., blocks)
Encoder = Callable[[jax.Array, int], tuple[jax.Array, jax.Array]]

_SPLIT = Choice(
    "xla", "XLA splits the program over devices; inside shard_map every device would use its own kernel", ()
)


def nf4_encoder(twin: Encoder) -> Encoder:
    """`twin`, the meaning in JAX and for any number of axes, with native implementations next to it.

    It takes blocks along the last axis and has whatever derivative the twin has.
    """

    def in_jax(problem: Problem, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return twin(x, problem.block or 0)

    def derivative(primals: Any, tangents: Any, *, parameters: Parameters) -> tuple[Any, Any]:
        return jax.jvp(lambda x: twin(x, parameters.block or 0), primals, tangents)

    def split(operation: Operation, problem: Problem, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        operation.announce(problem, _SPLIT)
        return in_jax(problem, x)

    operation = Operation(
        "nf4_encode",
        ("x",),
        result=_result,
        problem=nf4_problem,
        candidates=(
            Candidate("native_cpu", "native", cpu.refuses_encode, cpu.nf4_encode),
            Candidate("xla", "xla", anything, in_jax),
        ),
        batch=_batch,
        split=split,
        arrange=_in_rows,
        derivative=derivative,
        multiple_results=True,
    )

    def encode(x: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
        if 0 in x.shape or avals.explicit_sharding_of(x) is not None:
            return twin(x, block)
        codes, absmax = operation.bind(Parameters("nf4", "encode", x.shape[-1], block, np.dtype(np.uint8)), x)
        return codes, absmax

    return encode


def nf4_problem(parameters: Parameters, platform: str, x: Any) -> Problem:
    rows = math.prod(x.shape[:-1])
    return Problem(**parameters.common(), platform=platform, m=rows, rows=rows, x_dtype=np.dtype(x.dtype))


def _result(parameters: Parameters, x: Any) -> Any:
    assert parameters.block is not None
    lead = (*x.shape[:-1], -(-x.shape[-1] // parameters.block))
    return [((*lead, parameters.block // 2), jnp.uint8), (lead, jnp.float32)]


def _batch(bind: Any, parameters: Parameters, operands: Any, dims: Any) -> tuple[Any, list[int]]:
    return bind(jnp.moveaxis(operands[0], dims[0], 0)), [0, 0]


def _in_rows(run: Any, problem: Problem, x: jax.Array) -> Any:
    codes, absmax = run(problem, x.reshape(problem.rows, problem.cols))
    return codes.reshape(*x.shape[:-1], *codes.shape[1:]), absmax.reshape(*x.shape[:-1], *absmax.shape[1:])
