"""Tree utilities that stop at implicit arrays instead of looking inside."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from .array import ImplicitArray


def is_array(element: Any) -> bool:
    """Is this a NumPy array, a NumPy scalar or a JAX array?"""
    return isinstance(element, (np.ndarray, np.generic, jax.Array))


def leaf_predicate(x: Any) -> bool:
    """Is this an implicit array?"""
    return isinstance(x, ImplicitArray)


def combine_leaf_predicate(base_fn: Callable[..., Any], is_leaf: Callable[[Any], bool]) -> Callable[..., Any]:
    """`base_fn` (a tree function of JAX) that also stops wherever `is_leaf` is true.

    The returned function takes `is_leaf=` like the original; a node is a leaf if either predicate holds. With
    `is_leaf_takes_path=True` the caller's predicate gets the path first, as in JAX.
    """

    @functools.wraps(base_fn)
    def combined(*args: Any, is_leaf: Callable[..., bool] | None = None, **kwargs: Any) -> Any:
        return base_fn(*args, is_leaf=_either(is_leaf, fixed), **kwargs)

    fixed = is_leaf
    return combined


def _either(is_leaf: Callable[..., bool] | None, fixed: Callable[[Any], bool] = leaf_predicate) -> Callable[..., bool]:
    """True where one of the two is. Called with a node, or with its path and the node."""
    return lambda *node: fixed(node[-1]) or bool(is_leaf and is_leaf(*node))


IsLeaf = Callable[[Any], bool]
IsLeafWithPath = Callable[..., bool]


def tree_flatten_with_implicit(tree: Any, is_leaf: IsLeaf | None = None) -> tuple[list[Any], Any]:
    """`jax.tree_util.tree_flatten` with implicit arrays as leaves."""
    return jtu.tree_flatten(tree, is_leaf=_either(is_leaf))


def tree_leaves_with_implicit(tree: Any, is_leaf: IsLeaf | None = None) -> list[Any]:
    """`jax.tree_util.tree_leaves` with implicit arrays as leaves."""
    return jtu.tree_leaves(tree, is_leaf=_either(is_leaf))


def tree_map_with_implicit(f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: IsLeaf | None = None) -> Any:
    """`jax.tree_util.tree_map` with implicit arrays as leaves."""
    return jtu.tree_map(f, tree, *rest, is_leaf=_either(is_leaf))


def tree_structure_with_implicit(tree: Any, is_leaf: IsLeaf | None = None) -> Any:
    """`jax.tree_util.tree_structure` with implicit arrays as leaves."""
    return jtu.tree_structure(tree, is_leaf=_either(is_leaf))


def tree_flatten_with_path_with_implicit(
    tree: Any, is_leaf: IsLeafWithPath | None = None, is_leaf_takes_path: bool = False
) -> tuple[list[tuple[Any, Any]], Any]:
    """`jax.tree_util.tree_flatten_with_path` with implicit arrays as leaves."""
    return jtu.tree_flatten_with_path(tree, is_leaf=_either(is_leaf), is_leaf_takes_path=is_leaf_takes_path)


def tree_map_with_path_with_implicit(
    f: Callable[..., Any],
    tree: Any,
    *rest: Any,
    is_leaf: IsLeafWithPath | None = None,
    is_leaf_takes_path: bool = False,
) -> Any:
    """`jax.tree_util.tree_map_with_path` with implicit arrays as leaves."""
    return jtu.tree_map_with_path(f, tree, *rest, is_leaf=_either(is_leaf), is_leaf_takes_path=is_leaf_takes_path)


def implicit_depth(tree: Any) -> int:
    """How deeply implicit arrays are nested: 0 if there are none, 1 if none holds another, and so on."""
    found = [leaf for leaf in tree_leaves_with_implicit(tree) if leaf_predicate(leaf)]
    return max((1 + implicit_depth(_children(q)) for q in found), default=0)


def _children(q: ImplicitArray) -> list[Any]:
    return jtu.tree_leaves(q, is_leaf=lambda x: x is not q and leaf_predicate(x))


def flatten_one_implicit_layer(tree: Any) -> tuple[list[Any], Any]:
    """Leaves and structure with the outermost implicit arrays opened, and those inside them kept as leaves."""
    outer, treedef = tree_flatten_with_implicit(tree)
    leaves: list[Any] = []
    opened: list[Any] = []
    for node in outer:
        inner, inner_def = jtu.tree_flatten(node, is_leaf=lambda x, node=node: x is not node and leaf_predicate(x))
        leaves.extend(inner)
        opened.append(jtu.tree_unflatten(inner_def, [0] * len(inner)))
    return leaves, jtu.tree_structure(jtu.tree_unflatten(treedef, opened))
