"""Why a problem cannot, or should not, be given to the TPU kernels. None means it can."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..problem import Problem
from . import tuning

FLOATS = tuple(np.dtype(t) for t in (jnp.float32, jnp.bfloat16))
SCALES = (*FLOATS, np.dtype(jnp.float16))
# One row of 8 x 128 words holds 64 values of 128 rows of D, and a scale must not change inside it.
BLOCK = 64
# Mosaic multiplies no bfloat16 matrices on these.
TOO_OLD = ("TPU v2", "TPU v3")


def refuses_product(problem: Problem) -> str | None:
    return refuses_platform(problem.platform) or refuses_operands(problem)


def refuses_ragged(problem: Problem) -> str | None:
    return refuses_product(problem)


def refuses_gather(problem: Any) -> str | None:
    why = (
        refuses_platform(problem.platform)
        or _not_one_of(FLOATS, out=problem.out_dtype)
        or _not_one_of(SCALES, scale=problem.scale_dtype)
        or _bad_block(problem.fmt, problem.block)
    )
    if why or problem.preference == "native" or tuning.lookup_pays(problem.fmt, problem.rows, problem.count):
        return why
    return f"XLA gathers {problem.count} of {problem.rows} rows of {problem.fmt} with fewer bytes read"


def refuses_platform(platform: str) -> str | None:
    if platform != "tpu":
        return f"its kernels run on the TPU, not on {platform}"
    kind = chip_kind()
    return f"it needs a fourth-generation TPU or a later one, not {kind}" if kind.startswith(TOO_OLD) else None


def chip_kind() -> str:
    """The TPU of this machine; empty where there is none, that is when a program is made for another machine."""
    return jax.local_devices()[0].device_kind if jax.default_backend() == "tpu" else ""


def refuses_operands(problem: Problem) -> str | None:
    """Whatever the platform: the kernels can be interpreted anywhere."""
    spec = problem.spec
    if not isinstance(problem.m, int):
        return f"x has {problem.m} rows, a number that is not known yet, and its tiles depend on it"
    if 0 in (*problem.batch, problem.m, problem.rows, problem.cols):
        return "nothing to multiply"
    if isinstance(spec.precision, (lax.DotAlgorithm, lax.DotAlgorithmPreset)):
        return f"precision={spec.precision} names an algorithm, and it has its own"
    if spec.fmt != "nf4" and problem.scale_shape is not None and 1 not in problem.scale_shape:
        return f"a scale of shape {problem.scale_shape} has one factor per value; it takes one per row or per column"
    return (
        _not_one_of(FLOATS, x=problem.x_dtype, out=spec.out_dtype)
        or _not_one_of(SCALES, scale=problem.scale_dtype)
        or _bad_block(spec.fmt, spec.block)
    )


def _bad_block(fmt: str, block: int | None) -> str | None:
    if fmt != "nf4" or (block and block % BLOCK == 0):
        return None
    return f"blocks of {block} values; it takes multiples of {BLOCK}"


def _not_one_of(allowed: tuple[np.dtype, ...], **dtypes: Any) -> str | None:
    for what, dtype in dtypes.items():
        if dtype is not None and dtype not in allowed:
            return f"{what} is {dtype}, and it takes {', '.join(t.name for t in allowed)}"
    return None
