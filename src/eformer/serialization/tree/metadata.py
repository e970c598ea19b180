"""The metadata that describes the leaves and the structure of a tree, as the string that a file keeps under one key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from eformer.errors import CheckpointError

from ..safetensors.header import parse_json
from .describe import DescribedTree, Leaf

VERSION = 1
KEY = "eformer"  # of the metadata
NO_STRUCTURE: Any = object()  # of a file from another program: its leaves are one dict


def leaves_metadata(leaves: Sequence[Leaf]) -> dict[str, Any]:
    """The part of the metadata that goes with the tensors of these leaves."""
    return {"version": VERSION, "leaves": {leaf.name: leaf.description for leaf in leaves if not leaf.is_plain}}


def tree_metadata(contents: DescribedTree) -> dict[str, Any]:
    """The part of the metadata that there is once in a checkpoint."""
    structure = {} if contents.structure is NO_STRUCTURE else {"structure": contents.structure}
    return {"version": VERSION, **structure, "aliases": dict(contents.aliases)}


def dumped(metadata: Mapping[str, Any]) -> str:
    return json.dumps(metadata, separators=(",", ":"), allow_nan=False)


def loaded(text: str | None, file: Any) -> dict[str, Any]:
    """Metadata of this library in a file, checked for its outer shape; empty if there is none."""
    if text is None:
        return {}
    found = parse_json(text.encode("utf-8", "surrogatepass"), file)
    if not isinstance(found, dict) or type(found.get("version")) is not int:
        raise CheckpointError(f"has metadata under {KEY!r} that it should not: {text[:100]!r}.", file=file)
    if found["version"] > VERSION:
        raise CheckpointError(
            f"was written in version {found['version']} of the format; this library reads up to {VERSION}.",
            file=file,
            fix="Install a newer eformer.",
        )
    for key in ("leaves", "aliases"):
        if not isinstance(found.get(key, {}), dict):
            raise CheckpointError(f"has {key} in its metadata that are not a mapping.", file=file)
    if not all(isinstance(name, str) for name in found.get("aliases", {}).values()):
        raise CheckpointError("has aliases that are not names.", file=file)
    return found
