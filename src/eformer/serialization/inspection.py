"""`inspect`: what is in a checkpoint, without reading its tensors."""

from __future__ import annotations

import collections
import dataclasses
import os
from typing import Any

from eformer import _table

from .checkpoint.load import LazyCheckpoint
from .foreign.gguf import GgufFile
from .foreign.packed import PackedCheckpoint, open_checkpoint


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """What a file says of one leaf. `format` is "dense", one of ours, or a block type of GGUF."""

    path: str
    format: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclasses.dataclass(frozen=True)
class FileReport:
    """The tensors of a checkpoint and its metadata. Prints as a table."""

    file: str
    kind: str
    tensors: tuple[StoredTensor, ...]
    metadata: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def formats(self) -> dict[str, int]:
        """Bytes per format."""
        sums: collections.Counter[str] = collections.Counter()
        for tensor in self.tensors:
            sums[tensor.format] += tensor.nbytes
        return dict(sums)

    def rows(self) -> list[list[str]]:
        """The cells of the table: path, format, shape, dtype, bytes."""
        return [[t.path, t.format, _table.shape_text(t.shape), t.dtype, f"{t.nbytes:,}"] for t in self.tensors]

    def __str__(self) -> str:
        total = f"{self.file} ({self.kind}): {len(self.tensors)} tensors, {self.nbytes:,} bytes"
        return "\n".join([total, *_table.lines(COLUMNS, self.rows())])

    __repr__ = __str__


COLUMNS = ("path", "format", "shape", "dtype", "bytes")


def inspect(file: str | os.PathLike[str]) -> FileReport:
    """What is in a checkpoint: paths, formats, shapes, bytes. Reads headers only.

    Args:
        file: a safetensors file, an index of several, the folder of either, or a GGUF file.

    >>> import tempfile, jax.numpy as jnp, eformer as ef
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = ef.save(f"{folder}/m.safetensors", {"w": ef.quantize(jnp.ones((64, 32)), dtype="nf4")})
    ...     found = ef.inspect(f"{folder}/m.safetensors")
    >>> found.formats, found.tensors[0].shape
    ({'nf4': 1152}, (64, 32))
    """
    opened = open_checkpoint(file)
    kind = "gguf" if isinstance(opened, GgufFile) else "safetensors"
    if isinstance(opened, PackedCheckpoint):
        kind = f"{kind}, {', '.join(opened.schemes)}"
    return FileReport(str(file), kind, tuple(_tensor(opened, name) for name in opened), dict(opened.metadata))


def _tensor(opened: LazyCheckpoint | GgufFile, name: str) -> StoredTensor:
    if isinstance(opened, GgufFile):
        found = opened.tensors[name]
        dtype = str(found.type.dtype or "float32")
        kind = "dense" if found.type.dtype else found.type.name
        return StoredTensor(name, kind, tuple(found.shape), dtype, found.nbytes)
    info = opened.info(name)
    return StoredTensor(name, info.format, info.shape, str(info.dtype or "-"), info.nbytes)
