"""The files of a checkpoint: one, or several and an index that says which tensor lies in which.

Several processes write tensors in pieces, which lie in several files and are read as if they were whole. The pieces of
a tensor form a grid, as those of every sharding do. Of a slice only the pieces it touches are read.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from eformer.errors import CheckpointError

from ..safetensors.header import CODES, DTYPES, MAX_HEADER, Entry, about, check_shape, is_count, parse_json
from ..safetensors.reading import MappedFile, aligned_empty, open_regular
from ..tree.describe import KEY, NO_STRUCTURE, loaded
from .torch_file import SUFFIXES, TorchFile

Bounds = tuple[tuple[int, int], ...]  # where a piece begins and ends along every axis


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a tensor: the file it lies in, its name there, and where it belongs."""

    file: str
    name: str
    bounds: Bounds


@dataclasses.dataclass(frozen=True)
class Whole:
    """A tensor in pieces."""

    dtype: np.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def describe(self) -> dict[str, Any]:
        """What the index says of it."""
        pieces = [[p.file, p.name, [list(b) for b in p.bounds]] for p in self.pieces]
        return {"dtype": CODES[self.dtype], "shape": list(self.shape), "pieces": pieces}


class PiecedFiles:
    """All tensors in pieces of a checkpoint, read like those of one file."""

    def __init__(self, path: Path, described: Any, files: Mapping[str, MappedFile]):
        self.path, self._files = path, files
        if not isinstance(described, dict):
            raise CheckpointError("has pieces that are not a mapping of tensors.", file=path)
        self._wholes = {name: _checked(path, name, fields, files) for name, fields in described.items()}

    def __iter__(self) -> Any:
        return iter(self._wholes)

    @property
    def descriptor(self) -> NoReturn:
        raise CheckpointError(
            "is split in pieces by the processes that wrote it.",
            file=self.path,
            fix="Load it and save it whole (eformer.serialization.load, then save).",
        )

    def entry(self, name: str) -> Entry:
        """As if the tensor lay in a file of its own."""
        whole = self._wholes[name]
        return Entry(name, whole.dtype, whole.shape, 0, math.prod(whole.shape) * whole.dtype.itemsize)

    def view(self, name: str) -> np.ndarray:
        return self.read(name)

    def read(self, name: str, index: Any = ...) -> np.ndarray:
        """A copy of part of a tensor."""
        entry, pieces = self.entry(name), self._wholes[name].pieces
        given = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(cut, slice) and cut.step in (None, 1) for cut in given):
            given, rest = (), index  # whatever else NumPy takes: read all of it, then let NumPy do that
        else:
            rest = ...
        cuts = [cut.indices(size)[:2] for cut, size in zip(given, entry.shape, strict=False)]
        cuts += [(0, size) for size in entry.shape[len(cuts) :]]
        return self._assembled(entry, pieces, cuts)[rest]

    def _assembled(self, entry: Entry, pieces: Sequence[Piece], cuts: Sequence[tuple[int, int]]) -> np.ndarray:
        shape = tuple(max(stop - start, 0) for start, stop in cuts)
        out = aligned_empty(math.prod(shape) * entry.dtype.itemsize).view(entry.dtype).reshape(shape)
        for piece in pieces:
            common = [(max(a, b), min(c, d)) for (a, c), (b, d) in zip(cuts, piece.bounds, strict=True)]
            if all(start < stop for start, stop in common):
                there = tuple(slice(a - b, c - b) for (a, c), (b, _) in zip(common, piece.bounds, strict=True))
                here = tuple(slice(a - b, c - b) for (a, c), (b, _) in zip(common, cuts, strict=True))
                out[here] = self._files[piece.file].read(piece.name, there)
        return out


