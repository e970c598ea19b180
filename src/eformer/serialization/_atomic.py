"""Writing files that are complete or not there: a temporary file in the same folder, fsync, then a rename."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np


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
