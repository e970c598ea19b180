"""Input of streaming: leaves that are read one at a time, or copied in chunks, without a map of the whole file."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..checkpoint.load import LazyCheckpoint
from ..foreign.gguf import GgufFile
from ..inspection import open_checkpoint
from ..safetensors.header import named_dtype
from ..tree.describe import NO_STRUCTURE, Leaf


@dataclasses.dataclass(frozen=True)
class SourceLeaf:
    """A leaf of the input.

    `value` is the leaf with shapes in place of arrays. `copy` gives each of its tensors in chunks, `read` a dense leaf
    in a buffer of bytes.
    """

    leaf: Leaf
    value: Any
    copy: Mapping[str, Callable[[], Iterable[np.ndarray]]]
    read: Callable[[np.ndarray], np.ndarray] | None = None
    announce: Callable[[], None] = lambda: None


@dataclasses.dataclass(frozen=True)
class Source:
    """An input: its leaves in order, what else its checkpoint says, and what tells it from any other."""

    opened: LazyCheckpoint | GgufFile
    paths: Sequence[Path]
    leaves: Sequence[SourceLeaf]
    structure: Any
    aliases: Mapping[str, str]
    metadata: Mapping[str, str]
    identity: Any


def open_source(path: str | os.PathLike[str]) -> Source:
    """A checkpoint of safetensors, in one file or more, or a GGUF file; tensors are not read."""
    opened = open_checkpoint(path)
    return _gguf_source(opened) if isinstance(opened, GgufFile) else _safetensors_source(opened)


def _safetensors_source(checkpoint: LazyCheckpoint) -> Source:
    files = checkpoint.files
    opened = sorted({(file.path, file.descriptor) for file in files.owners.values()})
    leaves = [_safetensors_leaf(checkpoint, name, files.owners) for name in checkpoint]
    paths = [files.path, *(path for path, _ in opened)]
    identity = [_identity(path, os.fstat(descriptor)) for path, descriptor in opened]
    return Source(checkpoint, paths, leaves, files.structure, files.aliases, files.metadata, identity)


def _safetensors_leaf(checkpoint: LazyCheckpoint, name: str, owners: Mapping[str, Any]) -> SourceLeaf:
    value, tensors = checkpoint.abstract(name)[0], checkpoint.tensors[name]
    shapes = {t: jax.ShapeDtypeStruct(checkpoint.entry(t).shape, checkpoint.entry(t).dtype) for t in tensors}
    copy = {tensor: functools.partial(owners[tensor].chunks, tensor) for tensor in tensors}
    leaf = Leaf(name, checkpoint.description(name), shapes)
    if not isinstance(value, jax.ShapeDtypeStruct) or value not in shapes.values():
        return SourceLeaf(leaf, value, copy)  # of several tensors, or stored as bytes
    (tensor,) = tensors
    file = owners[tensor]
    return SourceLeaf(leaf, value, copy, lambda buffer: file.read_into(buffer, tensor), lambda: file.announce(tensor))


def _gguf_source(file: GgufFile) -> Source:
    """Block types are decoded to f32."""
    described = {k: v for k, v in file.metadata.items() if isinstance(v, (str, bool, int, float))}
    leaves = [_gguf_leaf(file, name) for name in file]
    identity = [_identity(file.path, os.stat(file.path))]
    return Source(file, [file.path], leaves, NO_STRUCTURE, {}, {"gguf": json.dumps(described)}, identity)


def _gguf_leaf(file: GgufFile, name: str) -> SourceLeaf:
    tensor = file.tensors[name]
    value = jax.ShapeDtypeStruct(tensor.shape, named_dtype(tensor.type.dtype or "float32"))
    leaf = Leaf(name, name, {name: value})
    if tensor.type.dtype is not None:
        return SourceLeaf(leaf, value, {name: lambda: [file.plain_view(name)]}, lambda _: file.plain_view(name))
    return SourceLeaf(
        leaf,
        value,
        {name: lambda: (values for _, values in file.decoded_chunks(name))},
        lambda buffer: file.decode_into(buffer, name),
    )


def _identity(path: Path, status: os.stat_result) -> list[Any]:
    """What changes when a file is replaced or written to."""
    return [path.name, status.st_size, status.st_mtime_ns, status.st_ino]
