"""Many processes write one checkpoint: each the shards it holds.

They need a file system they all see, and no more than that: what one of them holds never passes another.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eformer.errors import ProcessError

from ..checkpoint.index import commit_pieces, index_path, shard_names
from ..checkpoint.save import check_target, checked_metadata
from ..checkpoint.split_tensors import Bounds, Piece, Whole
from ..locating import about
from ..safetensors.dtypes import as_stored
from ..safetensors.reading import MappedFile
from ..safetensors.writing import Tensor, write_file
from ..tree.describe import DescribedTree, describe_tree
from ..tree.metadata import KEY, VERSION, dumped, loaded, tree_metadata
from ..tree.structure import unused
from .processes import digest, exchange


def save_distributed(
    path: str | os.PathLike[str], tree: Any, *, metadata: Mapping[str, str] | None = None, timeout: float = 600.0
) -> Path:
    """Save a tree of arrays that are spread over processes. All processes call it; returns the file to load.

    Every process writes one file with its shards; of copies, one is written. The checkpoint appears when all files are
    complete. `load`, `open_lazy` and `load_distributed` read it, on any number of processes and any mesh.

    Args:
        path: the name of the checkpoint, in a folder all processes see.
        tree: as for `save`. Arrays that are not spread over processes are taken from process 0.
        metadata: more strings to keep.
        timeout: seconds to wait for the other processes; after that `ProcessError` says who is missing.
    """
    path, extra = Path(path), checked_metadata(metadata)
    with about(path):
        contents = describe_tree(tree)
    what, count = f"save {path.name}", jax.process_count()
    tag = _agree_on_tree(what, contents, timeout)
    name = shard_names(path, count, tag)[jax.process_index()]
    _together(what, timeout, lambda: _write_own(path, name, contents))
    _together(f"{what}, commit", timeout, lambda: _commit(path, contents, shard_names(path, count, tag), extra))
    return index_path(path)


def _agree_on_tree(what: str, contents: DescribedTree, timeout: float) -> str:
    """Check that all processes save the same tree; a tag for the files of this very save."""
    marks = [digest([leaf.name, leaf.description, [list(t.shape) for t in leaf.layout()]]) for leaf in contents.leaves]
    structure = digest(tree_metadata(contents))
    words = [json.loads(w) for w in exchange(what, json.dumps([secrets.token_hex(4), structure, marks]), timeout)]
    for process, (_, other, theirs) in enumerate(words):
        if (other, theirs) != (words[0][1], words[0][2]):
            mine = words[0][2] if jax.process_index() == process else theirs
            differing = [leaf.name for leaf, a in zip(contents.leaves, mine, strict=False) if a not in marks]
            where = f", first at {differing[0]!r}" if differing else ""
            raise ProcessError(
                f"{what}: processes 0 and {process} save different trees ({len(words[0][2])} and {len(theirs)} "
                f"leaves){where}. All processes must save the same global arrays."
            )
    return words[0][0]


def _together(what: str, timeout: float, work: Any) -> None:
    """Run this process's part; raise on all processes if it failed on one."""
    failed: BaseException | None = None
    try:
        work()
    except (OSError, ValueError, RuntimeError) as err:
        failed = err
    words = exchange(what, "" if failed is None else f"{type(failed).__name__}: {failed}"[:2000], timeout)
    if failed is not None:
        raise failed
    for process, word in enumerate(words):
        if word:
            raise ProcessError(f"{what}: process {process} failed: {word}")


def _write_own(path: Path, name: str, contents: DescribedTree) -> None:
    """The file of this process, of that name beside the others: the pieces of every tensor that it is to write."""
    check_target(path)
    own = path.with_name(name)
    taken: set[str] = set()
    arrays: dict[str, np.ndarray] = {}
    places: dict[str, tuple[str, Bounds]] = {}
    for leaf in contents.leaves:
        for tensor, array in leaf.tensors.items():
            for bounds, data in _own_pieces(array):
                piece = unused(f"{tensor}[{','.join(f'{a}:{b}' for a, b in bounds)}]", taken)
                arrays[piece], places[piece] = as_stored(np.asarray(data)), (tensor, bounds)
    tensors = [Tensor(piece, array.dtype, array.shape) for piece, array in arrays.items()]
    described = {"version": VERSION, "places": places}
    with about(own):
        write_file(own, tensors, {KEY: dumped(described)}, arrays.__getitem__)


def _own_pieces(array: Any) -> list[tuple[Bounds, Any]]:
    """What this process writes of an array: the first copy of each shard."""
    spread = isinstance(array, jax.Array) and not array.is_fully_addressable
    if not spread and jax.process_index() != 0:
        return []
    if not isinstance(array, jax.Array):
        return [(tuple((0, n) for n in array.shape), array)]
    found = {}
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            cuts = zip(shard.index, array.shape, strict=True)
            found[tuple(cut.indices(size)[:2] for cut, size in cuts)] = shard.data
    return list(found.items())


def _commit(path: Path, contents: DescribedTree, names: Sequence[str], extra: Mapping[str, str]) -> None:
    """Process 0 joins what all have written."""
    if jax.process_index() != 0:
        return
    layouts = {t.name: t for leaf in contents.leaves for t in leaf.layout()}
    pieces: dict[str, list[Piece]] = {name: [] for name in layouts}
    for name in names:
        file = MappedFile(path.with_name(name))
        places = loaded(file.header.metadata.get(KEY), file.path)["places"]
        for piece, (tensor, bounds) in places.items():
            stored = layouts[tensor].shape
            full = (*(tuple(b) for b in bounds), *((0, size) for size in stored[len(bounds) :]))
            pieces[tensor].append(Piece(name, piece, full))
    wholes = {name: Whole(t.dtype, t.shape, tuple(pieces[name])) for name, t in layouts.items()}
    commit_pieces(path, contents, wholes, names, extra)