def _checked(path: Path, name: str, fields: Any, files: Mapping[str, MappedFile]) -> Whole:
    """A tensor an index describes, if its pieces are there and make it up without holes and overlaps."""

    def wrong(what: str) -> CheckpointError:
        return CheckpointError(what, file=path, tensor=name)

    if not isinstance(fields, dict) or fields.get("dtype") not in DTYPES or not isinstance(fields.get("pieces"), list):
        raise wrong("has no dtype, shape and pieces in the index.")
    shape, dtype = fields.get("shape"), DTYPES[fields["dtype"]]
    check_shape(shape, wrong)
    pieces = tuple(_piece(item, len(shape), wrong) for item in fields["pieces"])  # pyright: ignore[reportArgumentType]
    for piece in pieces:
        if piece.file not in files:
            raise wrong(f"is listed in {piece.file!r:.200}, which is not a file of the checkpoint.")
        entry = files[piece.file].entry(piece.name)
        size = tuple(stop - start for start, stop in piece.bounds)
        if (entry.dtype, entry.shape) != (dtype, size):
            raise wrong(
                f"has the piece {piece.name!r:.200} of {entry.dtype}{list(entry.shape)}, not {dtype}{list(size)}."
            )
    _check_grid(pieces, tuple(shape), wrong)  # pyright: ignore[reportArgumentType]
    return Whole(dtype, tuple(shape), pieces)  # pyright: ignore[reportArgumentType]


def _piece(item: Any, rank: int, wrong: Any) -> Piece:
    file, piece, bounds = item if isinstance(item, list) and len(item) == 3 else (None, None, ())
    fits = isinstance(file, str) and isinstance(piece, str) and isinstance(bounds, list) and len(bounds) == rank
    pairs = [b for b in bounds if isinstance(b, list) and len(b) == 2 and all(map(is_count, b))] if fits else []
    if not fits or len(pairs) != rank:
        raise wrong(f"has a piece it should not: {item!r:.200}.")
    return Piece(file, piece, tuple((start, stop) for start, stop in pairs))  # pyright: ignore[reportArgumentType]


def _check_grid(pieces: Sequence[Piece], shape: tuple[int, ...], wrong: Any) -> None:
    count = 1
    for axis, size in enumerate(shape):
        along = sorted({piece.bounds[axis] for piece in pieces})
        ends = [0, *(stop for _, stop in along)]
        if [start for start, _ in along] != ends[:-1] or ends[-1] != size:
            raise wrong(f"has pieces {along[:8]} along axis {axis}, which do not make up its {size} entries.")
        count *= len(along)
    if len(pieces) != count or len({piece.bounds for piece in pieces}) != count:
        raise wrong(f"has {len(pieces)} pieces, where {count} different ones are needed.")


SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"


def index_path(path: Path) -> Path:
    """Where the index of a checkpoint in several files lies."""
    return path.with_name(path.name + INDEX_SUFFIX)


