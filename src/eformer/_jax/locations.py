"""Source locations: the user's file and line behind an operation."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from jax._src import source_info_util as _source_info

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_source_info.register_exclusion(_PACKAGE + os.sep)


class _Replays(threading.local):
    def __init__(self) -> None:
        self.tracebacks: list[Any] = []


_replays = _Replays()


class replaying:
    """A block in which a jaxpr is replayed: its equations may have lost their origin, the call around it has not."""

    __slots__ = ()

    def __enter__(self) -> None:
        _replays.tracebacks.append(_source_info._source_info_context.context.traceback)

    def __exit__(self, *exc: object) -> None:
        _replays.tracebacks.pop()


def replayed_location() -> tuple[str, int] | None:
    """(file, line) the jaxpr being replayed remembers for the operation being processed, or None."""
    here = _source_info._source_info_context.context.traceback
    for traceback in (here, *reversed(_replays.tracebacks)):
        frame = _source_info.user_frame(traceback) if traceback is not None else None
        if frame is not None:
            return frame.file_name, frame.start_line
    return None


def calling_location() -> tuple[str, int]:
    """(file, line) of the user's code that is running."""
    running = sys._getframe(1)  # JAX cuts its own tracebacks at the function being traced
    while running is not None:
        if _source_info.is_user_filename(running.f_code.co_filename):
            return running.f_code.co_filename, running.f_lineno
        running = running.f_back
    return "<unknown>", 0
