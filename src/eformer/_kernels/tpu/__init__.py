"""Pallas kernels for the TPU. Pallas is imported when the first of them is traced."""

from __future__ import annotations

from typing import Any

import jax

from ..formats import BYTE_SCALES, FORMATS
from ..native import BF16, F32, FLOATS, Limits
from ..parameters import Problem
from . import tuning

# Formats whose values do not lie across bytes; rows looked up are bytes, whatever they stand for.
TAKES = tuple(name for name, row in FORMATS.items() if row.unit == 1)
LIMITS = Limits(TAKES, floats=(F32, BF16), rows_decide="its tiles depend on it")
ROWS = Limits(tuple(FORMATS), floats=(F32, BF16), scales=(*FLOATS, *BYTE_SCALES))
# Mosaic multiplies no bfloat16 matrices on these.
TOO_OLD = ("TPU v2", "TPU v3")


def refuses_product(problem: Problem) -> str | None:
    return refuses_platform(problem.platform) or refuses_operands(problem)


def refuses_gather(problem: Problem) -> str | None:
    why = refuses_platform(problem.platform) or ROWS.refuses_lookup(problem)
    if why or problem.preference == "native" or tuning.lookup_pays(problem):
        return why
    return f"XLA gathers {problem.m} of {problem.rows} rows of {problem.fmt} with fewer bytes read"


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
    why = LIMITS.refuses_product(problem)
    if why is None and problem.block is not None:
        return tuning.refuses_block(problem.fmt, problem.block)
    if why or not problem.scaled_both_ways:
        return why
    return f"a scale of shape {problem.scale_shape} has one factor per value; it takes one per row or per column"


# -- the calls, with the operands of their primitives; `options` are for tests -----------------------------------------


def qmatmul(problem: Problem, *operands: Any, **options: Any) -> jax.Array:
    from . import _matmul

    return _matmul.qmatmul(problem, *operands, **options)


def qragged(problem: Problem, *operands: Any, **options: Any) -> jax.Array:
    from . import _matmul

    return _matmul.qragged(problem, *operands, **options)


def qgather(problem: Problem, *operands: Any, **options: Any) -> jax.Array:
    from . import _lookup

    return _lookup.qgather(problem, *operands, **options)
