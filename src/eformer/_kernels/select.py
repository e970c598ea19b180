"""Which implementation computes a problem, and why.

Every operation has a table of candidates in order of speed; a new kernel is a new row. Nothing else names an
implementation. The table here is that of `qmatmul`; those of the smaller operations stand next to them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax import lax

from eformer._record import record, recording

from . import cpu, cuda, reference, switch, tpu, xla
from .problem import Problem


class AnyProblem(Protocol):
    """What all problems have: enough to choose by preference and to say why."""

    @property
    def fmt(self) -> str: ...
    @property
    def platform(self) -> str: ...
    @property
    def preference(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An implementation: `supports` returns the reason why it cannot take a problem, or None if it can.

    `kind` is what a preference names. `batched` says that `run` takes the leading batch axes of a product itself;
    otherwise it is called for one matrix at a time. `why` is what `explain` says when it is chosen.
    """

    name: str
    kind: str
    supports: Callable[[Any], str | None]
    run: Callable[..., Any]
    batched: bool = False
    why: str | None = None


@dataclasses.dataclass(frozen=True)
class Choice:
    """The outcome of a selection, as `explain` shows it."""

    name: str
    reason: str
    rejected: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.reason}", *(f"  not {name}: {why}" for name, why in self.rejected)]
        return "\n".join(lines)


def anything(problem: AnyProblem) -> None:
    """`supports` of an implementation without limits."""
    del problem


# Up to this many values both paths in JAX take about as long, and the reference compiles faster.
TINY = 1 << 14


def _tiny(problem: Problem) -> str | None:
    if problem.rows * problem.cols <= TINY:
        return None
    return f"{problem.rows} x {problem.cols} is more than {TINY} values, so decoding all of them at once is slower"


# Fastest first. `small` is the reference where it is the quickest choice in JAX; the last row takes everything.
CANDIDATES: tuple[Candidate, ...] = (
    Candidate("native_cpu", "native", cpu.refuses_product, cpu.qmatmul, batched=True),
    Candidate("native_cuda", "native", cuda.refuses_product, cuda.qmatmul, batched=True),
    Candidate("pallas_tpu", "native", tpu.refuses_product, tpu.qmatmul, batched=True),
    Candidate(
        "reference", "small", _tiny, reference.qmatmul,
        why=f"at most {TINY} values: decoding all of them is as quick, and compiles faster",
    ),
    Candidate("xla", "xla", anything, xla.qmatmul),
    Candidate("reference", "reference", anything, reference.qmatmul, batched=True),
)  # fmt: skip


def choose(candidates: Sequence[Candidate], problem: AnyProblem) -> tuple[Candidate, Choice]:
    """The first candidate that takes the problem, those of the preferred kind being asked first."""
    ranked = sorted(candidates, key=lambda c: problem.preference not in ("auto", c.kind))
    rejected: list[tuple[str, str]] = []
    for candidate in ranked:
        why = _refusal(candidate, problem)
        if why is None:
            return candidate, Choice(
                candidate.name, _reason(problem, candidate), _rest(ranked, candidate.name, rejected)
            )
        rejected.append((candidate.name, why))
    raise AssertionError(f"no implementation takes {problem}; the last one should")


def _refusal(candidate: Candidate, problem: AnyProblem) -> str | None:
    off = switch.refusal(problem.fmt) if candidate.kind == "native" else None
    return off or candidate.supports(problem)


def _reason(problem: AnyProblem, candidate: Candidate) -> str:
    if candidate.kind == problem.preference:
        return f"preference={problem.preference!r}"
    return candidate.why or f"quickest implementation for {problem.fmt} on {problem.platform}"


def _rest(ranked: Sequence[Candidate], chosen: str, rejected: list[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Why every other implementation is not used, each named once."""
    reasons = dict(reversed(rejected))  # of two rows with one name the first speaks
    named = [c.name for c in ranked if c.name != chosen]
    return tuple((name, reasons.get(name, f"ranked after {chosen}")) for name in dict.fromkeys(named))


def explain(problem: Problem) -> Choice:
    """What would compute this product, and why the others would not."""
    return choose(CANDIDATES, problem)[1]


def announce(op: str, candidates: Sequence[Candidate], problem: AnyProblem) -> None:
    """Leave one note for `explain` about the operation being traced, if somebody listens."""
    if not recording():
        return
    choice = choose(candidates, problem)[1]
    record("kernel", op=op, name=choice.name, reason=choice.reason, rejected=choice.rejected, problem=problem)


def announce_split(op: str, problem: AnyProblem) -> None:
    """Correct that note where XLA turns out to split the operation over devices."""
    reason = "XLA splits the program over devices; inside shard_map every device would use its own kernel"
    record("kernel", op=op, name="xla", reason=reason, rejected=(), problem=problem)


def compute(problem: Problem, x: jax.Array, codes: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Run the chosen implementation of a product."""
    candidate, _ = choose(CANDIDATES, problem)
    if candidate.batched or not problem.batch:
        return candidate.run(problem, x, codes, scale)
    return _one_at_a_time(candidate.run, problem, x, codes, scale)


def compute_rows(problem: Problem, x: jax.Array, codes: jax.Array, scale: jax.Array | None) -> jax.Array:
    """`compute` for an x with any number of axes of rows."""
    batch = len(problem.batch)
    flat = x.reshape(*x.shape[:batch], problem.m, x.shape[-1])
    y = compute(problem, flat, codes, scale)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _one_at_a_time(
    run: Callable[..., jax.Array], problem: Problem, x: jax.Array, codes: jax.Array, scale: jax.Array | None
) -> jax.Array:
    """Loop over the batch axes, so that only one decoded panel exists at any time."""
    axes = len(problem.batch)

    def flat(array: jax.Array) -> jax.Array:
        return array.reshape(math.prod(problem.batch), *array.shape[axes:])

    operands = (flat(x), flat(codes), None if scale is None else flat(scale))
    y = lax.map(lambda one: run(problem.single(), *one), operands)
    return y.reshape(*problem.batch, *y.shape[1:])
