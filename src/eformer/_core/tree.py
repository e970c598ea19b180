"""Tree utilities that stop at implicit arrays instead of looking inside."""

from __future__ import annotations

import functools
import inspect
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
    fixed, signature = is_leaf, inspect.signature(base_fn)

    @functools.wraps(base_fn)
    def combined(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        given = call.arguments.get("is_leaf")
        # Predicates are called with a node, or with its path and the node.
        call.arguments["is_leaf"] = lambda *node: fixed(node[-1]) or bool(given and given(*node))
        return base_fn(*call.args, **call.kwargs)

    return combined


# The functions of `jax.tree_util`, with implicit arrays as leaves.
tree_flatten_with_implicit = combine_leaf_predicate(jtu.tree_flatten, leaf_predicate)
tree_leaves_with_implicit = combine_leaf_predicate(jtu.tree_leaves, leaf_predicate)
tree_map_with_implicit = combine_leaf_predicate(jtu.tree_map, leaf_predicate)
tree_structure_with_implicit = combine_leaf_predicate(jtu.tree_structure, leaf_predicate)
tree_flatten_with_path_with_implicit = combine_leaf_predicate(jtu.tree_flatten_with_path, leaf_predicate)
tree_map_with_path_with_implicit = combine_leaf_predicate(jtu.tree_map_with_path, leaf_predicate)


def implicit_depth(tree: Any) -> int:
    """How deeply implicit arrays are nested: 0 if there are none, 1 if none holds another, and so on."""
    found = [leaf for leaf in tree_leaves_with_implicit(tree) if leaf_predicate(leaf)]
    children = [jtu.tree_leaves(q, is_leaf=lambda x, q=q: x is not q and leaf_predicate(x)) for q in found]
    return max((1 + implicit_depth(inside) for inside in children), default=0)


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
