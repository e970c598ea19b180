"""Printing for people: with rich where it is installed (the extra `cli`), in plain text without it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from eformer._table import are_numbers, lines, printable


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option every command has."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def print_json(found: Any) -> None:
    """Data for programs: one object."""
    print(json.dumps(found, indent=2))


def teller(quiet: bool = False) -> Callable[[str], None]:
    """A function that shows progress on one line of the terminal, and prints nothing to a file."""
    if quiet or not sys.stderr.isatty():
        return lambda what: None
    return lambda what: print(f"\r\x1b[2K{what}", end="" if what else "\r", file=sys.stderr, flush=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A titled table; columns of numbers are aligned to the right."""
    if importlib.util.find_spec("rich") is None:
        print("\n  ".join([printable(title), *lines(columns, rows)]))
    else:
        _rich_table(title, columns, rows)


def _rich_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for i, column in enumerate(columns):
        justify = "right" if are_numbers([row[i] for row in rows]) else "left"
        table.add_column(column, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*map(printable, row))
    # A file or a pipe has no width.
    wide = None if sys.stdout.isatty() else 160
    console = Console(markup=False, highlight=False, width=wide)
    # Above the table: rich would wrap a title to the width of the table.
    console.print(printable(title), soft_wrap=True)
    console.print(table)
