"""Output of streaming: files whose headers are known before their tensors, and which take their names when complete.

A journal remembers which leaves are safely on disk, so that a killed run continues where it stopped.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eformer.errors import CheckpointError

from ..checkpoint.save import FilePlan, commit, plan_files, shard_pattern
from ..safetensors.writing import arrange, build_header, open_own, raw_bytes, sync_folder
from ..tree.describe import DescribedTree, Leaf

_SYNC_SECONDS = 2.0  # work that may be lost when the machine stops


class Journal:
    """The journal of one output; `done` is how many leaves an earlier run of the same kind finished.

    An append-only file beside the output. Its first line says which run it belongs to, each further line how many
    leaves are done; a line that was cut short is ignored. The file is locked while a run uses it.
    """

    def __init__(self, target: Path, run: str):
        self.path = target.with_name(f".{target.name}.journal")
        self._descriptor = self._locked(target)
        try:
            self._begin(run)
        except BaseException:
            self.close()  # nobody else can, and the lock would be held as long as the process lives
            raise

    def _begin(self, run: str) -> None:
        """Read what an earlier run wrote, or start anew."""
        found = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0).split(b"\n")
        self.continues = found[0] == run.encode() and len(found) > 1
        counts = [int(line) for line in found[1:-1] if line.isdigit() and len(line) < 16] if self.continues else []
        self.done = counts[-1] if counts else 0
        if not self.continues:
            os.ftruncate(self._descriptor, 0)
            self._append(run)

    def record(self, done: int) -> None:
        """Remember that so many leaves are done. Their data must have been synced to disk before."""
        self.done = done
        self._append(str(done))

    def _append(self, line: str) -> None:
        os.pwrite(self._descriptor, f"{line}\n".encode(), os.fstat(self._descriptor).st_size)
        os.fsync(self._descriptor)

    def _locked(self, target: Path) -> int:
        while True:
            descriptor = open_own(self.path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as err:
                os.close(descriptor)
                raise CheckpointError("is being written by another process.", file=target, fix="Wait for it.") from err
            if self._is_current(descriptor):
                return descriptor
            os.close(descriptor)  # the run before finished and removed it between our two calls

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.lstat(self.path), os.fstat(descriptor))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Let go of the journal but keep it, for another run to continue."""
        os.close(self._descriptor)


class Output:
    """One file, or several with an index, in the making. `done` counts the leaves that are written, in order.

    Files are hidden `.NAME.part` until all are complete. If a run ends early they stay, for the next to continue.
    """

    def __init__(
        self,
        target: Path,
        contents: DescribedTree,
        shards: Sequence[Sequence[Leaf]],
        extra: Mapping[str, str],
        run: str,
    ):
        self._target, self._contents, self._extra = target, contents, extra
        self._files = plan_files(target, contents, shards, extra, run[:8])
        self._parts: list[_Part] = []
        for file in self._files:
            self._parts.append(_Part(file, self._parts[-1].end if self._parts else 0))
        self._owners = {tensor: part for part in self._parts for tensor in part.entries}
        self._journal = Journal(target, run)
        try:
            if not self._journal.continues:
                _discard_parts(target)
            self.done = self._usable(min(self._journal.done, len(contents.leaves)))
        except BaseException:
            self._journal.close()
            raise
        self._synced = time.monotonic()

    def _usable(self, done: int) -> int:
        """How many leaves of an earlier run are still there."""
        for part in self._parts:
            if part.begin >= done:
                break
            published = len(self._parts) > 1 and part.path.exists()  # the name is that of this very run
            if not part.is_begun and not published:
                return part.begin
        return done

    def begin(self) -> None:
        """The next leaf is about to be written."""
        part = next(part for part in self._parts if part.begin <= self.done < part.end)
        part.open(fresh=self.done == part.begin)

    def write(self, name: str, pieces: Iterable[np.ndarray]) -> None:
        """Write a tensor of it, whole or in pieces."""
        self._owners[name].write(name, pieces)

    def finish(self) -> None:
        """The leaf has been written."""
        self.done += 1
        full = [part for part in self._parts if part.end == self.done]
        if full or time.monotonic() - self._synced > _SYNC_SECONDS:
            self._sync()
            for part in full:
                part.close()

    def _sync(self) -> None:
        for part in self._parts:
            part.sync()
        self._journal.record(self.done)
        self._synced = time.monotonic()

    def commit(self) -> Path:
        """Everything is written: give the files their names. Returns the one to load."""
        for part in self._parts:
            part.publish()
        sync_folder(self._target.parent)
        path = commit(self._target, self._contents, self._files, self._extra)
        self._journal.path.unlink()
        return path

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        if kind is not None:
            with contextlib.suppress(OSError):  # a full disk is reported by what failed first
                self._sync()
        for part in self._parts:
            part.close()
        self._journal.close()


class _Part:
    """One file in the making, for the leaves `begin` to `end` of all."""

    def __init__(self, file: FilePlan, begin: int):
        entries = arrange([tensor for leaf in file.leaves for tensor in leaf.layout()])
        self.path, self.begin, self.end = file.path, begin, begin + len(file.leaves)
        self.entries = {entry.name: entry for entry in entries}
        self._header = build_header(entries, file.metadata)
        self._size = len(self._header) + sum(entry.nbytes for entry in entries)
        self._hidden = file.path.with_name(f".{file.path.name}.part")
        self._descriptor: int | None = None

    @property
    def is_begun(self) -> bool:
        """Is there a file of an earlier run to continue?"""
        is_ours = self._hidden.is_file() and not self._hidden.is_symlink()
        return is_ours and self._hidden.stat().st_size == self._size

    def open(self, *, fresh: bool) -> None:
        """Begin the file, or continue it; it has its full size from the start."""
        if self._descriptor is not None:
            return
        self._descriptor = open_own(self._hidden, os.O_WRONLY | (os.O_TRUNC if fresh else 0))
        if fresh:
            _write_at(self._descriptor, memoryview(self._header), 0)
            os.ftruncate(self._descriptor, self._size)

    def write(self, name: str, pieces: Iterable[np.ndarray]) -> None:
        descriptor: Any = self._descriptor
        position = len(self._header) + self.entries[name].start
        for piece in pieces:
            position = _write_at(descriptor, raw_bytes(piece), position)

    def sync(self) -> None:
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def publish(self) -> None:
        """Give the file its name."""
        if self.begin == self.end:  # no leaves at all, so it was never begun
            self.open(fresh=True)
        self.sync()
        self.close()
        if self._hidden.exists():  # else an earlier run came as far as this
            os.replace(self._hidden, self.path)


def _write_at(descriptor: int, data: memoryview, position: int) -> int:
    """Write all of `data`; the position behind it."""
    while data:
        count = os.pwrite(descriptor, data, position)
        data, position = data[count:], position + count
    return position


def _discard_parts(target: Path) -> None:
    """Remove what runs with other arguments left behind."""
    ours = re.compile(rf"\.({re.escape(target.name)}|{shard_pattern(target)})\.part")
    for name in os.listdir(target.parent):
        if ours.fullmatch(name):
            target.with_name(name).unlink(missing_ok=True)
