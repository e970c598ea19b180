"""Many processes, one checkpoint: each writes the shards it holds, and reads the bytes of the shards it will hold.

The processes need a file system they all see, and no more than that: what one of them holds never passes another.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from eformer._core import ImplicitArray
from eformer.errors import CheckpointError, ProcessError

from . import _contents
from ._atomic import atomic_file, raw_bytes
from ._contents import KEY, Contents, about
from ._dtypes import as_stored
from ._header import Tensor, arrange, build_header
from ._lazy import LazyCheckpoint
from ._load import restore_tree
from ._mapped import MappedFile
from ._pieces import Bounds, Piece, Whole
from ._placement import sharding_on
from ._processes import agree, exchange
from ._save import check_target, checked_metadata, commit_pieces, shard_names
from ._sets import index_path, open_set
from ._structure import unused

Specs = Mapping[str, PartitionSpec] | Iterable[tuple[str, PartitionSpec]]


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
        contents = _contents.contents_of(tree)
    what, count = f"save {path.name}", jax.process_count()
    tag = _agree_on_tree(what, contents, timeout)
    name = shard_names(path, count, tag)[jax.process_index()]
    _together(what, timeout, lambda: _write_own(path, name, contents))
    _together(f"{what}, commit", timeout, lambda: _commit(path, contents, shard_names(path, count, tag), extra))
    return index_path(path)


def load_distributed(
    path: str | os.PathLike[str], mesh: Mesh, specs: Specs | None = None, *, timeout: float = 600.0
) -> Any:
    """Load a checkpoint onto the devices of a mesh, each process reading only the bytes its devices hold.

    All processes call it. Any checkpoint will do: of one file, of several, or of `save_distributed`.

    Args:
        path: as for `load`.
        mesh: a mesh of devices of all processes.
        specs: ordered `pattern -> PartitionSpec`, globs over names such as "layers.0.mlp.kernel" ("/" for "." is
            allowed): the first match decides, and what none matches is on every device. Specs are those of the logical
            arrays; codes and scales follow.
        timeout: as for `save_distributed`.

    >>> import tempfile, jax.numpy as jnp
    >>> from eformer.ops.quantization import quantize
    >>> mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = save_distributed(f"{folder}/model.safetensors", {"up": quantize(jnp.ones((64, 32)), dtype="nf4")})
    ...     load_distributed(file, mesh, {"up": PartitionSpec(None, "model")})["up"]
    ArrayNF4(float32[64,32], nf4, 4.50 bits per weight)
    """
    pairs = _pairs(specs)
    checkpoint = _Placed(path, mesh, pairs)
    view = [sorted(mesh.shape.items()), [(p, str(s)) for p, s in pairs], checkpoint.identity()]
    agree(f"what processes load from {Path(path).name}", exchange(f"load {path}", json.dumps(view), timeout))
    return restore_tree(checkpoint)


# -- saving ------------------------------------------------------------------------------------------------------------


def _agree_on_tree(what: str, contents: Contents, timeout: float) -> str:
    """Check that all processes save the same tree; a tag for the files of this very save."""
    marks = [_mark([leaf.name, leaf.description, [list(t.shape) for t in leaf.layout()]]) for leaf in contents.leaves]
    structure = _mark(_contents.tree_metadata(contents))
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


def _mark(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def _together(what: str, timeout: float, work: Any) -> None:
    """Do one's part; raise on all processes if it failed on one."""
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


def _write_own(path: Path, name: str, contents: Contents) -> None:
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
    entries = arrange([Tensor(piece, array.dtype, array.shape) for piece, array in arrays.items()])
    described = {"version": _contents.VERSION, "places": places}
    with about(own), atomic_file(own) as file:
        file.write(build_header(entries, {KEY: _contents.dumped(described)}))
        for entry in entries:
            file.write(raw_bytes(arrays[entry.name]))


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


def _commit(path: Path, contents: Contents, names: Sequence[str], extra: Mapping[str, str]) -> None:
    """Process 0 joins what all have written."""
    if jax.process_index() != 0:
        return
    layouts = {t.name: t for leaf in contents.leaves for t in leaf.layout()}
    pieces: dict[str, list[Piece]] = {name: [] for name in layouts}
    for name in names:
        file = MappedFile(path.with_name(name))
        places = _contents.loaded(file.header.metadata.get(KEY), file.path)["places"]
        for piece, (tensor, bounds) in places.items():
            stored = layouts[tensor].shape
            full = (*(tuple(b) for b in bounds), *((0, size) for size in stored[len(bounds) :]))
            pieces[tensor].append(Piece(name, piece, full))
    wholes = {name: Whole(t.dtype, t.shape, tuple(pieces[name])) for name, t in layouts.items()}
    commit_pieces(path, contents, wholes, names, extra)


# -- loading -----------------------------------------------------------------------------------------------------------


def _pairs(specs: Any) -> list[Any]:
    """The patterns and their specs, in order."""
    if isinstance(specs, (PartitionSpec, str)):  # both would pass for a list
        raise TypeError(
            f"specs={specs!r} names no leaves; give patterns and their specs, such as {{'*.kernel': "
            f"{specs if isinstance(specs, PartitionSpec) else PartitionSpec()!r}}}."
        )
    pairs: list[Any] = list((specs.items() if isinstance(specs, Mapping) else specs) or ())
    wrong = [pair for pair in pairs if not (isinstance(pair, (tuple, list)) and len(pair) == 2)]
    if wrong:
        raise TypeError(f"specs= holds {wrong[0]!r}; allowed are pairs (pattern, PartitionSpec), or a mapping of them.")
    return pairs


class _Placed(LazyCheckpoint):
    """A checkpoint whose leaves come placed on a mesh."""

    def __init__(self, path: Any, mesh: Mesh, specs: Sequence[tuple[str, PartitionSpec]]):
        super().__init__(open_set(path))
        self._mesh = mesh
        self._specs = [(pattern.replace(".", "/"), spec) for pattern, spec in specs]
        names = [name.replace(".", "/") for name in self]
        unknown = [p for p, _ in self._specs if not fnmatch.filter(names, p)]
        if unknown:
            what = f"has no leaf that {unknown[0]!r} matches; names look like {list(self)[:3]}."
            raise CheckpointError(what, file=self.path)

    def identity(self) -> str:
        """What tells this checkpoint from another of the same name."""
        entries = [self.entry(name) for name in sorted(self._owners)]
        return _mark([[entry.name, list(entry.shape), str(entry.dtype)] for entry in entries])

    def read(self, name: str, sharding: Any = None) -> Any:
        spec = next((s for p, s in self._specs if fnmatch.fnmatchcase(name.replace(".", "/"), p)), PartitionSpec())
        with about(self.path, name):
            sharding = sharding_on(self._mesh, spec)
            made: Any = super().read(name, sharding)
        if self._mesh.size > 1 or not isinstance(made, (jax.Array, ImplicitArray)):
            return made
        place: Any = getattr(made, "with_sharding", None)
        return jax.device_put(made, sharding) if place is None else place(sharding)
