"""What goes into a checkpoint: the leaves of a tree with their tensors, and the metadata that describes them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from eformer._core import ImplicitArray
from eformer.errors import CheckpointError

from ._dtypes import as_stored, stored_layout
from ._header import Tensor, parse_json
from ._leaves import describe
from ._structure import describe_structure, named_leaves, unused

VERSION = 1
KEY = "eformer"  # of the metadata
NO_STRUCTURE: Any = object()  # of a file somebody else wrote: its leaves are one dict


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


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf to be saved: its description and, for each of its tensors, the array to take the values from."""

    name: str
    description: Any
    tensors: Mapping[str, Any]

    @property
    def is_plain(self) -> bool:
        """Does a tensor of the leaf's own name say it all?"""
        return self.description == self.name

    def layout(self) -> list[Tensor]:
        """The tensors as a header lists them."""
        return [_layout(name, array) for name, array in self.tensors.items()]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.layout())


@dataclasses.dataclass(frozen=True)
class Contents:
    """A tree ready to be written. Leaves that are one object are saved once; `aliases` are their other names."""

    leaves: Sequence[Leaf]
    structure: Any
    aliases: Mapping[str, str]


def contents_of(tree: Any) -> Contents:
    """Describe a tree; no array is copied yet."""
    named, _ = named_leaves(tree)
    taken = {name for name, _ in named}
    leaves, aliases, first = [], {}, {}
    for name, value in named:
        shareable = isinstance(value, (jax.Array, np.ndarray, ImplicitArray))
        if shareable and id(value) in first:
            aliases[name] = first[id(value)]
            continue
        if shareable:
            first[id(value)] = name
        leaves.append(described_leaf(name, value, taken))
    names = [aliases.get(name, name) for name, _ in named]
    return Contents(leaves, describe_structure(tree, names), aliases)


def described_leaf(name: str, value: Any, taken: set[str]) -> Leaf:
    """A leaf and its tensors, whose names are those of the leaf, or begin with it; `taken` holds the names in use."""
    tensors: dict[str, Any] = {}

    def emit(tensor: str, array: Any) -> str:
        unique = name if tensor == name else unused(tensor, taken)
        tensors[unique] = array
        return unique

    with about(None, name):
        leaf = Leaf(name, describe(value, name, emit), tensors)
        leaf.layout()  # refuses dtypes that have no place in a file
    return leaf


def _layout(name: str, array: Any) -> Tensor:
    shape, dtype = stored_layout(tuple(array.shape), np.dtype(array.dtype))
    return Tensor(name, dtype, shape)


def host(array: Any, name: str) -> np.ndarray:
    """The values in the memory of the host, as they are stored."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        raise CheckpointError(
            "is spread over several processes, and this one does not see all of it.",
            tensor=name,
            fix="Gather it first (jax.experimental.multihost_utils.process_allgather), or save with Orbax.",
        )
    return as_stored(np.asarray(array))


# -- metadata ----------------------------------------------------------------------------------------------------------


def leaves_metadata(leaves: Sequence[Leaf]) -> dict[str, Any]:
    """The part of the metadata that goes with the tensors of these leaves."""
    return {"version": VERSION, "leaves": {leaf.name: leaf.description for leaf in leaves if not leaf.is_plain}}


def tree_metadata(contents: Contents) -> dict[str, Any]:
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
            raise CheckpointError(f"has {key} in its metadata that are no mapping.", file=file)
    if not all(isinstance(name, str) for name in found.get("aliases", {}).values()):
        raise CheckpointError("has aliases that are no names.", file=file)
    return found
