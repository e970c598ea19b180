"""Sizes of the tiled path, found by measurement (benchmarks/arrays.py)."""

from __future__ import annotations

from ..parameters import Problem

# Decoded bytes one panel may take: much less than a dense matrix, enough to make the cost of a loop step small. XLA
# rearranges x for every panel it is multiplied with: with many rows of x fewer, larger panels are quicker.
_PANEL_BYTES, _PANEL_BYTES_MANY, _MANY = 8 << 20, 16 << 20, 64
_SMALLEST, _LARGEST = 32, 4096


def panel_rows(problem: Problem) -> int:
    """Rows per panel: the power of two that fits the budget."""
    budget = _PANEL_BYTES if problem.has_at_most(_MANY - 1) else _PANEL_BYTES_MANY
    fitting = budget // (problem.compute_dtype.itemsize * max(problem.cols, 1))
    return min(max(1 << max(fitting.bit_length() - 1, 0), _SMALLEST), _LARGEST)
