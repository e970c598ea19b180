"""`eformer report`: what a checkpoint holds and what quantizing it cost."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from eformer._quantize.report import COLUMNS, Report
from eformer._quantize.report import report as report_of

from . import _mesh
from ._common import OK, Failure, add_json, print_json, print_table
from .inspect import open_checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a safetensors file, an index of several, their folder, or a GGUF file")
    parser.add_argument("--against", type=Path, metavar="ORIGINAL", help="measure errors against this checkpoint")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw sizes and errors (needs matplotlib)")
    add_json(parser)
    _mesh.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Print the report, and draw it with --plot."""
    leaves = dict(open_checkpoint(options.file))
    found = report_of(leaves, None if options.against is None else _original(options.against, leaves))
    if options.plot is not None:
        try:
            found.plot(options.plot)
        except ImportError as err:
            raise Failure(str(err)) from err
    mesh = _mesh.section(options, leaves)
    if options.json:
        print_json({"file": str(options.file), **json.loads(found.to_json()), **({"mesh": mesh} if mesh else {})})
        return OK
    show(str(options.file), found)
    if mesh:
        _mesh.show(mesh)
    return OK


def _original(path: Path, leaves: dict[str, Any]) -> dict[str, Any]:
    opened = open_checkpoint(path)
    shared = [name for name in leaves if name in opened]
    if not shared:
        there = ", ".join(map(repr, list(opened)[:3]))
        raise Failure(f"--against {path} has none of the tensors of the report; its names look like {there}.")
    original = {name: opened[name] for name in shared}
    for name, value in original.items():
        if tuple(value.shape) != tuple(leaves[name].shape):
            here, before = tuple(leaves[name].shape), tuple(value.shape)
            raise Failure(f"--against {path} is another model: {name!r} has the shape {before} there, {here} here.")
    return original


def show(title: str, found: Report) -> None:
    """Print the table."""
    print_table(title, COLUMNS, found.rows(digits=4))
    share = found.nbytes / max(found.dense_nbytes, 1)
    print(
        f"{found.nbytes:,} bytes, {found.bits_per_weight:.2f} bits per weight; "
        f"{found.dense_nbytes:,} bytes dense, {share:.1%} of that held"
    )
