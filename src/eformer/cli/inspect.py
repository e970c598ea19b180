"""`eformer inspect`: what is in a file, without reading its tensors."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
from pathlib import Path
from typing import Any

from eformer.serialization import GgufFile, LazyCheckpoint
from eformer.serialization import open_checkpoint as open_any
from eformer.serialization.inspection import COLUMNS, FileReport, inspect

from ._commands import OK, Failure, add_json, print_json, print_table


def check_exists(path: Path) -> None:
    """A file, a folder, or the name that an index of several files would have."""
    if not path.exists() and not path.with_name(path.name + ".index.json").exists():
        raise Failure(f"{path} does not exist.")


def open_checkpoint(path: Path) -> LazyCheckpoint | GgufFile:
    """A checkpoint of any kind; its leaves are not read."""
    check_exists(path)
    return open_any(path)


def _short(value: Any) -> Any:
    """A value of the metadata: long strings are cut, long lists counted."""
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return value if len(value) <= 200 else f"{value[:200]}... ({len(value):,} characters)"
    return f"{len(value):,} values" if hasattr(value, "__len__") else str(value)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a safetensors file, an index of several, their folder, or a GGUF file")
    parser.add_argument("--only", metavar="GLOB", default="*", help="list only the paths this pattern matches")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """List the tensors, the totals per format, and the metadata of the file."""
    check_exists(options.file)
    found = inspect(options.file)
    listed = tuple(tensor for tensor in found.tensors if fnmatch.fnmatchcase(tensor.path, options.only))
    metadata = {key: _short(value) for key, value in found.metadata.items()}
    found = dataclasses.replace(found, tensors=listed, metadata=metadata)
    if options.json:
        print_json({**dataclasses.asdict(found), "formats": found.formats, "nbytes": found.nbytes})
    else:
        show(found)
    return OK


def show(found: FileReport) -> None:
    print_table(f"{found.file} ({found.kind})", COLUMNS, found.rows())
    print_table(
        f"{len(found.tensors)} tensors, {found.nbytes:,} bytes",
        ["format", "bytes"],
        [[name, f"{nbytes:,}"] for name, nbytes in found.formats.items()],
    )
    if found.metadata:
        print_table("metadata", ["key", "value"], [[key, str(value)] for key, value in found.metadata.items()])
