"""Checkpoints as the commands see them: one interface to safetensors files, sets of them, and GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eformer.serialization import GgufFile, LazyCheckpoint
from eformer.serialization.inspection import open_checkpoint as open_any

from ._fail import Failure


def check_exists(path: Path) -> None:
    """A file, a folder, or the name that an index of several files would have."""
    if not path.exists() and not path.with_name(path.name + ".index.json").exists():
        raise Failure(f"{path} does not exist.")


def open_checkpoint(path: Path) -> LazyCheckpoint | GgufFile:
    """A checkpoint of any kind; its leaves are not read."""
    check_exists(path)
    return open_any(path)


def shortened(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata with long strings cut and long lists counted."""
    return {key: _short(value) for key, value in metadata.items()}


def _short(value: Any) -> Any:
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return value if len(value) <= 200 else f"{value[:200]}... ({len(value):,} characters)"
    return f"{len(value):,} values" if hasattr(value, "__len__") else str(value)
