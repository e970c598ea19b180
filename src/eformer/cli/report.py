"""`eformer report`: what a checkpoint holds and what quantizing it cost."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

from eformer._table import shape_text
from eformer.ops.quantization import report as report_of

from . import _files
from ._fail import OK, Failure
from ._text import add_json, print_json, print_table

# Further sections, each a module with three functions: `add_arguments(parser)`; `section(options, leaves)`, which gives
# data for JSON, or None when it was not asked for; `show(data)`, which prints them. The name is the key in the object.
SECTIONS: dict[str, str] = {"mesh": "eformer.cli._mesh"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a safetensors file, an index of several, their folder, or a GGUF file")
    parser.add_argument("--against", type=Path, metavar="ORIGINAL", help="measure errors against this checkpoint")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw sizes and errors (needs matplotlib)")
    add_json(parser)
    for module in SECTIONS.values():
        importlib.import_module(module).add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Print the report, and draw it if asked to."""
    leaves = dict(_files.open_checkpoint(options.file))
    found = report_of(leaves, None if options.against is None else _original(options.against, leaves))
    if options.plot is not None:
        try:
            found.plot(options.plot)
        except ImportError as err:
            raise Failure(str(err)) from err
    more = {name: importlib.import_module(module).section(options, leaves) for name, module in SECTIONS.items()}
    more = {name: data for name, data in more.items() if data is not None}
    if options.json:
        print_json({"file": str(options.file), **json.loads(found.to_json()), **more})
        return OK
    show(str(options.file), found)
    for name, data in more.items():
        importlib.import_module(SECTIONS[name]).show(data)
    return OK


def _original(path: Path, leaves: dict[str, Any]) -> dict[str, Any]:
    opened = _files.open_checkpoint(path)
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


def show(title: str, found: Any) -> None:
    """The table for people."""
    print_table(
        title,
        ["path", "format", "shape", "bytes", "bits/weight", "rel. error", "SQNR dB"],
        [_cells(leaf) for leaf in found.leaves],
    )
    share = found.nbytes / max(found.dense_nbytes, 1)
    print(
        f"{found.nbytes:,} bytes, {found.bits_per_weight:.2f} bits per weight; "
        f"{found.dense_nbytes:,} bytes dense, {share:.1%} of that held"
    )


def _cells(leaf: Any) -> list[str]:
    error = "" if leaf.relative_error is None else f"{leaf.relative_error:.4f}"
    ratio = "" if leaf.sqnr_db is None else f"{leaf.sqnr_db:.1f}"
    held = f"{leaf.nbytes:,}" if leaf.tied_to is None else f"as {leaf.tied_to}"
    return [leaf.path, leaf.format, shape_text(leaf.shape), held, f"{leaf.bits_per_weight:.2f}", error, ratio]
