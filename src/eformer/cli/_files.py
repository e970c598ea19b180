"""Checkpoints as the commands see them: one interface to safetensors files, sets of them, and GGUF files."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eformer.serialization import GgufFile, LazyCheckpoint, open_gguf, open_lazy

from ._fail import Failure

_MAGIC = b"GGUF"


@dataclasses.dataclass(frozen=True)
class Tensor:
    """What a file says of one leaf. `format` is "dense", one of ours, or a block type of GGUF."""

    path: str
    format: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


def is_gguf(path: Path) -> bool:
    """Does the file begin as GGUF files do?"""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def open_checkpoint(path: Path) -> LazyCheckpoint | GgufFile:
    """Whatever kind of checkpoint this is; its leaves are not read."""
    if not path.exists() and not path.with_name(path.name + ".index.json").exists():
        raise Failure(f"{path} does not exist.")
    return open_gguf(path) if is_gguf(path) else open_lazy(path)


def tensors(opened: LazyCheckpoint | GgufFile) -> list[Tensor]:
    """Everything in a checkpoint, in its order."""
    if isinstance(opened, GgufFile):
        return [_gguf_tensor(opened, name) for name in opened]
    return [_lazy_tensor(opened, name) for name in opened]


def _gguf_tensor(opened: GgufFile, name: str) -> Tensor:
    found = opened.tensors[name]
    dtype = str(found.type.dtype or "float32")
    return Tensor(name, "dense" if found.type.dtype else found.type.name, tuple(found.shape), dtype, found.nbytes)


def _lazy_tensor(opened: LazyCheckpoint, name: str) -> Tensor:
    info = opened.info(name)
    return Tensor(name, info.format, info.shape, str(info.dtype or "-"), info.nbytes)


def metadata(opened: LazyCheckpoint | GgufFile) -> dict[str, Any]:
    """The notes of a file, long lists counted instead of shown."""
    return {key: _short(value) for key, value in opened.metadata.items()}


def _short(value: Any) -> Any:
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return value if len(value) <= 200 else f"{value[:200]}... ({len(value):,} characters)"
    return f"{len(value):,} values" if hasattr(value, "__len__") else str(value)


class Leaves(Mapping[str, Any]):
    """The leaves of a checkpoint by name, each read when it is asked for."""

    def __init__(self, opened: LazyCheckpoint | GgufFile):
        self._opened = opened

    def __getitem__(self, name: str) -> Any:
        return self._opened[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._opened)

    def __len__(self) -> int:
        return len(self._opened)


def size_of(path: Path) -> int:
    """Bytes of a file, or of all the files an index names."""
    if path.suffix == ".json":
        names = set(json.loads(path.read_text())["weight_map"].values())
        return sum(os.path.getsize(path.parent / name) for name in names)
    return os.path.getsize(path)
