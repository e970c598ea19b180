"""A place where layers that know nothing of each other leave notes for `explain`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that happened while a program was traced or run: a materialization, a kernel choice, ..."""

    kind: str
    fields: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.fields[name]
        except KeyError:
            raise AttributeError(f"a {self.kind!r} event has no field {name!r}; it has {sorted(self.fields)}") from None


_sinks: ContextVar[tuple[list[Event], ...]] = ContextVar("eformer_event_sinks", default=())


def record(kind: str, **fields: Any) -> None:
    """Hand an event to every active recorder. Costs one context-variable read when there is none."""
    for sink in _sinks.get():
        sink.append(Event(kind, fields))


def recording() -> bool:
    return bool(_sinks.get())


@contextlib.contextmanager
def recorder() -> Iterator[list[Event]]:
    """Collect the events of a block.

    >>> with recorder() as events:
    ...     record("kernel", name="xla")
    >>> [event.name for event in events]
    ['xla']
    """
    events: list[Event] = []
    token = _sinks.set((*_sinks.get(), events))
    try:
        yield events
    finally:
        _sinks.reset(token)


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """A block whose events no recorder gets."""
    token = _sinks.set(())
    try:
        yield
    finally:
        _sinks.reset(token)
