"""What users do with implicit arrays that tests of single rules do not: without a wrapper, in blocks, nested, split."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eformer.jaximus import implicit

from .samples import GRAD, LAYERS, LORA, LORA_D, STACK, STACK_D, XD, A, B, D, Q, W, X, tanh_chain
from .toys import (
    Block8,
    Const,
    FlatCodes,
    Lora,
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

MATRIX_PRODUCT = (((1,), (0,)), ((), ()))

pytestmark = pytest.mark.usefixtures("fresh")


# -- no wrapper at all -------------------------------------------------------------------------------------------------


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


# -- blocks ------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("double", [lambda q: q * 2.0, lambda q: jnp.multiply(q, 2.0)], ids=["operator", "jnp"])
def test_implicit_result_of_a_with_block_lives_on(double):
    with implicit:
        doubled = double(Q)
    assert_same(np.asarray(doubled), D * 2)
    assert_same(X @ doubled, 2 * XD)
    assert_same(jax.jit(lambda x, w: x @ w)(X, doubled), 2 * XD)


# -- loops and derivatives ---------------------------------------------------------------------------------------------


def test_a_product_that_dispatches_inside_a_plain_scan():
    run = lambda x, stack: lax.scan(lambda c, w: (jnp.tanh(implicit(jnp.matmul)(c, w)), None), x, stack)[0]  # noqa: E731
    assert_same(run(X, STACK), tanh_chain(X, STACK_D))
    assert dots()
    assert_no_stack(LAYERS)


def test_scan_over_a_stack_of_flat_codes():
    stack = jax.vmap(FlatCodes.quantize)(jnp.asarray(STACK_D))
    expected = tanh_chain(X, dense(stack))
    forget()
    assert_same(implicit(lambda x, s: lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, s)[0])(X, stack), expected)
    assert materializations()
    assert_no_stack(LAYERS)


def small(kind):
    """A matrix (2, 4) of a type that does not say how it may be cut, or that holds nothing."""
    if kind is Const:
        return Const(3.0, shape=(2, 4), dtype=jnp.float32)
    return kind(jnp.arange(8.0).reshape(2, 4), jnp.ones(()))


@pytest.mark.parametrize("kind", [Plain, Transposed, Const])
@pytest.mark.parametrize("place", ["closed over", "carried"])
def test_scan_stacks_outputs_of_any_type(kind, place):
    """Without leaves there is nothing to stack: such an output is dense."""
    w = small(kind)
    bodies = {"closed over": lambda w: (0.0, lambda c, _: (c, w)), "carried": lambda w: (w, lambda c, _: (c, c))}

    def program(w):
        start, body = bodies[place](w)
        return lax.scan(body, start, None, length=3)[1]

    assert_same(implicit(program)(w), np.stack([dense(w)] * 3))


@pytest.mark.parametrize("kind", [Plain, Transposed, Const])
def test_scan_over_rows_of_any_type(kind):
    w = small(kind)
    total = implicit(lambda w: lax.scan(lambda c, row: (c + row.sum(), row * 2), 0.0, w))(w)
    assert_same(total, (np.float32(dense(w).sum()), dense(w) * 2))


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


def test_outer_vmap_over_a_core_axis_is_refused():
    one = Block8.quantize(W, 1)  # its scales have as many rows as its codes: JAX alone cannot notice
    with pytest.raises(ValueError, match=r"core|axis|axes"):
        jax.vmap(lambda row: row * 1.0)(one)


def test_gradient_inside_is_the_dense_logical_one():
    gradient = implicit(lambda q: jax.grad(lambda q: (X @ q).sum())(q))(Q)
    assert_same(gradient, np.asarray(X).T @ np.ones((8, 32), np.float32))


def test_custom_vjp_of_a_dense_value():
    @jax.custom_vjp
    def f(x):
        return x * 2

    f.defvjp(lambda x: (f(x), None), lambda _, g: (g * 3,))  # a rule that shows itself
    outside = jax.grad(lambda x: implicit(lambda x, w: f(x @ w).sum())(x, Q))(X)
    assert_same(outside, 3 * GRAD)
    inside = implicit(jax.jit(lambda x, w: jax.grad(lambda x: f(x @ w).sum())(x)))(X, Q)
    assert_same(inside, 3 * GRAD)


# -- arrays inside arrays ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: x @ w,
        implicit(lambda x, w: x @ w),
        jax.jit(implicit(lambda x, w: x @ w)),
        lambda x, w: jax.vmap(implicit(lambda row: row @ w))(x),
    ],
    ids=["operator", "implicit", "jit", "vmap"],
)
def test_nested_array_dispatches_through_both_layers(product):
    assert_same(product(X, LORA), np.asarray(X) @ LORA_D)
    assert_dispatched()


def test_nested_array_without_a_handler():
    assert_same(implicit(lambda w: w + 1)(LORA), LORA_D + 1)


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


# -- several devices ---------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4,), ("m",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])


def test_gradient_of_shard_map_under_jit(mesh):
    sharded = jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(P("m"), P()), out_specs=P("m"))
    gradient = jax.jit(jax.grad(lambda x: implicit(lambda x, w: sharded(x, w))(x, Q).sum()))(X)
    assert_same(gradient, GRAD)


def test_inner_jit_keeps_its_output_sharding(mesh):
    sharding = NamedSharding(mesh, P("m"))
    result = implicit(jax.jit(lambda x, w: x @ w, out_shardings=sharding))(X, Q)
    assert_same(result, XD)
    assert result.sharding.is_equivalent_to(sharding, 2)


def test_sharded_children(mesh):
    spread = jax.device_put(Q, NamedSharding(mesh, P(None, "m")))
    assert_same(jax.jit(implicit(lambda x, w: x @ w))(X, spread), XD)
    assert_same(X @ spread, XD)
    assert len(spread.scale.devices()) == 4
    assert_same(np.asarray(spread), np.asarray(Q))
