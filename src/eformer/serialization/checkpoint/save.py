"""`save`: a pytree to one safetensors file, or to several with an index. Complete, or not there."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eformer.errors import CheckpointError

from ..safetensors.header import about
from ..safetensors.writing import atomic_file, sync_folder, write_file
from ..tree.describe import KEY, DescribedTree, Leaf, describe_tree, dumped, host, leaves_metadata, tree_metadata
from .index import SUFFIX, Whole, index_path, read_index
from .torch_file import SUFFIXES

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
) -> Path:
    """Save a pytree of arrays, dense and implicit, as safetensors. Returns the file to give to `load`.

    Args:
        path: the file; an old one is replaced at once when the new one is complete.
        tree: any pytree. Leaves are arrays, registered implicit arrays, random keys, and Python numbers and strings.
        metadata: more strings to keep in the file.
        max_shard_size: split into files of at most this many bytes ("2GB", "500MiB") where there is more, and write
            an index `PATH.index.json`. One leaf is never split.

    >>> import tempfile, jax.numpy as jnp
    >>> from eformer.serialization import load
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = save(f"{folder}/model.safetensors", {"layers": [jnp.ones(2), jnp.zeros(3)]})
    ...     load(file)
    {'layers': [Array([1., 1.], dtype=float32), Array([0., 0., 0.], dtype=float32)]}
    """
    path = checked_path(path, tree)
    extra = checked_metadata(metadata)
    check_target(path)
    with about(path):
        contents = describe_tree(tree)
    files = plan_files(path, contents, shards_of(contents.leaves, max_shard_size), extra, secrets.token_hex(4))
    for file in files:
        sources = {name: array for leaf in file.leaves for name, array in leaf.tensors.items()}
        tensors = [tensor for leaf in file.leaves for tensor in leaf.layout()]
        with about(file.path):
            write_file(file.path, tensors, file.metadata, lambda name, sources=sources: host(sources[name], name))
    return commit(path, contents, files, extra)


def checked_path(path: Any, tree: Any) -> Path:
    """The file, if the arguments are in their order."""
    if not isinstance(path, (str, os.PathLike)):
        swapped = isinstance(tree, (str, os.PathLike))
        order = f"; the two are the other way round: save({tree!r}, tree)" * swapped
        raise TypeError(f"save(path, tree) takes the file first, got a {type(path).__name__}{order}.")
    return Path(path)


def checked_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """The user's metadata, if it is what the format allows."""
    extra = dict(metadata or {})
    if not all(isinstance(k, str) and isinstance(v, str) for k, v in extra.items()) or KEY in extra:
        raise CheckpointError(f"metadata must map strings to strings and not use the key {KEY!r}, got {metadata!r}.")
    return extra


def check_target(path: Path) -> None:
    """Refuse a path no file can have, before any work is done."""
    if path.suffix in (*SUFFIXES, ".gguf"):
        what = f"would be read as a file of another kind, by its suffix {path.suffix}; what is written is safetensors."
        raise CheckpointError(what, file=path, fix=f"Name it {path.with_suffix(SUFFIX).name}.")
    if path.is_dir():
        raise CheckpointError("is a folder.", file=path, fix=f"Name a file in it, such as {path / f'model{SUFFIX}'}.")
    if not path.parent.is_dir():
        what = f"cannot be written: there is no folder {path.parent}."
        raise CheckpointError(what, file=path, fix="Create that folder first.")


def byte_count(size: int | str) -> int:
    """A number of bytes, possibly with a unit.

    >>> byte_count("1.5GB"), byte_count("4 KiB")
    (1500000000, 4096)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = _UNITS.get(match[2].upper(), 0) if match else 0
    count = int(float(match[1]) * unit) if match else 0
    if not count:
        raise ValueError(f"{size!r} is not a size; give a positive number of bytes, or a string such as '2GB'.")
    return count


def shards_of(leaves: Sequence[Leaf], max_shard_size: int | str | None) -> list[Sequence[Leaf]]:
    """Consecutive leaves, as many together as fit; all of them without a limit."""
    if max_shard_size is None:
        return [leaves]
    limit, size = byte_count(max_shard_size), 0
    groups: list[list[Leaf]] = [[]]
    for leaf in leaves:
        if size and leaf.nbytes and size + leaf.nbytes > limit:  # every file gets a tensor, so that the index names it
            groups.append([])
            size = 0
        groups[-1].append(leaf)
        size += leaf.nbytes
    return [*groups]


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
    _write_index(path, contents, tree_metadata(contents), owners, extra)
    return index_path(path)


def commit_pieces(path: Path, contents: DescribedTree, wholes: Mapping[str, Whole], extra: Mapping[str, str]) -> None:
    """The same for a checkpoint whose tensors lie in pieces."""
    owners = {piece.name: piece.file for whole in wholes.values() for piece in whole.pieces}
    pieces = {name: whole.describe() for name, whole in wholes.items()}
    described = tree_metadata(contents) | leaves_metadata(contents.leaves) | {"pieces": pieces}
    _write_index(path, contents, described, owners, extra)


def _write_index(
    path: Path, contents: DescribedTree, described: Any, owners: Mapping[str, str], extra: Mapping[str, str]
) -> None:
    old = _files_of_set(path)
    total = sum(leaf.nbytes for leaf in contents.leaves)
    metadata = {**extra, "total_size": total, KEY: dumped(described)}
    with atomic_file(index_path(path)) as file:
        file.write(json.dumps({"metadata": metadata, "weight_map": owners}, indent=1).encode())
    path.unlink(missing_ok=True)  # a single file of an earlier save
    _remove(path, old - set(owners.values()))


def _files_of_set(path: Path) -> set[str]:
    try:
        return set(read_index(index_path(path))[0].values())
    except (FileNotFoundError, CheckpointError):  # none, or not ours to tidy
        return set()


def _remove(path: Path, names: set[str]) -> None:
    """Delete files of an old set, if their names are of the kind `shard_names` makes: an index may claim anything."""
    removed = [name for name in names if re.fullmatch(shard_pattern(path), name)]
    for name in removed:
        path.with_name(name).unlink(missing_ok=True)
    if removed:
        sync_folder(path.parent)
