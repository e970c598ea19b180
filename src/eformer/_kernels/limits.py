"""What the native kernels of a backend take, as a table; and why they refuse a problem."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .parameters import Problem

F32, BF16, F16 = FLOATS = tuple(np.dtype(t) for t in (jnp.float32, jnp.bfloat16, jnp.float16))


@dataclasses.dataclass(frozen=True)
class Limits:
    """Formats, dtypes of x and of results, dtypes of scales, and what blocks must be a multiple of.

    `arithmetic` says how the kernels multiply, whatever algorithm a precision names. `rows_decide` says what depends on
    the number of rows of x, where it has to be known.
    """

    formats: tuple[str, ...] = ("nf4", "int8", "ternary", "binary")
    floats: tuple[np.dtype, ...] = FLOATS
    scales: tuple[np.dtype, ...] = FLOATS
    block: int = 1
    arithmetic: str = "its own"
    rows_decide: str | None = None

    def refuses_product(self, problem: Problem) -> str | None:
        """Why, whatever the platform; None means that the kernels take it."""
        if self.rows_decide and not isinstance(problem.m, int):
            return f"x has {problem.m} rows, a number that is not known yet, and {self.rows_decide}"
        if problem.is_empty:
            return "nothing to multiply"
        if isinstance(problem.precision, (lax.DotAlgorithm, lax.DotAlgorithmPreset)):
            return f"precision={problem.precision} names an algorithm, and it has {self.arithmetic}"
        return _other_than(self.floats, x=problem.x_dtype) or self.refuses_lookup(problem)

    def refuses_lookup(self, problem: Problem) -> str | None:
        if problem.fmt not in self.formats:
            return f"it has no kernels for {problem.fmt}"
        why = _other_than(self.floats, out=problem.out_dtype) or _other_than(self.scales, scale=problem.scale_dtype)
        if why or not problem.format.blocked or (problem.block or 0) % self.block == 0:
            return why
        return f"blocks of {problem.block} values; it takes multiples of {self.block}"

    def refuses_encoding(self, problem: Problem) -> str | None:
        return _other_than(self.floats, x=problem.x_dtype)


def _other_than(allowed: tuple[np.dtype, ...], **dtypes: Any) -> str | None:
    for what, dtype in dtypes.items():
        if dtype is not None and dtype not in allowed:
            return f"{what} is {dtype}, and it takes {', '.join(t.name for t in allowed)}"
    return None
