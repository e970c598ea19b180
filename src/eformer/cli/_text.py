"""Printing for people: with rich where it is installed (the extra `cli`), in plain text without it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
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
    """A titled table; columns of numbers are aligned to the right."""
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
    turned = [_padded([column, *(row[i] for row in rows)]) for i, column in enumerate(columns)]
    return "\n".join([title, *("  " + "  ".join(line).rstrip() for line in zip(*turned, strict=True))])


def _padded(cells: Sequence[str]) -> list[str]:
    width = max(map(len, cells))
    return [cell.rjust(width) if are_numbers(cells[1:]) else cell.ljust(width) for cell in cells]


def are_numbers(cells: Sequence[str]) -> bool:
    """
    >>> are_numbers(["1,024", "-3.5%", ""]), are_numbers(["1e-7", "2 × 3"])
    (True, False)
    """
    return all(re.fullmatch(r"([-+×]? ?[\d,.]+(e[-+]?\d+)?%?)?", cell) for cell in cells)


def _rich_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for i, column in enumerate(columns):
        justify = "right" if are_numbers([row[i] for row in rows]) else "left"
        table.add_column(column, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*row)
    # A file or a pipe has no width to keep to.
    wide = None if sys.stdout.isatty() else 160
    console = Console(markup=False, highlight=False, width=wide)
    console.print(title, soft_wrap=True)  # above the table, since a title of it would be wrapped to its width
    console.print(table)
