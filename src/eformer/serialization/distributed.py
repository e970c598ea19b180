"""Many processes, one checkpoint: each writes the shards it holds, and reads the bytes of those it will hold.

They need a file system they all see, and no more than that: what one of them holds never passes another.
"""

from __future__ import annotations

import collections
import fnmatch
import hashlib
import itertools
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from eformer import _jax as compat
from eformer._core import ImplicitArray
from eformer.errors import CheckpointError, ProcessError

from .checkpoint.index import Bounds, Piece, Whole, index_path, open_set
from .checkpoint.load import LazyCheckpoint, restore_tree
from .checkpoint.parts import sharding_on
from .checkpoint.save import check_target, checked_metadata, commit_pieces, shard_names
from .safetensors.header import about, as_stored
from .safetensors.reading import MappedFile
from .safetensors.writing import Tensor, write_file
from .tree.describe import KEY, VERSION, DescribedTree, describe_tree, dumped, loaded, tree_metadata
from .tree.structure import unused

# Words stay with the service until the program ends, so every exchange has a number. The order is the program's own.
_numbers: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)


def exchange(what: str, word: str, timeout: float) -> list[str]:
    """What every process sent, in order. Raises if one has sent nothing after `timeout` seconds.

    >>> exchange("greet", "hello", timeout=1)
    ['hello']
    """
    count, me = jax.process_count(), jax.process_index()
    if count == 1:
        return [word]
    client = compat.distributed_client()
    if client is None:
        raise ProcessError(f"there are {count} processes, but no service joins them: call jax.distributed.initialize.")
    key = f"eformer/{what}/{next(_numbers[what])}"
    client.key_value_set(f"{key}/{me}", word)
    words = []
    for process in range(count):
        try:
            words.append(client.blocking_key_value_get(f"{key}/{process}", int(1000 * timeout)))
        except jax.errors.JaxRuntimeError as err:
            raise ProcessError(
                f"process {process} of {count} did not come to {what!r} within {timeout:g} seconds: it has ended, is "
                "stuck, or runs another program. See its own output; raise timeout= if it is only slow."
            ) from err
    return words


def digest(value: Any) -> str:
    """A short word that tells plain data from other data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


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
    commit_pieces(path, contents, wholes, extra)


Specs = Mapping[str, PartitionSpec] | Iterable[tuple[str, PartitionSpec]]


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
    >>> from eformer.serialization import save_distributed
    >>> mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = save_distributed(f"{folder}/model.safetensors", {"up": quantize(jnp.ones((64, 32)), dtype="nf4")})
    ...     load_distributed(file, mesh, {"up": PartitionSpec(None, "model")})["up"]
    ArrayNF4(float32[64,32], nf4, 4.50 bits per weight)
    """
    pairs = _pairs(specs)
    checkpoint = _Placed(path, mesh, pairs)
    entries = [checkpoint.entry(name) for name in sorted(checkpoint.files.owners)]
    identity = digest([[entry.name, list(entry.shape), str(entry.dtype)] for entry in entries])
    view = [sorted(mesh.shape.items()), [(p, str(s)) for p, s in pairs], identity]
    words = exchange(f"load {path}", json.dumps(view), timeout)
    for process, word in enumerate(words):
        if word != words[0]:
            what = f"process 0 has {words[0]:.300}, process {process} has {word:.300}."
            raise ProcessError(f"what processes load from {Path(path).name} differ: {what}")
    return restore_tree(checkpoint)


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

    def read(self, name: str, sharding: Any = None) -> Any:
        spec = next((s for p, s in self._specs if fnmatch.fnmatchcase(name.replace(".", "/"), p)), PartitionSpec())
        with about(self.path, name):
            sharding = sharding_on(self._mesh, spec)
            made: Any = super().read(name, sharding)
        if self._mesh.size > 1 or not isinstance(made, (jax.Array, ImplicitArray)):
            return made
        place: Any = getattr(made, "with_sharding", None)
        return jax.device_put(made, sharding) if place is None else place(sharding)
