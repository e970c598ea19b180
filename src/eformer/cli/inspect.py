"""`eformer inspect`: what is in a file, without reading its tensors."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import fnmatch
from pathlib import Path
from typing import Any

from . import _files
from ._fail import OK
from ._text import add_json, print_json, print_table, shape_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a safetensors file, an index of several, their folder, or a GGUF file")
    parser.add_argument("--only", metavar="GLOB", default="*", help="list only the paths this pattern matches")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """List the tensors, the totals per format, and the notes of the file."""
    opened = _files.open_checkpoint(options.file)
    listed = [tensor for tensor in _files.tensors(opened) if fnmatch.fnmatchcase(tensor.path, options.only)]
    found = {
        "file": str(options.file),
        "kind": "gguf" if _files.is_gguf(options.file) else "safetensors",
        "tensors": [dataclasses.asdict(tensor) for tensor in listed],
        "formats": _totals(listed),
        "nbytes": sum(tensor.nbytes for tensor in listed),
        "metadata": _files.metadata(opened),
    }
    print_json(found) if options.json else show(found)
    return OK


def _totals(listed: list[_files.Tensor]) -> dict[str, int]:
    sums: collections.Counter[str] = collections.Counter()
    for tensor in listed:
        sums[tensor.format] += tensor.nbytes
    return dict(sums)


def show(found: dict[str, Any]) -> None:
    """The same for people."""
    print_table(
        f"{found['file']} ({found['kind']})",
        ["path", "format", "shape", "dtype", "bytes"],
        [[t["path"], t["format"], shape_text(t["shape"]), t["dtype"], f"{t['nbytes']:,}"] for t in found["tensors"]],
    )
    print_table(
        f"{len(found['tensors'])} tensors, {found['nbytes']:,} bytes",
        ["format", "bytes"],
        [[name, f"{nbytes:,}"] for name, nbytes in found["formats"].items()],
    )
    if found["metadata"]:
        print_table("metadata", ["key", "value"], [[key, str(value)] for key, value in found["metadata"].items()])
