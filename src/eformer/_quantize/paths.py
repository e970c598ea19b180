"""The leaves of any model, with their paths: dicts, Flax Linen and NNX, Equinox, Haiku.

Implicit arrays are leaves. NNX modules are opened with `nnx.split`, which sees a shared variable once.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.tree_util as jtu

from eformer._core import tree_flatten_with_path_with_implicit


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf, the names on its path, and the object that holds it (None when that cannot be found)."""

    names: tuple[str, ...]
    value: Any
    parent: Any = None

    @property
    def path(self) -> str:
        return "/".join(self.names)


def named_leaf(name: str, value: Any) -> Leaf:
    """A leaf of a file, whose names are joined by dots or slashes."""
    return Leaf(tuple(re.split(r"[./]", name)), value)


@dataclasses.dataclass(frozen=True)
class Tree:
    """A model taken apart: its leaves, and how to put others in their place."""

    leaves: tuple[Leaf, ...]
    rebuild: Callable[[Iterable[Any]], Any]


def open_tree(params: Any) -> Tree:
    """Take a model apart.

    >>> tree = open_tree({"dense": {"kernel": 1.0, "bias": 2.0}})
    >>> [leaf.path for leaf in tree.leaves]
    ['dense/bias', 'dense/kernel']
    >>> tree.rebuild([3.0, 4.0])
    {'dense': {'bias': 3.0, 'kernel': 4.0}}
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(params, nnx.Module):
        graph, state = nnx.split(params)
        pairs, treedef = tree_flatten_with_path_with_implicit(state)
        return Tree(_leaves(pairs, params), lambda values: nnx.merge(graph, treedef.unflatten(values)))
    pairs, treedef = tree_flatten_with_path_with_implicit(params)
    return Tree(_leaves(pairs, params), treedef.unflatten)


def map_tree(f: Callable[[Any], Any], params: Any, is_leaf: Callable[[Any], bool]) -> Any:
    """`jax.tree.map`, for NNX modules too."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(params, nnx.Module):
        graph, state = nnx.split(params)
        return nnx.merge(graph, jtu.tree_map(f, state, is_leaf=is_leaf))
    return jtu.tree_map(f, params, is_leaf=is_leaf)


def _leaves(pairs: Iterable[tuple[Sequence[Any], Any]], root: Any) -> tuple[Leaf, ...]:
    return tuple(_leaf(path, value, root) for path, value in pairs)


def _leaf(path: Sequence[Any], value: Any, root: Any) -> Leaf:
    names = [jtu.keystr((key,), simple=True) for key in path]
    holders = _holders(root, path)
    # A variable or a box with metadata around one array is not part of the name a person gives to that array.
    while len(names) > 1 and names[-1] == "value" and type(holders[-1]).__module__.startswith("flax."):
        names.pop()
        holders.pop()
    return Leaf(tuple(names), value, holders[-1])


def _holders(root: Any, path: Sequence[Any]) -> list[Any]:
    """The objects on the way to a leaf, the one that holds it last; None from where the way is lost."""
    found = [root]
    for key in path[:-1]:
        found.append(_child(found[-1], key))
    return found


def _child(node: Any, key: Any) -> Any:
    name: Any = getattr(key, "key", getattr(key, "name", getattr(key, "idx", None)))
    try:
        by_attribute = isinstance(key, jtu.GetAttrKey) or not hasattr(node, "__getitem__")
        return getattr(node, str(name)) if by_attribute else node[name]
    except (AttributeError, KeyError, IndexError, TypeError):
        return None
