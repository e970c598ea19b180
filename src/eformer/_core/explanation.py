"""`explain`: what becomes of the implicit arrays of a program."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu

from eformer._messages import shown
from eformer._record import Event, recorder, unrecorded

from .box import notice_boxes
from .materialization import fresh_trace, materialization_policy, policy_in_force

_LINES = 10
_OF_TRACING = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.UnexpectedTracerError,
)
_OF_FLAX = ("JaxTransformError", "TraceContextError")  # by name, because Flax may not be there


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Every materialization and every kernel choice of a program, in order.

    Prints as a summary: a line for every kind of event, ten at most. `details()` is all that is known. `result` is what
    the program gives; it is run when that is first read.
    """

    events: tuple[Event, ...]
    run: Callable[[], Any]

    @functools.cached_property
    def result(self) -> Any:
        with unrecorded():
            return self.run()

    @property
    def materializations(self) -> tuple[Event, ...]:
        return tuple(e for e in self.events if e.kind == "materialize")

    @property
    def kernels(self) -> tuple[Event, ...]:
        return tuple(e for e in self.events if e.kind == "kernel")

    def __str__(self) -> str:
        counts = collections.Counter(map(_line, self.events))
        # What was materialized is what people look for.
        ordered = sorted(counts.items(), key=lambda found: not found[0].startswith("materialized"))
        lines = [f"{line}, {times} times" if times > 1 else line for line, times in ordered]
        if len(lines) > _LINES:
            rest = sum(times for _, times in ordered[_LINES - 1 :])
            lines[_LINES - 1 :] = [f"and {rest} more: print(explanation.details())"]
        return "\n".join(lines) or "nothing was materialized, and no kernel was chosen"

    __repr__ = __str__

    def details(self) -> str:
        """Every event by itself, and why other kernels were not chosen."""
        return "\n".join(line for event in self.events for line in (_line(event), *_rejected(event)))


def _rejected(event: Event) -> list[str]:
    return [f"    not {name}: {why}" for name, why in event.fields.get("rejected", ())]


def _line(event: Event) -> str:
    if event.kind in ("materialize", "decode"):
        rows = f"decoded {event.dtype}[{','.join(map(str, event.shape))}] of"
        done = "materialized" if event.kind == "materialize" else rows
        return f"{done} {event.array} for {event.primitive} at {event.where} ({event.dense_bytes:,} bytes dense)"
    fields = {k: v for k, v in event.fields.items() if k not in ("op", "name", "reason", "rejected")}
    facts = ", ".join(str(v) if k == "problem" else f"{k}={v}" for k, v in fields.items())
    op, name, reason = (event.fields.get(k, "") for k in ("op", "name", "reason"))
    return f"{event.kind} {op}: {name}, {reason}" + f" ({facts})" * bool(facts)


def explain(fn: Callable[..., Any], *misplaced: Any) -> Callable[..., Explanation]:
    """Trace `fn`, and report what becomes of its implicit arrays. Nothing is compiled.

    A function that cannot be traced, because it looks at numbers or keeps state, is run instead (and has then run twice
    up to there). Other errors are raised as they are.

    >>> import jax.numpy as jnp
    >>> print(explain(lambda x: x + 1)(jnp.ones(3)))
    nothing was materialized, and no kernel was chosen
    """
    if misplaced or not callable(fn):
        raise TypeError(
            f"explain takes a function alone, got {', '.join(map(shown, (fn, *misplaced)))}. Its arguments come in a "
            "second call: explain(f)(x, q)."
        )

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        policy = policy_in_force()

        def run() -> Any:
            with materialization_policy(policy):
                return fn(*args, **kwargs)

        with recorder() as events, fresh_trace(object()):
            try:
                _trace(fn, args, kwargs)
            except Exception as err:
                if not _is_of_tracing(err):
                    raise
                events.clear()
                result = fn(*args, **kwargs)
                return Explanation(tuple(events), lambda: result)
        return Explanation(tuple(events), run)

    return explained


def _is_of_tracing(err: Exception) -> bool:
    """Was it raised because values are not known, or state cannot be kept, while a function is traced?"""
    if isinstance(err, _OF_TRACING) or type(err).__name__ in _OF_FLAX:
        return True
    # What JAX does not say itself: a tracer has not all attributes of an array, and no format.
    return isinstance(err, (AttributeError, TypeError)) and "Tracer" in str(err)


def _trace(fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Call `fn` with its arrays as tracers. All else that it is given, it gets as it is."""
    leaves, treedef = jtu.tree_flatten((args, kwargs))
    is_array = [isinstance(leaf, jax.Array) for leaf in leaves]

    def program(arrays: list[Any]) -> list[Any]:
        given = iter(arrays)
        args, kwargs = jtu.tree_unflatten(
            treedef, [next(given) if dynamic else leaf for dynamic, leaf in zip(is_array, leaves, strict=True)]
        )
        return [leaf for leaf in jtu.tree_leaves(fn(*args, **kwargs)) if isinstance(leaf, jax.Array)]

    traced = jax.make_jaxpr(program)([leaf for leaf, dynamic in zip(leaves, is_array, strict=True) if dynamic])
    notice_boxes(traced)
