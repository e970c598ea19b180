"""The files of a checkpoint: one, or several and an index that says which tensor lies in which. It is written last."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eformer.errors import CheckpointError

from ..safetensors.header import MAX_HEADER, about, parse_json
from ..safetensors.reading import MappedFile, open_regular
from ..safetensors.writing import atomic_file, sync_folder
from ..tree.describe import KEY, NO_STRUCTURE, DescribedTree, Leaf, dumped, leaves_metadata, loaded, tree_metadata
from .split_tensors import PiecedFiles, Whole

SUFFIX = ".safetensors"
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
        table = parse_json(file.read(size), path)  # not more: read() allocates as much as it is given
    owners = table.get("weight_map") if isinstance(table, dict) else None
    metadata = table.get("metadata", {}) if isinstance(table, dict) else None
    if not isinstance(owners, dict) or not isinstance(metadata, dict):
        raise CheckpointError("is not an index: it has no mapping weight_map.", file=path)
    for tensor, name in owners.items():
        if not _is_plain_name(name):
            what = f"is listed in {name!r:.200}. An index may name only files in its own folder."
            raise CheckpointError(what, file=path, tensor=tensor)
    return Index(owners, metadata)


def _is_plain_name(name: Any) -> bool:
    """No folders, no way up, nothing hidden, nothing a file system reads otherwise."""
    if not isinstance(name, str) or not name or name.startswith(".") or set(name) & {"/", "\\", "\0", ":"}:
        return False
    return not any("\ud800" <= letter <= "\udfff" for letter in name)  # half a character cannot be in a name


def shard_names(path: Path, count: int, tag: str) -> list[str]:
    """Names of a set of files. The tag keeps a new set apart from an old one until the index says which counts."""
    stem = path.name.removesuffix(SUFFIX)
    return [f"{stem}-{i:05d}-of-{count:05d}.{tag}{SUFFIX}" for i in range(1, count + 1)]


def shard_pattern(path: Path) -> str:
    """A regular expression for such names."""
    return rf"{re.escape(path.name.removesuffix(SUFFIX))}-\d{{5}}-of-\d{{5}}\.[0-9a-f]{{8}}{re.escape(SUFFIX)}"


@dataclasses.dataclass(frozen=True)
class FilePlan:
    """A file to write: its leaves and its metadata."""

    path: Path
    leaves: Sequence[Leaf]
    metadata: Mapping[str, str]


def plan_files(
    path: Path, contents: DescribedTree, groups: Sequence[Sequence[Leaf]], extra: Mapping[str, str], tag: str
) -> list[FilePlan]:
    """One file that describes the tree too, or one per group; then the tree is described in the index."""
    single = len(groups) == 1
    names = [path.name] if single else shard_names(path, len(groups), tag)
    tree = tree_metadata(contents) if single else {}
    return [
        FilePlan(path.with_name(name), leaves, {**extra, KEY: dumped(leaves_metadata(leaves) | tree)})
        for name, leaves in zip(names, groups, strict=True)
    ]


def commit(path: Path, contents: DescribedTree, files: Sequence[FilePlan], extra: Mapping[str, str]) -> Path:
    """Everything is written: from this moment on it is the checkpoint, and what it replaces goes. The file to load."""
    if len(files) == 1:
        old = _files_of_set(path)
        index_path(path).unlink(missing_ok=True)
        _remove(path, old)
        return path
    owners = {tensor: file.path.name for file in files for leaf in file.leaves for tensor in leaf.tensors}
    _write_index(path, contents, tree_metadata(contents), owners, {file.path.name for file in files}, extra)
    return index_path(path)


def commit_pieces(
    path: Path, contents: DescribedTree, wholes: Mapping[str, Whole], names: Sequence[str], extra: Mapping[str, str]
) -> None:
    """The same for a checkpoint whose tensors lie in pieces, in files of these names."""
    owners = {piece.name: piece.file for whole in wholes.values() for piece in whole.pieces}
    pieces = {name: whole.describe() for name, whole in wholes.items()}
    described = tree_metadata(contents) | leaves_metadata(contents.leaves) | {"pieces": pieces}
    _write_index(path, contents, described, owners, set(names), extra)


def _write_index(
    path: Path,
    contents: DescribedTree,
    described: Any,
    owners: Mapping[str, str],
    files: set[str],
    extra: Mapping[str, str],
) -> None:
    old = _files_of_set(path)
    total = sum(leaf.nbytes for leaf in contents.leaves)
    metadata = {**extra, "total_size": total, KEY: dumped(described)}
    with atomic_file(index_path(path)) as file:
        file.write(json.dumps({"metadata": metadata, "weight_map": owners}, indent=1).encode())
    path.unlink(missing_ok=True)  # a single file of an earlier save
    _remove(path, old - files)


def _files_of_set(path: Path) -> set[str]:
    try:
        return set(read_index(index_path(path)).owners.values())
    except (FileNotFoundError, CheckpointError):  # none, or not ours to tidy
        return set()


def _remove(path: Path, names: set[str]) -> None:
    """Delete files of an old set, if their names are of the kind `shard_names` makes: an index may claim anything."""
    removed = [name for name in names if re.fullmatch(shard_pattern(path), name)]
    for name in removed:
        path.with_name(name).unlink(missing_ok=True)
    if removed:
        sync_folder(path.parent)


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
