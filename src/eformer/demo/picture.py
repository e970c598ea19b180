"""One picture of a comparison: size against quality, and speed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from .formats import Row


def can_draw() -> bool:
    """Is matplotlib there (the extra `plot`)?"""
    return importlib.util.find_spec("matplotlib") is not None


def draw(path: Path, title: str, quality: str, speed: str, rows: Sequence[Row], extra: Sequence[Row] = ()) -> Path:
    """Size and quality of every row (and of `extra` ones, which have no speed) as points, speeds as bars."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    points, bars = figure.subplots(1, 2)
    colours = [f"C{i}" for i in range(len(rows) + len(extra))]
    for row, colour in zip([*rows, *extra], colours, strict=True):
        points.scatter(row.megabytes, row.quality, s=90, color=colour, marker="*" if row in extra else "o", zorder=3)
        points.annotate(row.format, (row.megabytes, row.quality), xytext=(6, 5), textcoords="offset points")
    points.set_xscale("log")
    points.set_xlabel("MB")
    points.set_ylabel(quality)
    points.set_title("size and quality")
    points.margins(0.15)
    points.grid(alpha=0.3)
    bars.bar([row.format for row in rows], [row.speed for row in rows], color=colours[: len(rows)])
    bars.set_ylabel(speed)
    bars.set_title("speed")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    return path
