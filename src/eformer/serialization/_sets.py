"""A checkpoint in one file or in several with an index: which tensor lies in which file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eformer.errors import CheckpointError

from . import _contents
from ._contents import KEY, NO_STRUCTURE
from ._header import MAX_HEADER, parse_json
from ._mapped import MappedFile, open_regular
from ._pieces import PiecedFiles

INDEX_SUFFIX = ".index.json"


def index_path(path: Path) -> Path:
    """Where the index of a checkpoint in several files lies."""
    return path.with_name(path.name + INDEX_SUFFIX)


@dataclasses.dataclass(frozen=True)
class Index:
    """The file of each tensor, and the metadata of the whole."""

    owners: Mapping[str, str]
    metadata: Mapping[str, Any]


def read_index(path: Path) -> Index:
    """Read an index; every file it names lies beside it."""
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_HEADER:
            raise CheckpointError(f"is an index of {size:,} bytes; allowed are {MAX_HEADER:,}.", file=path)
        table = parse_json(file.read(size), path)  # not more: read() sets aside as much as it is asked for
    owners = table.get("weight_map") if isinstance(table, dict) else None
    metadata = table.get("metadata", {}) if isinstance(table, dict) else None
    if not isinstance(owners, dict) or not isinstance(metadata, dict):
        raise CheckpointError("is no index: it has no mapping weight_map.", file=path)
    for tensor, name in owners.items():
        if not _is_plain_name(name):
            what = f"is said to be in {name!r:.200}. An index names files in its own folder only."
            raise CheckpointError(what, file=path, tensor=tensor)
    return Index(owners, metadata)


def _is_plain_name(name: Any) -> bool:
    """No folders, no way up, nothing hidden, nothing a file system reads otherwise."""
    if not isinstance(name, str) or not name or name.startswith(".") or set(name) & {"/", "\\", "\0", ":"}:
        return False
    return not any("\ud800" <= letter <= "\udfff" for letter in name)  # half a character cannot be in a name


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
    # Somebody may have saved anew meanwhile, and removed the files that the index just read had named.
    return _open_set(_find(Path(path)))


def _open_set(path: Path) -> FileSet:
    if not path.name.endswith(INDEX_SUFFIX):
        file = MappedFile(path)
        described = _contents.loaded(file.header.metadata.get(KEY), path)
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
        raise CheckpointError(f"has metadata under {KEY!r} that is no string.", file=path)
    parts = [_contents.loaded(file.header.metadata.get(KEY), file.path) for file in files.values()]
    described = _contents.loaded(text, path)
    if "pieces" in described:
        pieced = PiecedFiles(path, described["pieces"], files)
        return _file_set(path, dict.fromkeys(pieced, pieced), described, [described], index.metadata)
    owners = {tensor: files[name] for tensor, name in index.owners.items()}
    return _file_set(path, owners, described, parts, index.metadata)


def _member(index: Path, name: str, first: str) -> MappedFile:
    try:
        with _contents.about(index.with_name(name), first):
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
