"""Tree utilities that stop at implicit arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

from eformer.jaximus import (
    combine_leaf_predicate,
    flatten_one_implicit_layer,
    implicit_depth,
    is_array,
    leaf_predicate,
    tree_flatten_with_implicit,
    tree_flatten_with_path_with_implicit,
    tree_leaves_with_implicit,
    tree_map_with_implicit,
    tree_map_with_path_with_implicit,
    tree_structure_with_implicit,
)

from .toys import Block8, Lora, Plain, assert_same


@pytest.fixture
def q():
    return Plain(jnp.ones(3), jnp.ones(3))


@pytest.fixture
def nested():
    return Lora(Block8.quantize(jnp.ones((8, 2))), jnp.ones((8, 1)), jnp.ones((1, 2)))


@pytest.fixture
def tree(q, nested):
    return {"a": q, "b": [jnp.zeros(2), nested], "c": (None, 3)}


def test_flatten_and_back(tree, q, nested):
    leaves, treedef = tree_flatten_with_implicit(tree)
    assert leaves[0] is q
    assert leaves[2] is nested
    assert leaves[3] == 3
    again = jtu.tree_unflatten(treedef, leaves)
    assert again["a"] is q
    assert treedef == tree_structure_with_implicit(tree)
    assert treedef.num_leaves == 4
    assert [type(x) for x in tree_leaves_with_implicit(tree)] == [type(x) for x in leaves]


def test_map_sees_whole_arrays(tree):
    out = tree_map_with_implicit(lambda x, y: (type(x).__name__, y), tree, tree)
    assert out["a"] == ("Plain", tree["a"]) or out["a"][1] is tree["a"]
    assert out["b"][1][0] == "Lora"
    assert out["c"][0] is None


def test_map_with_several_trees(q):
    out = tree_map_with_implicit(lambda x, y, z: x * y + z, {"k": q}, {"k": q}, {"k": 1.0})
    assert_same(out["k"], jnp.full(3, 2.0))


def test_paths_stop_at_the_array(tree):
    flat, _ = tree_flatten_with_path_with_implicit(tree)
    assert [jtu.keystr(path) for path, _ in flat] == ["['a']", "['b'][0]", "['b'][1]", "['c'][1]"]
    names = tree_map_with_path_with_implicit(lambda path, x: jtu.keystr(path), tree)
    assert names["b"][1] == "['b'][1]"


def test_further_predicates_are_combined(tree):
    stop = lambda x: isinstance(x, list)  # noqa: E731
    leaves = tree_leaves_with_implicit(tree, is_leaf=stop)
    assert leaves[1] is tree["b"]
    assert leaves[0] is tree["a"]
    assert tree_structure_with_implicit(tree, is_leaf=stop).num_leaves == 3
    assert tree_flatten_with_implicit(tree, stop)[0][1] is tree["b"]
    assert tree_map_with_implicit(type, tree, is_leaf=stop)["b"] is list


def test_predicates_may_take_the_path(tree):
    stop = lambda path, x: len(path) == 1 and path[0].key == "b"  # noqa: E731
    flat, _ = tree_flatten_with_path_with_implicit(tree, is_leaf=stop, is_leaf_takes_path=True)
    assert [jtu.keystr(path) for path, _ in flat] == ["['a']", "['b']", "['c'][1]"]
    out = tree_map_with_path_with_implicit(lambda p, x: type(x), tree, is_leaf=stop, is_leaf_takes_path=True)
    assert (out["a"], out["b"]) == (Plain, list)


def test_combine_wraps_any_tree_function(tree):
    leaves = combine_leaf_predicate(jtu.tree_leaves, lambda x: isinstance(x, (list, Plain)))
    assert [type(x) for x in leaves(tree)] == [Plain, list, int]
    assert [type(x) for x in leaves(tree, is_leaf=lambda x: isinstance(x, tuple))] == [Plain, list, tuple]


def test_depth(q, nested):
    assert implicit_depth({"x": jnp.ones(2), "n": None}) == 0
    assert implicit_depth([q, 1]) == 1
    assert implicit_depth({"x": [q], "y": nested}) == 2
    assert implicit_depth(Lora(nested, nested.a, nested.b)) == 3


def test_flatten_one_layer(tree, nested):
    leaves, treedef = flatten_one_implicit_layer(tree)
    assert treedef.num_leaves == len(leaves) == 2 + 1 + 3 + 1
    assert leaves[3] is nested.base
    again = jtu.tree_unflatten(treedef, leaves)
    assert jtu.tree_structure(again) == jtu.tree_structure(tree)
    assert_same(again["b"][1].base, nested.base)
    inner, _ = flatten_one_implicit_layer(leaves)
    assert implicit_depth(inner) == 0


def test_flatten_one_layer_of_nothing_implicit():
    tree = {"a": 1, "b": [2, None]}
    leaves, treedef = flatten_one_implicit_layer(tree)
    assert (leaves, treedef) == jtu.tree_flatten(tree)


def test_predicates(q):
    assert leaf_predicate(q)
    assert not leaf_predicate(jnp.ones(2))
    arrays = [np.ones(2), np.float32(1), np.bool_(True), jnp.ones(2), jax.jit(lambda: jnp.ones(()))()]
    assert all(map(is_array, arrays))
    assert not any(map(is_array, [1, 1.0, [1], "a", None, q]))
    assert jax.jit(lambda x: jnp.float32(is_array(x)))(1.0) == 1
