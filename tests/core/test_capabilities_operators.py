"""An implicit array used like any array: operators, conversions, and the three ways into a scope."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eformer.jaximus import implicit

from .samples import GRAD, LAYERS, STACK, STACK_D, XD, A, B, D, Q, X, tanh_chain
from .toys import Block8, Lora, assert_dispatched, assert_no_stack, assert_same, dots

MATRIX_PRODUCT = (((1,), (0,)), ((), ()))


pytestmark = pytest.mark.usefixtures("fresh")


# -- no wrapper at all -------------------------------------------------------------------------------------------------


def test_matmul_operator_dispatches():
    assert_same(X @ Q, XD)
    assert_dispatched()


def test_matmul_operator_on_the_left():
    assert_same(Q @ X.T, D @ np.asarray(X).T)
    assert_dispatched()


def test_numpy_array_on_the_left_dispatches():
    assert_same(np.asarray(X) @ Q, XD)
    assert_dispatched()


@pytest.mark.parametrize(
    "operation",
    [
        lambda q: q + 1,
        lambda q: 2 * q,
        lambda q: -q,
        lambda q: abs(q),
        lambda q: 1 - q,
        lambda q: q / 2,
        lambda q: q.T,
        lambda q: q[0],
        lambda q: q[jnp.array([1, 2])],
        lambda q: q.sum(),
        lambda q: q.reshape(-1)[:5],
        lambda q: q > 0,
    ],
    ids=["+", "2*", "neg", "abs", "rsub", "/", "T", "row", "rows", "sum", "reshape", ">"],
)
def test_operators_and_methods(operation):
    assert_same(operation(Q), operation(jnp.asarray(D)))


def test_a_handler_may_keep_the_product_implicit():
    doubled = Q * 2.0
    assert isinstance(doubled, Block8)
    assert_same(doubled, D * 2)


def test_numpy_conversion():
    assert_same(np.asarray(Q), D)
    half = np.array(Q, dtype=np.float16)
    assert half.dtype == np.float16
    assert_same(half, D.astype(np.float16))


def test_astype_returns_a_new_array():
    low = Q.astype(jnp.bfloat16)
    assert low is not Q
    assert Q.dtype == jnp.float32
    assert_same(low, jnp.asarray(D).astype(jnp.bfloat16))


def test_comparison_is_elementwise_and_repr_says_what_it_is():
    equal = Q == Q
    assert equal.shape == (32, 32)
    assert bool(equal.all())
    assert all(word in repr(Q) for word in ("Block8", "float32", "32"))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda q: jnp.dot(X, q), XD),
        (jnp.asarray, D),
        (lambda q: jnp.einsum("bk,kn->bn", X, q), XD),
        (jax.nn.relu, np.maximum(D, 0)),
        (jax.jit(lambda q: jnp.dot(X, q)), XD),
        (lambda q: jax.grad(lambda x: jnp.dot(x, q).sum())(X), GRAD),
        (lambda q: lax.dot_general(X, q, MATRIX_PRODUCT), XD),
        (jax.jit(lambda q: lax.dot_general(X, q, MATRIX_PRODUCT)), XD),
    ],
    ids=["dot", "asarray", "einsum", "relu", "jit dot", "grad dot", "lax", "jit lax"],
)
def test_jax_functions_outside_any_scope(function, expected):
    assert_same(function(Q), expected)


def test_sum_and_vmap_outside_any_scope():
    assert_same(jnp.sum(Q), D.sum(), atol=1e-4)
    stacked = jax.vmap(lambda q: jnp.dot(X, q))(STACK)
    assert_same(stacked, np.einsum("mk,bkn->bmn", X, STACK_D))


def test_gradient_reaches_the_children_through_jnp_outside_any_scope():
    actual = jax.grad(lambda ab: jnp.dot(X, Lora(Q, *ab)).sum())((A, B))
    expected = jax.grad(lambda ab: (X @ (D + ab[0] @ ab[1])).sum())((A, B))
    assert_same(actual, expected)


def test_operator_inside_a_plain_jit_dispatches():
    assert_same(jax.jit(lambda x, q: x @ q)(X, Q), XD)
    assert_dispatched()


# -- the decorator -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "product",
    [
        lambda x, q: x @ q,
        jnp.dot,
        lambda x, q: jnp.einsum("bk,kn->bn", x, q),
        lambda x, q: implicit(lambda x, q: x @ q)(x, q),
    ],
    ids=["matmul", "dot", "einsum", "nested scope"],
)
def test_decorated_function_dispatches(product):
    assert_same(implicit(product)(X, Q), XD)
    assert_dispatched()


@pytest.mark.parametrize("order", ["jit outside", "jit inside"])
def test_jit_and_the_decorator_in_either_order(order):
    product = lambda x, q: x @ q  # noqa: E731
    function = jax.jit(implicit(product)) if order == "jit outside" else implicit(jax.jit(product))
    assert_same(function(X, Q), XD)
    assert_dispatched()


def test_an_inner_jit_is_traced_once():
    inner = jax.jit(lambda x, q: x @ q)
    implicit(inner)(X, Q)
    first = len(dots())
    assert first
    implicit(inner)(X, Q)
    assert len(dots()) == first


def test_closed_over_array_dispatches():
    assert_same(implicit(lambda x: jnp.dot(x, Q))(X), XD)
    assert_dispatched()


def test_array_closed_over_by_an_inner_jit_dispatches():
    assert_same(implicit(lambda x: jax.jit(lambda x: jnp.dot(x, Q))(x))(X), XD)
    assert_dispatched()


def test_pytrees_in_and_out():
    layer = {"w": Q, "b": jnp.ones(32)}
    result = implicit(lambda p, *, x: {"y": x @ p["w"] + p["b"], "w": p["w"]})(layer, x=X)
    assert_same(result["y"], XD + 1)
    assert isinstance(result["w"], Block8)
    assert_dispatched()


# -- the context manager -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "product",
    [lambda: X @ Q, lambda: jnp.dot(X, Q), lambda: jnp.einsum("bk,kn->bn", X, Q)],
    ids=["matmul", "dot", "einsum"],
)
def test_with_block_dispatches(product):
    jax.clear_caches()  # einsum keeps its trace where `forget` does not reach
    with implicit:
        y = product()
    assert isinstance(y, jax.Array)
    assert_same(y, XD)
    assert_dispatched()


def test_with_block_around_transformations():
    with implicit:
        y = jax.jit(lambda x, q: jnp.dot(x, q))(X, Q)
        gradient = jax.grad(lambda x: jnp.dot(x, Q).sum())(X)
        mapped = jax.vmap(lambda row: jnp.dot(row, Q))(X)
        last, _ = lax.scan(lambda c, w: (jnp.tanh(jnp.dot(c, w)), None), X, STACK)
    assert_same(y, XD)
    assert_same(gradient, GRAD)
    assert_same(mapped, XD)
    assert_same(last, tanh_chain(X, STACK_D))
    assert_no_stack(LAYERS)


def test_implicit_result_of_a_with_block_lives_on():
    with implicit:
        doubled = Q * 2.0
    assert_same(np.asarray(doubled), D * 2)
    assert_same(X @ doubled, 2 * XD)


def test_jnp_result_of_a_with_block_lives_on():
    with implicit:
        doubled = jnp.multiply(Q, 2.0)
    assert_same(np.asarray(doubled), D * 2)
    assert_same(X @ doubled, 2 * XD)
    assert_same(jax.jit(lambda x, w: x @ w)(X, doubled), 2 * XD)


def test_with_block_inside_jit_dispatches():
    @jax.jit
    def product(x, q):
        with implicit:
            return jnp.dot(x, q)

    assert_same(product(X, Q), XD)
    assert_dispatched()


def test_with_block_survives_an_exception():
    with pytest.raises(KeyError), implicit:
        raise KeyError("inside")
    assert_same(X @ Q, XD)
    assert_same(jax.jit(lambda x: x + 1)(X), np.asarray(X) + 1)
