"""Calling the native kernels: many at once in one compiled program, each result written over NaNs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer._kernels import cpu
from eformer._kernels.cpu import isa as best_isa
from eformer._kernels.parameters import Problem, out_shape, product_problem

from ..cases import Case, relative_error

# Threads of XLA's pool, the calling thread alone, two threads.
THREADS = (0, 1, 2)
FLOAT32_LIMIT = 2e-6


def isas() -> tuple[int, ...]:
    """Every instruction set of this machine the library has kernels for, to be forced in turn."""
    best = best_isa()
    return (best,) if best >= 10 else tuple(range(1, best + 1))


@dataclasses.dataclass(frozen=True)
class Call:
    """One product to be computed by a native kernel."""

    case: Case
    form: str
    x: Any
    isa: int = -1
    threads: int = 0
    out_dtype: Any = None

    @property
    def problem(self) -> Problem:
        case, options = self.case, {"form": self.form, "out_dtype": self.out_dtype}
        options |= {"fmt": case.fmt, "cols": case.cols, "offset": case.offset, "factor": case.factor}
        return product_problem(self.x, case.codes, case.scale, "cpu", **options)

    def __str__(self) -> str:
        case, dtype = self.case, np.dtype(self.x.dtype).name
        scale = None if case.scale is None else f"{case.scale.dtype}{list(case.scale.shape)}"
        return (
            f"{case.fmt} {self.form} x={dtype}{list(self.x.shape)} D={list(case.dense.shape)} "
            f"codes={list(case.codes.shape)} scale={scale} offset={getattr(case.offset, 'dtype', None)} "
            f"isa={self.isa} threads={self.threads}"
        )


def poisoned(*avals: tuple[tuple[int, ...], Any]) -> list[jax.Array]:
    """Arrays of NaN, all made by one program. (XLA does not reuse memory that came from numpy.)"""
    return jax.jit(lambda: [jnp.full(shape, jnp.nan, dtype) for shape, dtype in avals])()


def compute(calls: list[Call]) -> list[np.ndarray]:
    """The results of all calls. XLA reuses the donated arrays for them, so what a kernel does not write stays NaN."""
    problems = [call.problem for call in calls]

    def program(poison: list[jax.Array], operands: list[tuple[Any, ...]]) -> list[jax.Array]:
        del poison
        return [
            cpu.qmatmul(problem, *given[:3], offset=given[3], factor=given[4], isa=call.isa, threads=call.threads)
            for problem, given, call in zip(problems, operands, calls, strict=True)
        ]

    operands = [(jnp.asarray(c.x), c.case.codes, c.case.scale, c.case.offset, c.case.factor) for c in calls]
    pairs = zip(problems, calls, strict=True)
    poison = poisoned(*((out_shape(p, call.x, call.case.codes), p.out_dtype) for p, call in pairs))
    before = {array.unsafe_buffer_pointer() for array in poison}
    results = jax.jit(program, donate_argnums=0, keep_unused=True)(poison, operands)
    assert before.issuperset(array.unsafe_buffer_pointer() for array in results)
    return [np.asarray(result) for result in results]


def errors(calls: list[Call]) -> list[float]:
    """The error of every call against float64, computed once for calls that share their operands."""
    expected: dict[int, np.ndarray] = {}
    for call in calls:
        if id(call.x) not in expected:
            expected[id(call.x)] = call.case.expected(np.asarray(call.x, np.float64), call.form)
    return [relative_error(y, expected[id(call.x)]) for call, y in zip(calls, compute(calls), strict=True)]
