"""Showing how far a long piece of work is: a callback, or a bar where a person can see it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Iterator

from eformer._table import printable


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a run stands: bytes of input that are done, out of how many, and the leaf it did last."""

    name: str
    done: int
    total: int


Reporter = Callable[[Progress], None]


@contextlib.contextmanager
def reporter(progress: Reporter | bool | None, title: str) -> Iterator[Reporter]:
    """A function to call after each leaf.

    `progress` is that function, or True for a bar, False for nothing, None for a bar if stderr is a terminal.
    """
    if callable(progress):
        yield progress
        return
    if progress is None:
        progress = sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
    if not progress:
        yield lambda step: None
        return
    with _bar(title) as update:
        yield update


@contextlib.contextmanager
def _bar(title: str) -> Iterator[Reporter]:
    try:
        import rich.console
        import rich.progress as bars
    except ImportError as err:
        raise ImportError("progress=True draws a bar with rich, which is not installed: pip install rich.") from err
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TimeRemainingColumn(),
        bars.TextColumn("{task.fields[leaf]}", markup=False),
    )
    with bars.Progress(*columns, console=rich.console.Console(stderr=True), transient=True) as shown:
        task = shown.add_task(title, total=None, leaf="")
        yield lambda step: shown.update(task, completed=step.done, total=step.total, leaf=printable(step.name))
