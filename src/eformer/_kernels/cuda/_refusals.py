"""Why a problem cannot be given to the CUDA kernels. None means it can."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..problem import Problem
from ._library import loaded

FLOATS = tuple(np.dtype(t) for t in (jnp.float32, jnp.bfloat16, jnp.float16))


def refuses_product(problem: Problem) -> str | None:
    return _refuses_types(problem) or refuses_machine(problem.platform)


def refuses_ragged(problem: Problem) -> str | None:
    return _refuses_types(problem) or _refuses_groups(problem) or refuses_machine(problem.platform)


def refuses_gather(problem: Any) -> str | None:
    return (
        _not_float(out=problem.out_dtype, scale=problem.scale_dtype)
        or _refuses_block(problem)
        or refuses_machine(problem.platform)
    )


def refuses_machine(platform: str) -> str | None:
    """Asked last: it loads the library."""
    if platform != "cuda":
        return f"its kernels run on NVIDIA GPUs, not on {platform}"
    return loaded().reason


def _refuses_types(problem: Problem) -> str | None:
    spec = problem.spec
    if not isinstance(problem.m, int):
        return f"x has {problem.m} rows, a number that is not known yet, and its kernels are chosen by it"
    if 0 in (*problem.batch, problem.m, problem.rows, problem.cols):
        return "nothing to multiply"
    if isinstance(spec.precision, (lax.DotAlgorithm, lax.DotAlgorithmPreset)):
        return f"precision={spec.precision} names an algorithm, and it has its own: 16-bit products, sums in float32"
    return _not_float(x=problem.x_dtype, out=spec.out_dtype, scale=problem.scale_dtype) or _refuses_block(spec)


def _refuses_block(problem: Any) -> str | None:
    if problem.fmt == "nf4" and (problem.block or 0) % 32:
        return f"blocks of {problem.block} values are no multiple of 32"
    return None


def _refuses_groups(problem: Problem) -> str | None:
    """Groups are multiplied where they lie, which leaves no place to prepare x."""
    if problem.spec.form == "axpy":
        return "groups in the axpy form are multiplied one tile at a time"
    if problem.x_dtype == FLOATS[0]:
        return "groups of a float32 x are multiplied one tile at a time"
    if problem.fmt != "nf4" and problem.scale_shape is not None and problem.scale_shape[-1] != 1:
        return "groups with scales along the columns are multiplied one tile at a time"
    if problem.m > 64 * problem.batch[0]:
        return f"with {problem.m} rows for {problem.batch[0]} matrices, decoding each matrix once is quicker"
    return None


def _not_float(**dtypes: Any) -> str | None:
    for what, dtype in dtypes.items():
        if dtype is not None and dtype not in FLOATS:
            return f"{what} is {dtype}, and it takes {', '.join(t.name for t in FLOATS)}"
    return None
