"""Tables as plain text, for everything that prints one."""

from __future__ import annotations

import re
from collections.abc import Sequence


def lines(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """One line per row, after one for the head; columns of numbers are aligned to the right.

    >>> print(*lines(["name", "bits"], [["nf4", "4.5"], ["int8", "8"]]), sep="\\n")
    name  bits
    nf4    4.5
    int8     8
    """
    turned = [_padded([column, *(printable(row[i]) for row in rows)]) for i, column in enumerate(columns)]
    return ["  ".join(line).rstrip() for line in zip(*turned, strict=True)]


def printable(text: str) -> str:
    """Text that a terminal shows and does not obey: names in files may hold anything.

    >>> print(printable("w\\x1b[2J\\udc80 × 2"))
    w\\x1b[2J\\udc80 × 2
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def are_numbers(cells: Sequence[str]) -> bool:
    """
    >>> are_numbers(["1,024", "-3.5%", ""]), are_numbers(["1e-7", "2 × 3"])
    (True, False)
    """
    return all(re.fullmatch(r"([-+×]? ?[\d,.]+(e[-+]?\d+)?%?)?", cell) for cell in cells)


def shape_text(shape: Sequence[int]) -> str:
    """
    >>> shape_text((64, 32))
    '64 × 32'
    """
    return " × ".join(map(str, shape)) or "scalar"


def _padded(cells: Sequence[str]) -> list[str]:
    width = max(map(len, cells))
    return [cell.rjust(width) if are_numbers(cells[1:]) else cell.ljust(width) for cell in cells]
