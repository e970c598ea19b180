"""Why a problem cannot be given to the CUDA kernels. None means it can."""

from __future__ import annotations

from ..native import F32, Limits
from ..parameters import Problem
from ._library import loaded

LIMITS = Limits(
    block=32,
    arithmetic="its own: 16-bit products, sums in float32",
    rows_decide="its kernels are chosen by it",
)


def refuses_product(problem: Problem) -> str | None:
    return LIMITS.refuses_product(problem) or _refuses_one_row(problem) or refuses_machine(problem.platform)


def refuses_ragged(problem: Problem) -> str | None:
    return LIMITS.refuses_product(problem) or _refuses_groups(problem) or refuses_machine(problem.platform)


def refuses_gather(problem: Problem) -> str | None:
    return LIMITS.refuses_lookup(problem) or refuses_machine(problem.platform)


def refuses_machine(platform: str) -> str | None:
    """Asked last: it loads the library."""
    if platform != "cuda":
        return f"its kernels run on NVIDIA GPUs, not on {platform}"
    return loaded().reason


def _refuses_one_row(problem: Problem) -> str | None:
    """XLA multiplies one row of float32 without TF32, more accurately than 16-bit products can."""
    if problem.m == 1 and not problem.batch and F32 in (problem.x_dtype, problem.out_dtype):
        return "one row in float32 is summed up in float32, as in the dense product"
    return None


def _refuses_groups(problem: Problem) -> str | None:
    """Groups are multiplied where they lie, which leaves no place to prepare x."""
    if problem.form == "axpy":
        return "groups in the axpy form are multiplied one tile at a time"
    if problem.x_dtype == F32:
        return "groups of a float32 x are multiplied one tile at a time"
    if not problem.format.blocked and problem.scale_shape is not None and problem.scale_shape[-1] != 1:
        return "groups with scales along the columns are multiplied one tile at a time"
    if problem.m > 64 * problem.batch[0]:
        return f"with {problem.m} rows for {problem.batch[0]} matrices, decoding each matrix once is quicker"
    return None
