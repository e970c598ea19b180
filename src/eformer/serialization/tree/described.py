"""What goes into a checkpoint: the leaves of a tree with their tensors, and the metadata that describes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from eformer._core import ImplicitArray
from eformer.errors import CheckpointError

from ..locating import about
from ..safetensors.dtypes import as_stored, stored_layout
from ..safetensors.writing import Tensor
from .describe import describe
from .structure import describe_structure, named_leaves, unused


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf to be saved: its description and, for each of its tensors, the array to take the values from."""

    name: str
    description: Any
    tensors: Mapping[str, Any]

    @property
    def is_plain(self) -> bool:
        """Is the leaf one plain tensor of its own name?"""
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
