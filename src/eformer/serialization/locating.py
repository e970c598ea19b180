"""Errors that say where: the file and the tensor are added on the way out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from eformer.errors import CheckpointError


@contextlib.contextmanager
def about(file: Any, tensor: str | None = None) -> Iterator[None]:
    """Adds the file and the tensor to errors that do not know them."""
    try:
        yield
    except CheckpointError as err:
        if err.file is not None and (err.tensor is not None or tensor is None):
            raise
        located = CheckpointError(err.what, file=err.file or file, tensor=err.tensor or tensor, fix=err.fix)
        raise located from err.__cause__
