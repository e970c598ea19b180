"""What commands share: exit statuses, the errors that end one with one line for the user, and printing for people.

Tables are drawn with rich where it is installed (the extra `cli`), in plain text without it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Sequence
from typing import Any

from eformer._table import are_numbers, lines, printable
from eformer.errors import CommandError as Failure
from eformer.errors import CommandUsageError as WrongUse

OK, FAILED, WRONG_USE = 0, Failure.status, WrongUse.status


def version(name: str) -> str:
    """The version of a distribution, also when it is run from its sources without being installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option every command has."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def print_json(found: Any) -> None:
    """Data for programs: one object."""
    print(json.dumps(found, indent=2))


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
