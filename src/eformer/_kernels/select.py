"""Which implementation computes a problem, and why.

Every operation has a table of candidates in order of speed; a new kernel is a new row. Nothing else names an
implementation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from . import switch
from .parameters import Problem


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An implementation: `supports` returns the reason why it cannot take a problem, or None if it can.

    `kind` is what a preference names. `run` takes the problem and the operands of the primitive. `why` is what
    `explain` says when it is chosen.
    """

    name: str
    kind: str
    supports: Callable[[Any], str | None]
    run: Callable[..., Any]
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


def anything(problem: Problem) -> None:
    """`supports` of an implementation without limits."""
    del problem


def default_platform() -> str:
    """What programs are compiled for: "cpu", "tpu", "cuda" or "rocm", of which JAX calls the last two "gpu"."""
    name = jax.default_backend()
    if name != "gpu":
        return name
    return "rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda"


def choose(candidates: Sequence[Candidate], problem: Problem) -> tuple[Candidate, Choice]:
    """The first candidate that takes the problem, those of the preferred kind being asked first."""
    ranked = sorted(candidates, key=lambda c: problem.preference not in ("auto", c.kind))
    rejected: list[tuple[str, str]] = []
    for candidate in ranked:
        off = switch.refusal(problem.fmt) if candidate.kind == "native" else None
        why = off or candidate.supports(problem)
        if why is None:
            others = _others(ranked, candidate.name, rejected)
            return candidate, Choice(candidate.name, _reason(problem, candidate), others)
        rejected.append((candidate.name, why))
    raise AssertionError(f"no implementation takes {problem}; the last one should")


def _reason(problem: Problem, candidate: Candidate) -> str:
    if candidate.kind == problem.preference:
        return f"preference={problem.preference!r}"
    return candidate.why or f"quickest implementation for {problem.fmt} on {problem.platform}"


def _others(ranked: Sequence[Candidate], chosen: str, rejected: list[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Why every other implementation is not used, each named once."""
    reasons = dict(reversed(rejected))  # of two rows with one name, the reason of the first
    named = [c.name for c in ranked if c.name != chosen]
    return tuple((name, reasons.get(name, f"ranked after {chosen}")) for name in dict.fromkeys(named))
