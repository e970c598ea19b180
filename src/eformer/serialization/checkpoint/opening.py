"""A checkpoint in one file or in several with an index: which tensor lies in which file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eformer.errors import CheckpointError

from ..locating import about
from ..safetensors.reading import MappedFile
from ..tree.metadata import KEY, NO_STRUCTURE, loaded
from .index import INDEX_SUFFIX, index_path, read_index
from .split_tensors import PiecedFiles


@dataclasses.dataclass(frozen=True)
class FileSet:
    """The open files of a checkpoint, and what its metadata says."""

    path: Path
    owners: Mapping[str, Any]  # MappedFile, or PiecedFiles
    leaves: Mapping[str, Any]
    structure: Any
    aliases: Mapping[str, str]
    metadata: Mapping[str, str]


def open_set(path: str | os.PathLike[str]) -> FileSet:
    """Open the checkpoint at a path: a file, an index, the name both would have, or a folder that holds one."""
    try:
        return _open_set(_find(Path(path)))
    except (CheckpointError, FileNotFoundError) as err:
        gone = err.__cause__ if isinstance(err, CheckpointError) else err
        if not isinstance(gone, FileNotFoundError):
            raise
    # A new save may have removed the files that the index just read had named.
    return _open_set(_find(Path(path)))


def _open_set(path: Path) -> FileSet:
    if not path.name.endswith(INDEX_SUFFIX):
        file = MappedFile(path)
        described = loaded(file.header.metadata.get(KEY), path)
        return _file_set(path, dict.fromkeys(file.header.entries, file), described, [described], file.header.metadata)
    index = read_index(path)
    first: dict[str, str] = {}  # a tensor of every file, for messages
    for tensor, name in index.owners.items():
        first.setdefault(name, tensor)
    files = {name: _member(path, name, first[name]) for name in sorted(first)}
    for tensor, name in index.owners.items():
        files[name].entry(tensor)  # raises if it is not there
    text = index.metadata.get(KEY)
    if text is not None and not isinstance(text, str):
        raise CheckpointError(f"has metadata under {KEY!r} that is not a string.", file=path)
    parts = [loaded(file.header.metadata.get(KEY), file.path) for file in files.values()]
    described = loaded(text, path)
    if "pieces" in described:
        pieced = PiecedFiles(path, described["pieces"], files)
        return _file_set(path, dict.fromkeys(pieced, pieced), described, [described], index.metadata)
    owners = {tensor: files[name] for tensor, name in index.owners.items()}
    return _file_set(path, owners, described, parts, index.metadata)


def _member(index: Path, name: str, first: str) -> MappedFile:
    try:
        with about(index.with_name(name), first):
            return MappedFile(index.with_name(name))
    except OSError as err:
        what = f"names the file {name!r:.200}, which cannot be opened: {err.strerror}."
        raise CheckpointError(what, file=index, fix="Fetch all files of the checkpoint.") from err


def _file_set(path: Path, owners: Any, described: Any, parts: Any, metadata: Any) -> FileSet:
    leaves: dict[str, Any] = {}
    for part in parts:
        twice = leaves.keys() & part.get("leaves", {}).keys()
        if twice:
            raise CheckpointError("is described in two files.", file=path, tensor=min(twice))
        leaves |= part.get("leaves", {})
    structure = described.get("structure", NO_STRUCTURE)
    other = {key: value for key, value in metadata.items() if key != KEY and isinstance(value, str)}
    return FileSet(path, owners, leaves, structure, described.get("aliases", {}), other)


def _find(path: Path) -> Path:
    if path.is_dir():
        found = sorted(path.glob(f"*{INDEX_SUFFIX}")) or sorted(path.glob("*.safetensors"))
        if len(found) != 1:
            names = ", ".join(p.name for p in found[:8]) or "none"
            raise CheckpointError(f"is a folder with {len(found)} checkpoints ({names}); name one.", file=path)
        return found[0]
    if not path.exists() and index_path(path).exists():
        return index_path(path)
    return path
