"""One picture of a comparison: size against quality, and speed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from .formats import Row


def draw(
    path: Path, title: str, quality: str, speed: str, rows: Sequence[Row], extra: Sequence[Row] = ()
) -> str | None:
    """Size and quality of every row (and of `extra` ones, which have no speed) as points, speeds as bars.

    Returns the path, or None where matplotlib (the extra `plot`) is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    points, bars = figure.subplots(1, 2)
    colours = [f"C{i}" for i in range(len(rows) + len(extra))]
    for number, (row, colour) in enumerate(zip([*rows, *extra], colours, strict=True)):
        offset = (6, 5 if number % 2 else -13)  # neighbours in the table may be neighbours in size, too
        points.scatter(row.megabytes, row.quality, s=90, color=colour, marker="*" if row in extra else "o", zorder=3)
        points.annotate(row.format, (row.megabytes, row.quality), xytext=offset, textcoords="offset points")
    sizes = [row.megabytes for row in rows]
    points.set_xscale("log")
    points.set_xlim(min(sizes) / 1.5, max(sizes) * 2)
    points.set_xticks(ticks := _ticks(min(sizes), max(sizes)), [f"{tick:g}" for tick in ticks])
    points.minorticks_off()
    points.set_xlabel("MB")
    points.set_ylabel(quality)
    points.set_title("size and quality")
    points.margins(y=0.15)
    points.grid(alpha=0.3)
    bars.bar([row.format for row in rows], [row.speed for row in rows], color=colours[: len(rows)])
    bars.set_ylabel(speed)
    bars.set_title("speed")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    return str(path)


def _ticks(smallest: float, largest: float) -> list[float]:
    """Round numbers in the range.

    >>> _ticks(0.3, 6)
    [0.5, 1, 2, 5]
    """
    numbers = [digit * 10**power if power >= 0 else digit / 10**-power for power in range(-4, 7) for digit in (1, 2, 5)]
    return [number for number in numbers if smallest <= number <= largest]
