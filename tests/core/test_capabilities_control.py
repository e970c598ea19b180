"""Loops, branches and rematerialization, with implicit constants, inputs, carries and outputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eformer.jaximus import implicit

from .samples import LAYERS, STACK, STACK_D, XD, D, Q, X, tanh_chain
from .toys import (
    Block8,
    Const,
    FlatCodes,
    Plain,
    Transposed,
    assert_dispatched,
    assert_no_stack,
    assert_same,
    dense,
    dots,
    forget,
    materializations,
)

pytestmark = pytest.mark.usefixtures("fresh")


def layers(x, stack):
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, stack)[0]


# -- loops -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run",
    [
        lambda x, stack: implicit(layers)(x, stack),
        lambda x, stack: lax.scan(lambda c, w: (jnp.tanh(implicit(jnp.matmul)(c, w)), None), x, stack)[0],
        lambda x, stack: layers(x, stack),
    ],
    ids=["inside", "implicit body", "operator"],
)
def test_scan_over_a_stack_of_layers(run):
    assert_same(run(X, STACK), tanh_chain(X, STACK_D))
    assert dots()
    assert_no_stack(LAYERS)


def test_scan_over_a_stack_of_flat_codes():
    stack = jax.vmap(FlatCodes.quantize)(jnp.asarray(STACK_D))
    expected = tanh_chain(X, dense(stack))
    forget()
    assert_same(implicit(layers)(X, stack), expected)
    assert materializations()
    assert_no_stack(LAYERS)


@pytest.mark.parametrize(
    "loop",
    [
        lambda x, w: lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ w), x),
        lambda x, w: lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)[0],
        lambda x, w: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, x))[1],
    ],
    ids=["fori", "scan", "while"],
)
def test_loop_around_a_constant_array(loop):
    assert_same(implicit(loop)(X, Q), tanh_chain(X, [D] * 3))
    assert_dispatched()


def _scan_carry(step):
    return lambda w: lax.scan(lambda c, _: (step(c), None), w, None, length=3)[0]


def _while_carry(step):
    return lambda w: lax.fori_loop(0, 3, lambda i, c: step(c), w)


@pytest.mark.parametrize("loop", [_scan_carry, _while_carry], ids=["scan", "while"])
def test_a_carry_the_body_keeps_implicit_stays_implicit(loop):
    result = implicit(loop(lambda c: c * 2.0))(Q)
    assert isinstance(result, Block8)
    assert_no_stack(LAYERS)
    assert_same(result, D * 8)


@pytest.mark.parametrize("loop", [_scan_carry, _while_carry], ids=["scan", "while"])
def test_a_carry_the_body_makes_dense_becomes_dense(loop):
    result = implicit(loop(lambda c: c + 1.0))(Q)
    assert isinstance(result, jax.Array)
    assert_same(result, D + 3)


def test_scan_stacks_implicit_outputs():
    result = implicit(lambda w: lax.scan(lambda c, _: (c * 2.0, c), w, None, length=3)[1])(Q)
    assert_same(result, np.stack([D, D * 2, D * 4]))


@pytest.mark.parametrize("kind", [Plain, Transposed, Const])
@pytest.mark.parametrize("place", ["closed over", "carried"])
def test_scan_stacks_outputs_of_any_type(kind, place):
    """Without leaves there is nothing to stack: such an output is dense."""
    w = (
        Const(3.0, shape=(2, 4), dtype=jnp.float32)
        if kind is Const
        else kind(jnp.arange(8.0).reshape(2, 4), jnp.ones(()))
    )
    bodies = {"closed over": lambda w: (0.0, lambda c, _: (c, w)), "carried": lambda w: (w, lambda c, _: (c, c))}

    def program(w):
        start, body = bodies[place](w)
        return lax.scan(body, start, None, length=3)[1]

    assert_same(implicit(program)(w), np.stack([dense(w)] * 3))


@pytest.mark.parametrize("kind", [Plain, Transposed, Const])
def test_scan_over_rows_of_any_type(kind):
    w = (
        Const(3.0, shape=(2, 4), dtype=jnp.float32)
        if kind is Const
        else kind(jnp.arange(8.0).reshape(2, 4), jnp.ones(()))
    )
    total = implicit(lambda w: lax.scan(lambda c, row: (c + row.sum(), row * 2), 0.0, w))(w)
    assert_same(total, (np.float32(dense(w).sum()), dense(w) * 2))


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_gradient_of_a_scan_over_layers(where):
    if where == "outside":
        gradient = jax.grad(lambda x: implicit(lambda x, s: layers(x, s).sum())(x, STACK))(X)
    else:
        gradient = implicit(lambda x, s: jax.grad(lambda x: layers(x, s).sum())(x))(X, STACK)
    assert_same(gradient, jax.grad(lambda x: layers(x, jnp.asarray(STACK_D)).sum())(X))
    assert_no_stack(LAYERS)


def test_associative_scan():
    assert_same(implicit(lambda q: lax.associative_scan(jnp.add, q))(Q), np.cumsum(D, axis=0))


# -- branches ----------------------------------------------------------------------------------------------------------


def test_cond_over_products_dispatches():
    always = implicit(lambda x, w: lax.cond(True, lambda: x @ w, lambda: x @ w * 2))(X, Q)
    never = implicit(lambda x, w: lax.cond(x.sum() > 1e9, lambda: x @ w, lambda: x @ w * 2))(X, Q)
    assert_same(always, XD)
    assert_same(never, 2 * XD)
    assert_dispatched()


def test_branches_that_agree_return_an_implicit_array():
    result = implicit(lambda i, w: lax.switch(i, [lambda w: w * 2.0, lambda w: w * 3.0], w))(1, Q)
    assert isinstance(result, Block8)
    assert_same(result, D * 3)


def test_branches_that_differ_return_a_dense_array():
    result = implicit(lambda i, w: lax.switch(i, [lambda w: w * 2.0, lambda w: w + 1], w))(1, Q)
    assert_same(result, D + 1)


# -- rematerialization -------------------------------------------------------------------------------------------------


def _loss(x, w):
    return jnp.tanh(x @ w).sum()


@pytest.mark.parametrize(
    "gradient",
    [
        lambda: jax.grad(implicit(lambda x, w: jax.checkpoint(lambda x: _loss(x, w))(x)))(X, Q),
        lambda: jax.grad(lambda x: jax.checkpoint(lambda x, w: implicit(_loss)(x, w))(x, Q))(X),
    ],
    ids=["checkpoint inside", "checkpoint outside"],
)
def test_gradient_through_checkpoint_dispatches(gradient):
    assert_same(gradient(), jax.grad(_loss)(X, jnp.asarray(D)))
    assert_dispatched()


def test_gradient_and_checkpoint_both_inside():
    gradient = implicit(lambda x, w: jax.grad(lambda x: jax.checkpoint(_loss)(x, w))(x))(X, Q)
    assert_same(gradient, jax.grad(_loss)(X, jnp.asarray(D)))


def test_gradient_of_a_scan_of_checkpointed_layers():
    policy = jax.checkpoint_policies.dots_saveable

    def loss(x, stack):
        layer = jax.checkpoint(lambda c, w: (jnp.tanh(c @ w), None), policy=policy)
        return lax.scan(layer, x, stack)[0].sum()

    assert_same(jax.grad(implicit(loss))(X, STACK), jax.grad(loss)(X, jnp.asarray(STACK_D)))
    assert_no_stack(LAYERS)
