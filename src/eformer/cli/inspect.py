"""`eformer inspect`: what is in a file, without reading its tensors."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
from pathlib import Path

from eformer.serialization.inspection import COLUMNS, FileReport, inspect

from . import _files
from ._fail import OK
from ._text import add_json, print_json, print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a safetensors file, an index of several, their folder, or a GGUF file")
    parser.add_argument("--only", metavar="GLOB", default="*", help="list only the paths this pattern matches")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """List the tensors, the totals per format, and the metadata of the file."""
    _files.check_exists(options.file)
    found = inspect(options.file)
    listed = tuple(tensor for tensor in found.tensors if fnmatch.fnmatchcase(tensor.path, options.only))
    found = dataclasses.replace(found, tensors=listed, metadata=_files.shortened(found.metadata))
    if options.json:
        print_json({**dataclasses.asdict(found), "formats": found.formats, "nbytes": found.nbytes})
    else:
        show(found)
    return OK


def show(found: FileReport) -> None:
    """Print the tables."""
    print_table(f"{found.file} ({found.kind})", COLUMNS, found.rows())
    print_table(
        f"{len(found.tensors)} tensors, {found.nbytes:,} bytes",
        ["format", "bytes"],
        [[name, f"{nbytes:,}"] for name, nbytes in found.formats.items()],
    )
    if found.metadata:
        print_table("metadata", ["key", "value"], [[key, str(value)] for key, value in found.metadata.items()])
