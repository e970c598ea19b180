"""`explain`: what a program did with its implicit arrays, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from eformer._record import Event, recorder

from .materialization import fresh_trace


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Every materialization and every kernel choice of one run, in order; prints as text."""

    events: tuple[Event, ...]
    result: Any

    @property
    def materializations(self) -> tuple[Event, ...]:
        return tuple(e for e in self.events if e.kind == "materialize")

    @property
    def kernels(self) -> tuple[Event, ...]:
        return tuple(e for e in self.events if e.kind == "kernel")

    def __str__(self) -> str:
        if not self.events:
            return "nothing was materialized, and no kernel was chosen"
        return "\n".join(map(_line, self.events))

    __repr__ = __str__


def _line(event: Event) -> str:
    if event.kind in ("materialize", "decode"):
        rows = f"decoded {event.dtype}[{','.join(map(str, event.shape))}] of"
        done = "materialized" if event.kind == "materialize" else rows
        return f"{done} {event.array} for {event.primitive} at {event.where} ({event.dense_bytes:,} bytes dense)"
    known = ("op", "name", "reason", "rejected")
    facts = ", ".join(f"{k}={v}" for k, v in event.fields.items() if k not in known)
    lines = [
        f"{event.kind} {event.fields.get('op', '')}: {event.fields.get('name', '')}, {event.fields.get('reason', '')}"
    ]
    lines += [f"    not {name}: {why}" for name, why in event.fields.get("rejected", ())]
    return "\n".join([*lines, f"    {facts}"])


def explain(fn: Callable[..., Any]) -> Callable[..., Explanation]:
    """Trace and run `fn` once, and report what happened to its implicit arrays.

    >>> import jax.numpy as jnp
    >>> print(explain(lambda x: x + 1)(jnp.ones(3)))
    nothing was materialized, and no kernel was chosen
    """

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        with recorder() as events, fresh_trace(object()):
            result = fn(*args, **kwargs)
        return Explanation(tuple(events), result)

    return explained
