"""Differentiation and vectorization, inside and outside the scope."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eformer.jaximus import implicit

from .samples import GRAD, LAYERS, STACK, STACK_D, XD, D, Q, W, X
from .toys import Block8, FlatCodes, Transposed, assert_dispatched, assert_no_stack, assert_same, dense

BATCHED = np.einsum("mk,bkn->bmn", X, STACK_D)


pytestmark = pytest.mark.usefixtures("fresh")


# -- derivatives -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gradient",
    [
        lambda x: jax.grad(lambda x: implicit(lambda x, q: (x @ q).sum())(x, Q))(x),
        lambda x: implicit(lambda x, q: jax.grad(lambda x: (x @ q).sum())(x))(x, Q),
        jax.jit(jax.grad(lambda x: implicit(jax.jit(lambda x, q: (x @ q).sum()))(x, Q))),
        jax.grad(lambda x: (x @ Q).sum()),
        lambda x: implicit(lambda x, q: jax.vjp(lambda x: x @ q, x)[1](jnp.ones((8, 32)))[0])(x, Q),
        lambda x: implicit(lambda x, q: jax.value_and_grad(lambda x: (x @ q).sum())(x)[1])(x, Q),
    ],
    ids=["outside", "inside", "jit grad jit", "operator", "vjp", "value_and_grad"],
)
def test_gradient_with_respect_to_a_dense_operand(gradient):
    assert_same(gradient(X), GRAD)


@pytest.mark.parametrize(
    "tangent",
    [
        lambda x, q: jax.jvp(lambda x: x @ q, (x,), (x,))[1],
        lambda x, q: jax.linearize(lambda x: x @ q, x)[1](x),
    ],
    ids=["jvp", "linearize"],
)
def test_forward_mode_inside(tangent):
    assert_same(implicit(tangent)(X, Q), XD)


def test_gradient_outside_reaches_the_children():
    gradient = jax.grad(lambda q: implicit(lambda q: (X @ q).sum())(q), allow_int=True)(Q)
    expected = jax.grad(lambda s: (X @ Block8(Q.codes, s, Q.block).materialize()).sum())(Q.scale)
    assert isinstance(gradient, Block8)
    assert_same(gradient.scale, expected)


def test_gradient_inside_is_the_dense_logical_one():
    gradient = implicit(lambda q: jax.grad(lambda q: (X @ q).sum())(q))(Q)
    assert_same(gradient, np.asarray(X).T @ np.ones((8, 32), np.float32))


# -- vmap --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mapped",
    [
        lambda: jax.vmap(lambda row: implicit(lambda a, q: a @ q)(row, Q))(X),
        lambda: implicit(lambda x, q: jax.vmap(lambda row: row @ q)(x))(X, Q),
    ],
    ids=["outside", "inside"],
)
def test_vmap_over_the_dense_operand(mapped):
    assert_same(mapped(), XD)
    assert_dispatched()


def _batch_of_x() -> jax.Array:
    return jnp.stack([X] * LAYERS)


@pytest.mark.parametrize(
    "mapped",
    [
        lambda: jax.vmap(implicit(lambda q: X @ q))(STACK),
        lambda: jax.vmap(lambda q: X @ q)(STACK),
        lambda: jax.vmap(implicit(lambda x, q: x @ q))(_batch_of_x(), STACK),
        lambda: implicit(lambda x, q: jax.vmap(lambda x, q: x @ q)(x, q))(_batch_of_x(), STACK),
        lambda: implicit(lambda q: jax.vmap(lambda q: X @ q)(q))(STACK),
    ],
    ids=["outside", "operator", "outside with x", "inside with x", "inside"],
)
def test_vmap_over_a_stack(mapped):
    assert_same(mapped(), BATCHED)
    assert_dispatched()


def test_vmapped_constructor_makes_a_stack():
    flat = jax.vmap(FlatCodes.quantize)(jnp.asarray(STACK_D))
    assert flat.shape == STACK_D.shape
    expected = np.einsum("mk,bkn->bmn", X, dense(flat))
    assert_same(jax.vmap(implicit(lambda q: X @ q))(flat), expected)


def test_stacking_the_children_stacks_the_array():
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[Q] * LAYERS)
    assert stack.shape == (LAYERS, 32, 32)
    assert_same(jax.vmap(lambda q: X @ q)(stack)[2], XD)
    assert_no_stack(LAYERS)


def test_outer_vmap_over_a_core_axis_is_refused():
    one = Block8.quantize(W, 1)  # its scales have as many rows as its codes: JAX alone cannot notice
    with pytest.raises(ValueError, match=r"core|axis|axes"):
        jax.vmap(lambda row: row * 1.0)(one)


@pytest.mark.parametrize(
    "factor", [np.float32(2.0), np.linspace(0.5, 2.0, 32, dtype=np.float32)], ids=["scalar", "vector"]
)
@pytest.mark.parametrize(
    "rows",
    [lambda z: lax.scan(lambda c, row: (c, row * 1.0), 0.0, z)[1], lambda z: jax.vmap(lambda row: row * 1.0)(z)],
    ids=["scan", "vmap"],
)
def test_transposed_storage_is_never_sliced_the_wrong_way(rows, factor):
    stored = Transposed(jnp.asarray(D.T.copy()), jnp.asarray(factor))
    assert_same(implicit(rows)(stored), D * factor)
