"""`eformer export`: a quantized checkpoint in the format of another program, bit for bit."""

from __future__ import annotations

import argparse
from pathlib import Path

from eformer.serialization import export
from eformer.serialization.foreign.export import WRITERS

from ._commands import OK, add_json, print_json
from .inspect import check_exists


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="a checkpoint of any kind that `eformer inspect` lists")
    parser.add_argument("folder", type=Path, help="where model.safetensors and config.json go")
    parser.add_argument("--to", required=True, choices=WRITERS, help="the format of the folder")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Write the folder. What would need rounding is refused."""
    check_exists(options.source)
    folder = export(options.source, options.folder, options.to)
    size = (folder / "model.safetensors").stat().st_size
    if options.json:
        print_json({"folder": str(folder), "to": options.to, "nbytes": size})
    else:
        print(f"{folder}: {options.to}, {size:,} bytes")
    return OK
