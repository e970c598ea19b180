"""Custom derivatives, callbacks, and what `register` promises."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eformer.jaximus import AmbiguousHandlerError, implicit, register

from .samples import GRAD, XD, D, Q, X, normal
from .toys import Block8, FlatCodes, assert_dispatched, assert_same, dense

pytestmark = pytest.mark.usefixtures("fresh")


def scale_gradient() -> Any:
    """The gradient of `f(dense)` with respect to the scales, by ordinary JAX."""
    return lambda f: jax.grad(lambda s: f(Block8(Q.codes, s, Q.block).materialize()))(Q.scale)


# -- custom_jvp --------------------------------------------------------------------------------------------------------


def test_activations_of_a_product_dispatch():
    result = implicit(lambda x, w: jax.nn.relu(jax.nn.silu(x @ w)))(X, Q)
    assert_same(result, jax.nn.relu(jax.nn.silu(jnp.asarray(XD))))
    assert_dispatched()


@pytest.mark.parametrize("activation", [jax.nn.silu, jax.nn.relu])
def test_activation_of_an_implicit_array(activation):
    assert_same(implicit(activation)(Q), activation(jnp.asarray(D)))


def test_gradient_of_an_activation_reaches_the_children():
    gradient = jax.grad(lambda q: implicit(jax.nn.relu)(q).sum(), allow_int=True)(Q)
    assert_same(gradient.scale, scale_gradient()(lambda w: jax.nn.relu(w).sum()))


def test_custom_jvp_closing_over_the_array():
    def product(x, q):
        h = jax.custom_jvp(lambda x: x @ q)
        h.defjvp(lambda primals, tangents: (primals[0] @ q, 5 * (tangents[0] @ q)))
        return h(x)

    assert_same(implicit(product)(X, Q), XD)
    assert_same(jax.grad(lambda x: implicit(product)(x, Q).sum())(X), 5 * GRAD)
    assert_dispatched()


# -- custom_vjp --------------------------------------------------------------------------------------------------------


def tripling() -> Any:
    """Twice its argument, with a gradient of three that proves the rule was used."""

    @jax.custom_vjp
    def f(x):
        return x * 2

    f.defvjp(lambda x: (f(x), None), lambda _, g: (g * 3,))
    return f


def sevenfold_product() -> Any:
    """A matrix product whose gradient for x is seven times the true one."""

    @jax.custom_vjp
    def f(x, w):
        return x @ w

    f.defvjp(lambda x, w: (x @ w, (x, w)), lambda res, g: (7 * (g @ res[1].T), res[0].T @ g))
    return f


def test_custom_vjp_of_a_dense_value():
    f = tripling()
    outside = jax.grad(lambda x: implicit(lambda x, w: f(x @ w).sum())(x, Q))(X)
    assert_same(outside, 3 * GRAD)
    inside = implicit(jax.jit(lambda x, w: jax.grad(lambda x: f(x @ w).sum())(x)))(X, Q)
    assert_same(inside, 3 * GRAD)


def test_custom_vjp_taking_the_array_dispatches():
    assert_same(implicit(sevenfold_product())(X, Q), XD)
    assert_dispatched()


def test_custom_vjp_taking_the_array_is_differentiated_by_its_own_rule():
    f = sevenfold_product()
    assert_same(jax.grad(lambda x: implicit(f)(x, Q).sum())(X), 7 * GRAD)
    assert_same(implicit(lambda x, q: jax.grad(lambda x: f(x, q).sum())(x))(X, Q), 7 * GRAD)


def test_custom_vjp_gradient_reaches_the_children():
    f = sevenfold_product()
    gradient = jax.grad(lambda q: implicit(f)(X, q).sum(), allow_int=True)(Q)
    assert_same(gradient.scale, scale_gradient()(lambda w: (X @ w).sum()))


def test_custom_vjp_closing_over_the_array():
    def product(x, q):
        h = jax.custom_vjp(lambda x: x @ q)
        h.defvjp(lambda x: (x @ q, None), lambda _, g: (g,))
        return h(x)

    assert_same(implicit(product)(X, Q), XD)
    assert_same(jax.grad(lambda x: implicit(product)(x, Q).sum())(X), np.ones((8, 32), np.float32))
    assert_dispatched()


# -- callbacks and unknown primitives ----------------------------------------------------------------------------------


def test_callbacks_see_dense_values():
    shape = jax.ShapeDtypeStruct((8, 32), jnp.float32)
    assert_same(implicit(lambda x, q: jax.pure_callback(np.asarray, shape, x @ q))(X, Q), XD)
    seen = []
    implicit(jax.jit(lambda q: jax.debug.callback(seen.append, q)))(Q)
    jax.effects_barrier()
    assert_same(np.asarray(seen[0]), D)


def test_a_primitive_nobody_handles_gets_the_dense_array():
    kernel = Block8.quantize(normal(5, 3, 3, 32, 16))
    images = normal(6, 1, 8, 8, 32)

    def convolve(images, kernel):
        return lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    assert_same(implicit(convolve)(images, kernel), convolve(images, jnp.asarray(dense(kernel))))


@pytest.mark.parametrize(
    "function",
    [lambda q: jnp.where(q > 0, q, 0.0), lambda q: jnp.concatenate([q, q]), lambda q: jnp.sort(q, 0), jnp.argmax],
    ids=["where", "concatenate", "sort", "argmax"],
)
def test_functions_without_a_handler(function):
    assert_same(implicit(function)(Q), function(jnp.asarray(D)))


def test_an_error_in_materialize_reaches_the_caller():
    broken = Block8(Q.codes, Q.scale[:1, :5], Q.block)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        implicit(lambda w: w + 1)(broken)


# -- register ----------------------------------------------------------------------------------------------------------


def test_names_outside_jax_lax_are_known():
    hits = []

    @dataclasses.dataclass
    class Summed(Block8):
        pass

    @register("reduce_sum")
    def _(w: Summed, *, axes, **params):
        hits.append(axes)
        return NotImplemented

    assert_same(implicit(jnp.sum)(Summed(Q.codes, Q.scale, Q.block)), D.sum(), atol=1e-4)
    assert hits == [(0, 1)]
    for name in ("custom_jvp_call", "scan", "pjit", "jit"):

        @register(name)
        def _(w: FlatCodes, **params):
            return NotImplemented


def test_precedence_decides_between_equals_and_ambiguity_is_an_error():
    @dataclasses.dataclass
    class Parent(Block8):
        pass

    @dataclasses.dataclass
    class Child(Parent):
        pass

    child = Child(Q.codes, Q.scale, Q.block)
    other = jnp.ones((32, 32))

    @register("add", precedence=0)
    def _(a: Child, b: Any, **params):
        return jnp.zeros((32, 32))

    @register("add", precedence=10)
    def _(a: Parent, b: jax.Array, **params):
        return jnp.ones((32, 32))

    assert_same(implicit(lambda w: lax.add(w, other))(child), np.ones((32, 32), np.float32))

    @register("sub")
    def _(a: Child, b: Any, **params):
        return jnp.zeros((32, 32))

    @register("sub")
    def _(a: Parent, b: jax.Array, **params):
        return jnp.ones((32, 32))

    with pytest.raises(AmbiguousHandlerError):
        implicit(lambda w: lax.sub(w, other))(child)


def test_a_handler_without_keywords_survives_new_parameters():
    @dataclasses.dataclass
    class Bare(Block8):
        pass

    @register("mul")
    def _(a: Bare, b: jax.Array):
        return jnp.full((32, 32), 5.0)

    bare = Bare(Q.codes, Q.scale, Q.block)
    assert_same(implicit(lambda w: lax.mul(w, jnp.ones((32, 32))))(bare), np.full((32, 32), 5.0, np.float32))
