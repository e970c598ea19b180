"""A safetensors file: tensors as views of a memory map, whose pages are fetched when they are read, or in chunks."""

from __future__ import annotations

import contextlib
import functools
import gc
import mmap
import os
import stat
import time
import weakref
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np

from eformer.errors import CheckpointError

from .header import ALIGNMENT, TRUNCATED, Entry, read_exactly, read_header

_CHUNK = 1 << 23
_PATIENCE = 0.1  # seconds to wait for JAX to let go of memory


def open_regular(path: str | os.PathLike[str]) -> int:
    """The descriptor of an ordinary file. A pipe or a device would block or never end."""
    # Not blocking, so that opening a pipe returns and can be refused.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError("is not an ordinary file.", file=path)
    return descriptor


class MappedFile:
    """One open file. Arrays given out are read-only views that keep the map alive.

    The map shows the file that was opened even if another one takes its place later; a file that is *shortened*
    under it cannot be survived by any process (SIGBUS), so replace files by renaming, as everything here does.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.descriptor = open_regular(path)
        weakref.finalize(self, os.close, self.descriptor)
        self.header = read_header(self.descriptor, self.path)

    @functools.cached_property
    def _map(self) -> mmap.mmap:
        made = mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ)
        if len(made) < self.header.data_start + max((e.stop for e in self.header.entries.values()), default=0):
            raise CheckpointError("was shortened after it had been opened.", file=self.path, fix=TRUNCATED)
        # No read-ahead here: `view` announces whole tensors itself.
        made.madvise(mmap.MADV_RANDOM)
        return made

    def entry(self, name: str) -> Entry:
        try:
            return self.header.entries[name]
        except KeyError as err:
            fix = "If an index says it is, index and files are of different checkpoints; fetch all of them again."
            raise CheckpointError("is not in the file.", file=self.path, tensor=name, fix=fix) from err

    def view(self, name: str) -> np.ndarray:
        """The tensor as a read-only view; the kernel starts fetching all of it."""
        entry = self.entry(name)
        if entry.nbytes:
            offset = self.header.data_start + entry.start
            first = offset - offset % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, first, offset + entry.nbytes - first)
        return _truth(self._bytes(entry))

    def read(self, name: str, index: Any = ...) -> np.ndarray:
        """A copy of part of the tensor: only the pages `index` touches are fetched."""
        return np.array(_truth(self._bytes(self.entry(name))[index]))

    def _bytes(self, entry: Entry) -> np.ndarray:
        if not entry.nbytes:
            return np.empty(entry.shape, entry.dtype)
        flat = np.frombuffer(self._map, np.uint8, entry.nbytes, self.header.data_start + entry.start)
        return flat.view(entry.dtype).reshape(entry.shape)

    # -- without the map, for streaming --------------------------------------------------------------------------------

    def read_into(self, buffer: np.ndarray, name: str) -> np.ndarray:
        """The tensor in memory of the caller: bytes, at least as many as it has."""
        entry = self.entry(name)
        flat = buffer[: entry.nbytes]
        self._fill(flat, entry, 0)
        return flat.view(entry.dtype).reshape(entry.shape)

    def read_piece(self, name: str, piece: int, count: int) -> np.ndarray:
        """One of `count` equal pieces of the first axis, in memory of its own."""
        entry = self.entry(name)
        flat = aligned_empty(entry.nbytes // count)
        self._fill(flat, entry, piece * flat.size)
        return flat.view(entry.dtype).reshape([size // count for size in entry.shape[:1]] + [*entry.shape[1:]])

    def chunks(self, name: str) -> Iterator[np.ndarray]:
        """The bytes of a tensor, a few megabytes at a time; each chunk is overwritten by the next."""
        entry = self.entry(name)
        buffer = aligned_empty(min(entry.nbytes, _CHUNK))
        for start in range(0, entry.nbytes, _CHUNK):
            piece = buffer[: min(_CHUNK, entry.nbytes - start)]
            self._fill(piece, entry, start)
            yield piece

    def announce(self, name: str) -> None:
        """Let the kernel fetch a tensor that will be read soon."""
        entry = self.entry(name)
        with contextlib.suppress(AttributeError):  # not on every system
            os.posix_fadvise(
                self.descriptor, self.header.data_start + entry.start, entry.nbytes, os.POSIX_FADV_WILLNEED
            )

    def _fill(self, target: np.ndarray, entry: Entry, start: int) -> None:
        offset = self.header.data_start + entry.start + start
        for first in range(0, target.size, _CHUNK):
            part = target[first : first + _CHUNK]
            read_exactly(self.descriptor, part.data, offset + first, self.path, entry.name)


def aligned_empty(nbytes: int) -> np.ndarray:
    """Memory that JAX on the CPU can use without copying it."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    first = -raw.ctypes.data % ALIGNMENT
    return raw[first : first + nbytes]


def let_go(arrays: MutableMapping[str, np.ndarray]) -> None:
    """Empty a dict of arrays that JAX has computed with, and wait until their memory is free.

    JAX drops what it was given in another thread, a moment after the result is ready, and Python frees that when its
    garbage is collected: whoever reads on at once would hold two weights.
    """
    held = [weakref.ref(array if array.base is None else array.base) for array in arrays.values()]
    arrays.clear()
    end = time.monotonic() + _PATIENCE
    gc.collect(0)
    while any(ref() is not None for ref in held) and time.monotonic() < end:
        time.sleep(1e-4)
        gc.collect(0)


def owned(array: np.ndarray) -> np.ndarray:
    """A copy in such memory."""
    copy = aligned_empty(array.nbytes).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _truth(array: np.ndarray) -> np.ndarray:
    """Bytes other than 0 and 1 are not booleans; what NumPy and JAX do with them is undefined."""
    return array.view(np.uint8) != 0 if array.dtype == np.bool_ else array
