"""Safetensors files that are written: complete, or not there. A temporary file beside the target, fsync, a rename."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from eformer.errors import CheckpointError

from .header import ALIGNMENT, CODES, MAX_HEADER, Entry


def write_file(
    path: Path, tensors: Sequence[Tensor], metadata: Mapping[str, str], values: Callable[[str], np.ndarray]
) -> None:
    """Write a file; `values(name)` gives the array of each tensor when its turn has come."""
    entries = arrange(tensors)
    with atomic_file(path) as file:
        file.write(build_header(entries, metadata))
        for entry in entries:
            file.write(raw_bytes(values(entry.name)))


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write that takes its name when the block ends, and vanishes if it ends with an exception.

    A process that is killed leaves at most a hidden `.NAME.XXXXXXXX.part` behind.
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    # Not tempfile: its files are readable by their owner alone, this one obeys the umask.
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, found: Mapping[str, Any]) -> None:
    """An object as a file of JSON."""
    with atomic_file(path) as file:
        file.write((json.dumps(found, indent=2) + "\n").encode())


def open_own(path: Path, flags: int) -> int:
    """The descriptor of a hidden file of this library, created if need be. Links are not followed.

    Its name is known beforehand, so there may be a link to another file under it.
    """
    try:
        return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as err:
        if not path.is_symlink():
            raise
        raise CheckpointError("is a symbolic link, and would be written to.", file=path, fix="Remove it.") from err


def sync_folder(folder: Path) -> None:
    """Make renames in a folder outlive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def raw_bytes(array: np.ndarray) -> memoryview:
    """The bytes of an array in order, without a copy if it is contiguous. (bfloat16 has no buffer of its own.)"""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor to be written: what the header says of it."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def arrange(tensors: Sequence[Tensor]) -> list[Entry]:
    """Give every tensor its place: first those that keep the next one aligned, then by the size of their elements."""
    order = sorted(tensors, key=lambda t: (t.nbytes % ALIGNMENT != 0, -t.dtype.itemsize if t.nbytes % ALIGNMENT else 0))
    entries, start = [], 0
    for tensor in order:
        entries.append(Entry(tensor.name, tensor.dtype, tensor.shape, start, start + tensor.nbytes))
        start += tensor.nbytes
    return entries


def build_header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """Length and JSON, padded so that the data begins at a multiple of 64 bytes."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for entry in entries:
        offsets = [entry.start, entry.stop]
        table[entry.name] = {"dtype": CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise CheckpointError(
            f"the header would take {len(text):,} bytes; readers allow {MAX_HEADER:,}.",
            fix="Save in several files with max_shard_size=.",
        )
    return len(text).to_bytes(8, "little") + text