def read_index(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """The file of each tensor, which lies beside the index, and the metadata of the whole."""
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
    return owners, metadata


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
        return _open_set(find_checkpoint(Path(path)))
    except (CheckpointError, FileNotFoundError) as err:
        gone = err.__cause__ if isinstance(err, CheckpointError) else err
        if not isinstance(gone, FileNotFoundError):
            raise
    # A new save may have removed the files that the index just read had named.
    return _open_set(find_checkpoint(Path(path)))


def _open_file(path: Path) -> MappedFile:
    return TorchFile(path) if path.suffix in SUFFIXES else MappedFile(path)


def _open_set(path: Path) -> FileSet:
    if path.is_dir():
        return _shards_of(path)
    if not path.name.endswith(INDEX_SUFFIX):
        file = _open_file(path)
        described = loaded(file.header.metadata.get(KEY), path)
        return _file_set(path, dict.fromkeys(file.header.entries, file), described, [described], file.header.metadata)
    names, metadata = read_index(path)
    first: dict[str, str] = {}  # a tensor of every file, for messages
    for tensor, name in names.items():
        first.setdefault(name, tensor)
    files = {name: _member(path, name, first[name]) for name in sorted(first)}
    for tensor, name in names.items():
        files[name].entry(tensor)  # raises if it is not there
    text = metadata.get(KEY)
    if text is not None and not isinstance(text, str):
        raise CheckpointError(f"has metadata under {KEY!r} that is not a string.", file=path)
    parts = [loaded(file.header.metadata.get(KEY), file.path) for file in files.values()]
    described = loaded(text, path)
    if "pieces" in described:
        pieced = PiecedFiles(path, described["pieces"], files)
        return _file_set(path, dict.fromkeys(pieced, pieced), described, [described], metadata)
    for file in files.values():
        if unnamed := file.header.entries.keys() - names.keys():
            more = f" (nor {len(unnamed) - 1} more)" if len(unnamed) > 1 else ""
            what = f"is in the file, but {path.name} does not name it{more}."
            fix = "Fetch index and files again, or remove the index: without it, all that the shards hold is read."
            raise CheckpointError(what, file=file.path, tensor=min(unnamed), fix=fix)
    owners = {tensor: files[name] for tensor, name in names.items()}
    return _file_set(path, owners, described, parts, metadata)


def _member(index: Path, name: str, first: str) -> MappedFile:
    try:
        with about(index.with_name(name), first):
            return _open_file(index.with_name(name))
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


_USUAL = ("model", "pytorch_model")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.(safetensors|bin|gguf)")


def _shards_of(folder: Path) -> FileSet:
    """Files that name themselves shards of one checkpoint, without an index."""
    files = [_open_file(path) for path in _chosen(folder)]
    owners: dict[str, MappedFile] = {}
    for file in files:
        twice = owners.keys() & file.header.entries.keys()
        if twice:
            fix = "Remove the file that does not belong here, or fetch the index, which says which one counts."
            raise CheckpointError("is in two files.", file=file.path, tensor=min(twice), fix=fix)
        owners |= dict.fromkeys(file.header.entries, file)
    parts = [loaded(file.header.metadata.get(KEY), file.path) for file in files]
    return _file_set(folder, owners, {}, parts, {})


def find_checkpoint(path: Path) -> Path:
    """The file or index that a path stands for; a folder of shards without an index stands for itself."""
    if path.is_dir():
        return _find_in(path)
    if not path.exists() and index_path(path).exists():
        return index_path(path)
    if path.suffix == ".json" and not path.name.endswith(INDEX_SUFFIX):
        what = "holds no tensors: of JSON files only an index (*.index.json) stands for a checkpoint."
        raise CheckpointError(what, file=path, fix=f"Name the weights, or the folder: {path.parent}.")
    return path


def _find_in(folder: Path) -> Path:
    found = _chosen(folder)
    # Any of its parts stands for a GGUF file.
    return found[0] if len(found) == 1 or found[0].suffix == ".gguf" else folder


def _chosen(folder: Path) -> list[Path]:
    """What makes up the checkpoint in a folder: one file, an index, or shards."""
    indices = sorted(folder.glob(f"*{INDEX_SUFFIX}"))
    of_torch = [path for path in indices if path.name.removesuffix(INDEX_SUFFIX).endswith(SUFFIXES)]
    for suffix in (SUFFIX, *SUFFIXES, ".gguf"):
        found = [path for path in indices if (path in of_torch) == (suffix != SUFFIX)]
        found = found or sorted(folder.glob(f"*{suffix}"))
        sets: dict[tuple[str, int], list[Path]] = {}
        for path in found:
            shard = _SHARD.fullmatch(path.name)
            name = path.name.removesuffix(INDEX_SUFFIX).removesuffix(suffix)
            sets.setdefault((shard[1], int(shard[3])) if shard else (name, 1), []).append(path)
        usual = [key for key in sets if key[0] in _USUAL]
        keys = usual if len(sets) > 1 and len(usual) == 1 else [*sets]
        if len(keys) > 1:
            names = ", ".join(p.name for p in found[:8])
            raise CheckpointError(f"is a folder with {len(found)} checkpoints ({names}); name one.", file=folder)
        if keys:
            _check_shards(folder, sets[keys[0]], keys[0][1])
            return sets[keys[0]]
    fix = "Name the folder that has the .safetensors, .gguf, .bin or .pt files."
    raise CheckpointError("is a folder without a checkpoint.", file=folder, fix=fix)


def _check_shards(folder: Path, found: Sequence[Path], count: int) -> None:
    numbers = {int(match[2]) for path in found if (match := _SHARD.fullmatch(path.name))}
    if numbers and (lost := {*range(1, count + 1)} - numbers):
        what = f"has {len(numbers)} of {count} shards; number {min(lost)} is missing."
        raise CheckpointError(what, file=folder, fix="Fetch all files of the checkpoint.")
