"""Which implementation computes a problem, and why.

The table `CANDIDATES` is in order of speed; a new kernel is a new row. Nothing else names an implementation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
from jax import lax

from eformer import _settings
from eformer._record import record

from . import reference, xla
from .problem import Problem

Run = Callable[[Problem, jax.Array, jax.Array, "jax.Array | None"], jax.Array]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An implementation: `supports` returns the reason why it cannot take a problem, or None if it can.

    `batched` says that `run` takes the leading batch axes itself; otherwise it is called for one matrix at a time.
    """

    name: str
    kind: str
    supports: Callable[[Problem], str | None]
    run: Run
    batched: bool = False


@dataclasses.dataclass(frozen=True)
class Choice:
    """The outcome of a selection, as `explain` shows it."""

    name: str
    reason: str
    rejected: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.reason}", *(f"  not {name}: {why}" for name, why in self.rejected)]
        return "\n".join(lines)


# Up to this many values both paths take about as long, and the reference compiles faster.
TINY = 1 << 14


def _tiny(problem: Problem) -> str | None:
    if problem.rows * problem.cols <= TINY:
        return None
    return f"{problem.rows} x {problem.cols} is more than {TINY} values, so decoding all of them at once is slower"


def _any(problem: Problem) -> str | None:
    del problem
    return None


REFERENCE = Candidate("reference", "reference", _any, reference.qmatmul, batched=True)
XLA = Candidate("xla", "xla", _any, xla.qmatmul)
# Fastest first. `small` is the reference where it is the quickest choice; the last row takes everything.
CANDIDATES: tuple[Candidate, ...] = (
    Candidate("reference", "small", _tiny, reference.qmatmul),
    XLA,
    REFERENCE,
)


def _ranked(problem: Problem) -> list[Candidate]:
    """Candidates in the order they are asked: those of the preferred kind first."""
    wanted = problem.spec.preference
    return sorted(CANDIDATES, key=lambda c: c.kind != wanted) if wanted != "auto" else list(CANDIDATES)


def _select(problem: Problem) -> tuple[Candidate, Choice]:
    rejected: list[tuple[str, str]] = []
    if not any(c.kind == "native" for c in CANDIDATES):
        rejected.append(("native", "no native kernel is built for this platform"))
    for candidate in _ranked(problem):
        why = candidate.supports(problem)
        if candidate.kind == "native" and not _settings.kernels_enabled():
            why = "native kernels are turned off (EFORMER_KERNELS)"
        if why is None:
            return candidate, Choice(candidate.name, _reason(problem, candidate), _rest(candidate, rejected))
        rejected.append((candidate.name, why))
    raise AssertionError(f"no implementation takes {problem}; the reference should")


def _reason(problem: Problem, candidate: Candidate) -> str:
    if candidate.kind == problem.spec.preference:
        return f"preference={problem.spec.preference!r}"
    if candidate.kind == "small":
        return f"at most {TINY} values: decoding all of them is as quick, and compiles faster"
    return f"quickest implementation for {problem.spec.fmt} on {problem.platform}"


def _rest(chosen: Candidate, rejected: list[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    named = {name for name, _ in rejected} | {chosen.name}
    later = dict.fromkeys(c.name for c in CANDIDATES if c.name not in named)
    ranked = ((name, f"ranked after {chosen.name}") for name in later)
    return (*((name, why) for name, why in rejected if name != chosen.name), *ranked)


def explain(problem: Problem) -> Choice:
    """What would compute this problem, and why the others would not."""
    return _select(problem)[1]


def announce(problem: Problem) -> None:
    """Leave one note for `explain` about the product being traced."""
    choice = explain(problem)
    record("kernel", op="qmatmul", name=choice.name, reason=choice.reason, rejected=choice.rejected, problem=problem)


def compute(problem: Problem, x: jax.Array, codes: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Run the chosen implementation."""
    candidate, _ = _select(problem)
    if candidate.batched or not problem.batch:
        return candidate.run(problem, x, codes, scale)
    return _one_at_a_time(candidate.run, problem, x, codes, scale)


def _one_at_a_time(run: Run, problem: Problem, x: jax.Array, codes: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Loop over the batch axes, so that only one decoded panel exists at any time."""
    axes = len(problem.batch)

    def flat(array: jax.Array) -> jax.Array:
        return array.reshape(math.prod(problem.batch), *array.shape[axes:])

    operands = (flat(x), flat(codes), None if scale is None else flat(scale))
    y = lax.map(lambda one: run(problem.single(), *one), operands)
    return y.reshape(*problem.batch, *y.shape[1:])
