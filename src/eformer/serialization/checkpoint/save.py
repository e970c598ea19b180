"""`save`: a pytree to one safetensors file, or to several with an index. Complete, or not there."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eformer.errors import CheckpointError

from ..safetensors.header import about
from ..safetensors.writing import write_file
from ..tree.describe import KEY, Leaf, describe_tree, host
from .index import SUFFIX, commit, plan_files

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
    path = Path(path)
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


def checked_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """The user's metadata, if it is what the format allows."""
    extra = dict(metadata or {})
    if not all(isinstance(k, str) and isinstance(v, str) for k, v in extra.items()) or KEY in extra:
        raise CheckpointError(f"metadata must map strings to strings and not use the key {KEY!r}, got {metadata!r}.")
    return extra


def check_target(path: Path) -> None:
    """Refuse a path no file can have, before any work is done."""
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
