"""Why a problem cannot, or should not, be given to the CPU kernels. None means it can."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..problem import Problem
from ._library import isa, loaded
from .tuning import LARGEST_LOOKUP, LARGEST_M

FLOATS = tuple(np.dtype(t) for t in (jnp.float32, jnp.bfloat16, jnp.float16))


def refuses_product(problem: Problem) -> str | None:
    why = _refuses_types(problem) or refuses_machine(problem.platform)
    if why or problem.preference == "native":
        return why
    largest = LARGEST_M.get((problem.fmt, problem.spec.form))
    if largest is not None and problem.m > largest:
        return f"with M={problem.m} the tiled path is quicker (it is above {largest})"
    return None


def refuses_ragged(problem: Problem) -> str | None:
    return _refuses_types(problem) or refuses_machine(problem.platform)


def refuses_gather(problem: Any) -> str | None:
    why = _not_float(out=problem.out_dtype, scale=problem.scale_dtype) or refuses_machine(problem.platform)
    values, largest = problem.count * problem.cols, LARGEST_LOOKUP.get(problem.fmt)
    if why or problem.preference == "native" or largest is None or values <= largest:
        return why
    return f"XLA is quicker for {values} values (it is above {largest})"


def refuses_encode(problem: Any) -> str | None:
    return _not_float(x=problem.x_dtype) or refuses_machine(problem.platform)


def refuses_machine(platform: str) -> str | None:
    """Asked last: it loads the library."""
    if platform != "cpu":
        return f"its kernels run on the CPU, not on {platform}"
    library = loaded()
    if library.reason is not None:
        return library.reason
    return None if isa() else "this CPU has no instruction set the kernels are written for (AVX2, AVX-512 or NEON)"


def _refuses_types(problem: Problem) -> str | None:
    spec = problem.spec
    if 0 in (*problem.batch, problem.m, problem.rows, problem.cols):
        return "nothing to multiply"
    if isinstance(spec.precision, (lax.DotAlgorithm, lax.DotAlgorithmPreset)):
        return f"precision={spec.precision} names an algorithm, and it has its own: products and sums in float32"
    return _not_float(x=problem.x_dtype, out=spec.out_dtype, scale=problem.scale_dtype)


def _not_float(**dtypes: Any) -> str | None:
    for what, dtype in dtypes.items():
        if dtype is not None and dtype not in FLOATS:
            return f"{what} is {dtype}, and it takes {', '.join(t.name for t in FLOATS)}"
    return None
