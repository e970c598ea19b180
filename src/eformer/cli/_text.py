"""Printing for people: with rich where it is installed (the extra `cli`), in plain text without it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence


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
    Console(markup=False, highlight=False).print(table)
