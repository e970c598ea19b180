"""Input of streaming: leaves that are read one at a time, or copied in chunks, without a map of the whole file."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from ._contents import NO_STRUCTURE, Leaf
from ._dtypes import named_dtype
from ._gguf import GgufFile
from ._gguf_header import MAGIC
from ._lazy import LazyCheckpoint
from ._mapped import open_regular
from ._sets import FileSet, open_set


@dataclasses.dataclass(frozen=True)
class SourceLeaf:
    """A leaf of the input: `copy` gives each of its tensors in chunks, `read` a dense one, into a buffer of bytes."""

    leaf: Leaf
    copy: Mapping[str, Callable[[], Iterable[np.ndarray]]]
    read: Callable[[np.ndarray], np.ndarray] | None = None
    announce: Callable[[], None] = lambda: None

    @property
    def dense(self) -> jax.ShapeDtypeStruct | None:
        """Shape and dtype of a leaf that is one plain tensor."""
        return next(iter(self.leaf.tensors.values())) if self.read is not None else None


class Source(Protocol):
    """An input: its leaves in order, what else its checkpoint says, and what tells it from any other."""

    @property
    def paths(self) -> Sequence[Path]: ...
    @property
    def leaves(self) -> Sequence[SourceLeaf]: ...
    @property
    def structure(self) -> Any: ...
    @property
    def aliases(self) -> Mapping[str, str]: ...
    @property
    def metadata(self) -> Mapping[str, str]: ...
    @property
    def identity(self) -> Any: ...


class SafetensorsSource:
    """A safetensors checkpoint of one or more files."""

    def __init__(self, path: str | os.PathLike[str]):
        files = open_set(path)
        checkpoint = LazyCheckpoint(files)
        self.structure, self.aliases, self.metadata = files.structure, files.aliases, files.metadata
        self.leaves = [_leaf(info.name, info.tensors, files) for info in map(checkpoint.info, checkpoint)]
        opened = sorted({(file.path, file.descriptor) for file in files.owners.values()})
        self.paths = [files.path, *(path for path, _ in opened)]
        self.identity = [file_identity(path, descriptor) for path, descriptor in opened]


class GgufSource:
    """A GGUF file, its block types decoded to f32."""

    def __init__(self, path: str | os.PathLike[str]):
        self._file = GgufFile(path)
        self.paths = [self._file.path]
        self.structure, self.aliases = NO_STRUCTURE, {}
        described = {k: v for k, v in self._file.metadata.items() if isinstance(v, (str, bool, int, float))}
        self.metadata = {"gguf": json.dumps(described)}
        self.leaves = [self._leaf(name) for name in self._file]
        status = os.stat(path)
        self.identity = [[self._file.path.name, status.st_size, status.st_mtime_ns, status.st_ino]]

    def _leaf(self, name: str) -> SourceLeaf:
        tensor = self._file.tensors[name]
        dtype = np.dtype(np.float32) if tensor.type.dtype is None else named_dtype(tensor.type.dtype)
        leaf = Leaf(name, name, {name: jax.ShapeDtypeStruct(tensor.shape, dtype)})
        if tensor.type.dtype is not None:
            view = functools.partial(self._file.plain_view, name)
            return SourceLeaf(leaf, {name: lambda: [view()]}, lambda _: view())
        decoded = functools.partial(self._file.decoded_chunks, name)
        return SourceLeaf(
            leaf,
            {name: lambda: (values for _, values in decoded())},
            lambda buffer: self._file.decode_into(buffer, name),
        )


def open_source(path: str | os.PathLike[str]) -> Source:
    """A source of whichever kind the file is."""
    if Path(path).is_file():
        descriptor = open_regular(path)
        try:
            is_gguf = os.pread(descriptor, len(MAGIC), 0) == MAGIC
        finally:
            os.close(descriptor)
        if is_gguf:
            return GgufSource(path)
    return SafetensorsSource(path)


def file_identity(path: Path, descriptor: int) -> list[Any]:
    """What changes when a file is replaced or written to."""
    status = os.fstat(descriptor)
    return [path.name, status.st_size, status.st_mtime_ns, status.st_ino]


def _leaf(name: str, tensors: Sequence[str], files: FileSet) -> SourceLeaf:
    owner = {tensor: files.owners[tensor] for tensor in tensors}
    shapes = {tensor: _shape(owner[tensor].entry(tensor)) for tensor in tensors}
    copy = {tensor: lambda tensor=tensor: owner[tensor].chunks(tensor) for tensor in tensors}
    leaf = Leaf(name, files.leaves.get(name, name), shapes)
    if not (leaf.is_plain or _is_numpy(leaf)):
        return SourceLeaf(leaf, copy)
    (tensor,) = tensors
    file = owner[tensor]
    return SourceLeaf(leaf, copy, lambda buffer: file.read_into(buffer, tensor), lambda: file.announce(tensor))


def _is_numpy(leaf: Leaf) -> bool:
    """A NumPy array that is stored as it is."""
    described = leaf.description
    if not isinstance(described, dict) or described.get("type") != "numpy" or described.get("scalar"):
        return False
    (array,) = leaf.tensors.values()
    return described.get("dtype") == array.dtype.name


def _shape(entry: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(entry.shape, entry.dtype)
