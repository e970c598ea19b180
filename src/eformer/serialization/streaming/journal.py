"""The memory of a long run: which leaves are safely on disk, so that a killed run continues where it stopped.

An append-only file beside the output. Its first line says which run it belongs to, each further line how many leaves
are done; a line that was cut short is ignored. The file is locked while a run uses it.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

from eformer.errors import CheckpointError

from ..safetensors.writing import open_own


class Journal:
    """The journal of one output; `done` is how many leaves an earlier run of the same kind finished."""

    def __init__(self, target: Path, run: str):
        self.path = target.with_name(f".{target.name}.journal")
        self._descriptor = self._locked(target)
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

    def remove(self) -> None:
        """The run is complete."""
        self.path.unlink()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
