"""Which implementation computes a problem, and why; and the switches that turn native kernels off.

Every operation has a table of candidates in order of speed; a new kernel is a new row. Nothing else names an
implementation.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from eformer import _settings

from .formats import float_scale
from .parameters import Problem

_nf4: contextvars.ContextVar[bool] = contextvars.ContextVar("eformer_nf4_use_kernel", default=True)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An implementation: `supports` returns the reason why it cannot take a problem, or None if it can.

    `kind` is what a preference names. `run` takes the problem and the operands of the primitive. `why` is what
    `explain` says when it is chosen. Products that round x have rows of their own, those with `rounds_x`. `in_stack` is
    `run` for one entry of a stack, given as `index`, where there is such a kernel, and `supports_in_stack` is
    `supports` for it, where others differ: they copy the entry.
    `takes_offsets` says if both multiply or decode with the offset of a problem, given as `offset`, and `takes_scales`
    if they do so with scales as they are stored, a factor of them being given as `factor`.
    """

    name: str
    kind: str
    supports: Callable[[Any], str | None]
    run: Callable[..., Any]
    why: str | None = None
    rounds_x: bool = False
    in_stack: Callable[..., Any] | None = None
    supports_in_stack: Callable[[Any], str | None] | None = None
    takes_offsets: Callable[[Any], bool] = lambda problem: False
    takes_scales: Callable[[Any], bool] = lambda problem: False

    def sees(self, problem: Problem) -> Problem:
        """The problem with scales as the candidate takes them."""
        return problem.with_float_scale() if problem.stores_scale and not self.takes_scales(problem) else problem

    def given(self, problem: Problem, scale: Any, extras: Mapping[str, Any]) -> tuple[Problem, Any, dict[str, Any]]:
        """That problem, its scale, and what belongs to the scale."""
        seen, extras = self.sees(problem), dict(extras)
        return seen, scale if seen is problem else float_scale(scale, extras.pop("factor", None)), extras


@dataclasses.dataclass(frozen=True)
class Choice:
    """The outcome of a selection, as `explain` shows it."""

    name: str
    reason: str
    rejected: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.name}: {self.reason}", *(f"  not {name}: {why}" for name, why in self.rejected)])


def anything(problem: Problem) -> None:
    """`supports` of an implementation without limits."""
    del problem


def always(problem: Problem) -> bool:
    """`takes_offsets` or `takes_scales` of an implementation that does."""
    del problem
    return True


def default_platform() -> str:
    """What programs are compiled for: "cpu", "tpu", "cuda" or "rocm", of which JAX calls the last two "gpu"."""
    name = jax.default_backend()
    if name != "gpu":
        return name
    return "rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda"


def choose(candidates: Sequence[Candidate], problem: Problem, corrected: bool = False) -> tuple[Candidate, Choice]:
    """The first candidate that takes the problem, those of the preferred kind being asked first.

    `corrected` says that the operation can add an offset to the result of a candidate that takes none.
    """
    fitting = [c for c in candidates if c.rounds_x == (problem.activations is not None)]
    ranked = sorted(fitting, key=lambda c: problem.preference not in ("auto", c.kind))
    rejected: list[tuple[str, str]] = []
    for candidate in ranked:
        off = refusal(problem.fmt) if candidate.kind == "native" else None
        added = problem.offset is not None and not candidate.takes_offsets(problem)
        why = off or candidate.supports(problem.symmetric() if added else candidate.sees(problem))
        why = "it has no kernel for zero points and biases" if why is None and added and not corrected else why
        if why is None:
            reason = candidate.why or f"quickest implementation for {problem.fmt} on {problem.platform}"
            reason = f"preference={problem.preference!r}" if candidate.kind == problem.preference else reason
            reason += "; what offsets add is a product of its own" if added else ""
            return candidate, Choice(candidate.name, reason, _others(ranked, candidate.name, rejected))
        rejected.append((candidate.name, why))
    raise AssertionError(f"no implementation takes {problem}; the last one should")


def _others(ranked: Sequence[Candidate], chosen: str, rejected: list[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Why every other implementation is not used, each named once."""
    reasons = dict(reversed(rejected))  # of two rows with one name, the reason of the first
    named = [c.name for c in ranked if c.name != chosen]
    return tuple((name, reasons.get(name, f"ranked after {chosen}")) for name in dict.fromkeys(named))


@contextlib.contextmanager
def nf4_use_kernel(value: bool) -> Iterator[None]:
    """Let NF4 arrays use native kernels (CPU, CUDA, TPU), or not, inside a `with` block, also one left by an exception.

    Like every setting of JAX it is read when a program is traced: a jitted function that has been compiled before stays
    as it is. `True` undoes an enclosing `False`; it does not overrule `EFORMER_KERNELS=0`.

    >>> with nf4_use_kernel(False):
    ...     refusal("nf4") is None, (refusal("int8") is None) == _settings.kernels_enabled()
    (False, True)
    """
    if not isinstance(value, bool):
        raise TypeError(f"nf4_use_kernel takes True or False, got {value!r}.")
    token = _nf4.set(value)
    try:
        yield
    finally:
        _nf4.reset(token)


def refusal(fmt: str) -> str | None:
    """Why products of this format may not use native kernels here; None where they may."""
    if not _settings.kernels_enabled():
        return "native kernels are turned off (EFORMER_KERNELS)"
    return "native kernels are turned off (nf4_use_kernel)" if fmt == "nf4" and not _nf4.get() else None


def switches() -> tuple[bool, bool]:
    """All a compiled operation may have depended on: part of the key it is remembered by."""
    return _settings.kernels_enabled(), _nf4.get()
