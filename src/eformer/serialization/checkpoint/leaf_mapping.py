"""Leaves by name, wherever their tensors come from: what a file and a state dict have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from eformer.errors import CheckpointError

from ..locating import about
from ..tree.metadata import NO_STRUCTURE
from ..tree.restore import tensors_of
from ..tree.structure import build


class NamedLeaves(Mapping[str, Any]):
    """A mapping from names to leaves, made from descriptions and the names of the tensors there are.

    A tensor that no description mentions is a leaf of its own name.
    """

    def __init__(
        self,
        path: Any,
        descriptions: Mapping[str, Any],
        tensors: Iterable[str],
        structure: Any,
        aliases: Mapping[str, str],
    ):
        self.path, self.structure, self.aliases = path, structure, aliases
        self._descriptions = descriptions
        self.tensors: dict[str, list[str]] = {}
        there = dict.fromkeys(tensors)
        used: set[str] = set()
        for name, description in descriptions.items():
            with about(path, name):
                self.tensors[name] = tensors_of(description)
            missing = [tensor for tensor in self.tensors[name] if tensor not in there]
            if missing:
                raise CheckpointError(f"needs {missing[0]!r:.100}, which is not there.", file=path, tensor=name)
            used.update(self.tensors[name])
        for tensor in there:
            if tensor not in used and tensor not in self.tensors:
                self.tensors[tensor] = [tensor]
        self.tensors = dict(sorted(self.tensors.items(), key=self._order()))

    def _order(self) -> Callable[[tuple[str, Any]], int]:
        """Leaves come in the order of the tree; those it does not mention come last."""
        mentioned: dict[str, int] = {}
        if self.structure is not NO_STRUCTURE:
            with about(self.path):
                build(self.structure, lambda name: mentioned.setdefault(name, len(mentioned)))
        return lambda item: mentioned.get(item[0], len(mentioned))

    def read(self, name: str, sharding: Any = None) -> Any:
        """The leaf of that name, placed as `sharding` says."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __contains__(self, name: object) -> bool:
        return self.aliases.get(name, name) in self.tensors if isinstance(name, str) else False

    def __getitem__(self, name: str) -> Any:
        return self.read(name)

    def known(self, name: str) -> str:
        """The name under which a leaf is stored, given that or an alias."""
        name = self.aliases.get(name, name)
        if name not in self.tensors:
            near = [other for other in self.tensors if name.rsplit(".", 1)[-1] in other][:5]
            hint = f"; similar are {near}" if near else ""
            raise KeyError(f"{name!r} is not in {self.path}, which holds {len(self)} leaves{hint}.")
        return name

    def description(self, name: str) -> Any:
        return self._descriptions.get(name, name)
