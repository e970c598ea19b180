"""Printing for people: with rich where it is installed (the extra `cli`), in plain text without it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option every command has."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def print_json(found: Any) -> None:
    """Data for programs: one object."""
    print(json.dumps(found, indent=2))


def teller(quiet: bool = False) -> Callable[[str], None]:
    """A function that says on the terminal what is being done, on one line; to a file it says nothing."""
    if quiet or not sys.stderr.isatty():
        return lambda what: None
    return lambda what: print(f"\r\x1b[2K{what}", end="" if what else "\r", file=sys.stderr, flush=True)


def shape_text(shape: Sequence[int]) -> str:
    """
    >>> shape_text((64, 32))
    '64 × 32'
    """
    return " × ".join(map(str, shape)) or "scalar"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A titled table; the first column is text, the others are aligned to the right."""
    if importlib.util.find_spec("rich") is None:
        print(plain_table(title, columns, rows))
    else:
        _rich_table(title, columns, rows)


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    r"""The table as lines of text.

    >>> print(plain_table("sizes", ["name", "bits"], [["nf4", "4.5"], ["int8", "8"]]))
    sizes
      name  bits
      nf4    4.5
      int8     8
    """
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    cells = [
        [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))] for line in lines
    ]
    return "\n".join([title, *("  " + "  ".join(line).rstrip() for line in cells)])


def _rich_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    # A file or a pipe has no width to keep to.
    wide = None if sys.stdout.isatty() else 160
    Console(markup=False, highlight=False, width=wide).print(table)
