"""Arrays inside arrays, arrays as pytrees, and the tools of JAX around them."""

from __future__ import annotations

import concurrent.futures
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

from eformer.jaximus import implicit

from .samples import LAYERS, LORA, LORA_D, STACK, STACK_D, XD, A, B, D, Q, X, tanh_chain
from .toys import Block8, Const, Lora, assert_dispatched, assert_no_stack, assert_same

LORA_XD = np.asarray(X) @ LORA_D


pytestmark = pytest.mark.usefixtures("fresh")


# -- nesting -----------------------------------------------------------------------------------------------------------


def test_nested_array_dispatches_through_both_layers():
    assert_same(implicit(lambda x, w: x @ w)(X, LORA), LORA_XD)
    assert_dispatched()


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: x @ w,
        jax.jit(implicit(lambda x, w: x @ w)),
        lambda x, w: jax.vmap(implicit(lambda row: row @ w))(x),
    ],
    ids=["operator", "jit", "vmap"],
)
def test_nested_array_everywhere(product):
    assert_same(product(X, LORA), LORA_XD)
    assert LORA.shape == (32, 32)


def test_nested_array_without_a_handler():
    assert_same(implicit(lambda w: w + 1)(LORA), LORA_D + 1)


def test_gradient_of_the_trainable_layer_only():
    actual = jax.grad(lambda ab: implicit(lambda x, w: (x @ w).sum())(X, Lora(Q, *ab)))((A, B))
    expected = jax.grad(lambda ab: (X @ (D + ab[0] @ ab[1])).sum())((A, B))
    assert_same(actual, expected)


def test_scan_over_nested_stacks():
    stack = Lora(STACK, jnp.stack([A] * LAYERS), jnp.stack([B] * LAYERS))
    run = implicit(lambda x, s: lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, s)[0])
    assert_same(run(X, stack), tanh_chain(X, STACK_D + np.asarray(A @ B)))
    assert_no_stack(LAYERS)


def test_two_implicit_operands():
    assert_same(implicit(lambda a, b: a @ b)(Q, Q), D @ D)
    assert_same(implicit(lambda a, b: a + b)(Q, LORA), D + LORA_D)


def test_an_array_without_children():
    ones = Const(3.0, shape=(32, 5), dtype=jnp.float32)
    assert (ones.shape, ones.dtype) == ((32, 5), jnp.float32)
    expected = np.asarray(X) @ np.full((32, 5), 3.0, np.float32)
    assert_same(X @ ones, expected)
    assert_same(jax.jit(implicit(lambda x, w: jnp.dot(x, w)))(X, ones), expected)


# -- a pytree among pytrees --------------------------------------------------------------------------------------------


def test_tree_functions():
    zeros = jax.tree.map(jnp.zeros_like, Q)
    assert isinstance(zeros, Block8)
    assert zeros.shape == Q.shape
    assert_same(zeros, np.zeros((32, 32), np.float32))
    keys = [str(path[0]) for path, _ in jax.tree_util.tree_flatten_with_path(Q)[0]]
    assert keys == [".codes", ".scale"]


def test_placement_and_pickling():
    moved = jax.block_until_ready(jax.device_put(Q, jax.devices()[0]))
    assert isinstance(moved, Block8)
    assert_same(moved, D)
    assert_same(pickle.loads(pickle.dumps(Q)), D)


def test_shape_follows_the_children_after_assignment():
    mutable = Block8(Q.codes, Q.scale, Q.block)
    assert mutable.shape == (32, 32)
    mutable.codes, mutable.scale = STACK.codes, STACK.scale
    assert mutable.shape == (LAYERS, 32, 32)
    assert_same(mutable, STACK_D)


# -- the tools around --------------------------------------------------------------------------------------------------


def test_abstract_evaluation():
    out = jax.eval_shape(implicit(lambda x, q: x @ q), X, Q)
    assert (out.shape, out.dtype) == ((8, 32), jnp.float32)
    jaxpr = jax.make_jaxpr(implicit(lambda x, q: x @ q))(X, Q)
    assert [v.aval.shape for v in jaxpr.jaxpr.outvars] == [(8, 32)]
    structs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), Q)
    assert (structs.shape, structs.dtype) == ((32, 32), jnp.float32)


def test_threads_have_scopes_of_their_own():
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for result in pool.map(lambda _: implicit(lambda x, q: x @ q)(X, Q), range(16)):
            assert_same(result, XD)


def test_no_tracer_leaks():
    with jax.checking_leaks():
        assert_same(jax.jit(implicit(jax.jit(lambda x, q: x @ q)))(X, Q), XD)


def test_internal_checks_of_jax_pass():
    with jax.enable_checks(True):
        function = jax.jit(implicit(lambda x, q: jax.vmap(lambda row: jax.nn.relu(row @ q))(x)))
        assert_same(function(X, Q), np.maximum(XD, 0))


def test_disable_jit():
    with jax.disable_jit():
        assert_same(implicit(jax.jit(lambda x, q: x @ q))(X, Q), XD)


def test_ahead_of_time_compilation():
    compiled = jax.jit(implicit(lambda x, q: x @ q)).lower(X, Q).compile()
    assert_same(compiled(X, Q), XD)


def test_export():
    exported = export.export(jax.jit(lambda x, codes, scale: implicit(jnp.matmul)(x, Block8(codes, scale, 8))))(
        X, Q.codes, Q.scale
    )
    assert_same(exported.call(X, Q.codes, Q.scale), XD)
