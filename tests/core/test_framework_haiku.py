"""Haiku models whose matrices are implicit arrays."""

from __future__ import annotations

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import pytest

from eformer.jaximus import implicit, tree_map_with_implicit

from .toys import DIARY, Block8, assert_dispatched, assert_no_stack, assert_same, dense, dots, forget

LAYERS = 3


def mlp(x: jax.Array) -> jax.Array:
    h = hk.LayerNorm(-1, create_scale=True, create_offset=True)(hk.Linear(32)(x))
    return hk.Linear(16)(jax.nn.relu(h))


def attention_model(tokens: jax.Array) -> jax.Array:
    x = hk.Embed(24, 16)(tokens)
    x = x + hk.MultiHeadAttention(2, 8, w_init=hk.initializers.VarianceScaling(), model_size=16)(x, x, x)
    return hk.remat(mlp)(x)


def convolution(x: jax.Array) -> jax.Array:
    return hk.BatchNorm(True, True, 0.9)(hk.Conv2D(16, 3)(x), is_training=True)


def stacked(x: jax.Array) -> jax.Array:
    return hk.experimental.layer_stack(LAYERS)(lambda x: x + mlp(x))(x)


def twins(params: Any) -> tuple[Any, Any]:
    def quantize(path: Any, leaf: jax.Array) -> Any:
        return Block8.quantize(leaf) if path[-1].key in ("w", "embeddings") else leaf

    quantized = jax.tree_util.tree_map_with_path(quantize, params)
    plain = tree_map_with_implicit(lambda leaf: jnp.asarray(dense(leaf)), quantized)
    forget()  # hk.Linear multiplies with jnp.dot, whose jit would be remembered
    return quantized, plain


def test_mlp(wrap, key):
    model, x = hk.without_apply_rng(hk.transform(mlp)), jax.random.normal(key, (4, 16))
    quantized, plain = twins(model.init(jax.random.key(0), x))
    y = wrap(model.apply)(quantized, x)
    assert_dispatched()
    assert {event.shape for event in dots()} == {(16, 32), (32, 16)}
    assert_same(y, model.apply(plain, x))


def test_weights_closed_over_and_in_a_block(key):
    model, x = hk.without_apply_rng(hk.transform(mlp)), jax.random.normal(key, (4, 16))
    quantized, plain = twins(model.init(jax.random.key(0), x))
    closed = implicit(lambda x: model.apply(quantized, x))(x)
    with implicit:
        inside = model.apply(quantized, x)
    assert_dispatched()
    expected = model.apply(plain, x)
    assert_same(closed, expected)
    assert_same(inside, expected)


def test_transform_inside(key):
    """The whole life of a model under `implicit`: transformed, initialized and applied."""
    x = jax.random.normal(key, (4, 16))

    def create_and_run(x: jax.Array) -> Any:
        model = hk.without_apply_rng(hk.transform(mlp))
        params = model.init(jax.random.key(0), x)
        return params, model.apply(params, x)

    assert_same(implicit(create_and_run)(x), create_and_run(x))


def test_embedding_attention_and_remat(wrap, key):
    model = hk.without_apply_rng(hk.transform(attention_model))
    tokens = jax.random.randint(key, (2, 6), 0, 24)
    quantized, plain = twins(model.init(jax.random.key(0), tokens))
    y = wrap(model.apply)(quantized, tokens)
    assert {event.shape for event in dots()} >= {(16, 16), (16, 32), (32, 16)}
    assert_same(y, model.apply(plain, tokens))


def test_convolution_with_state(wrap, key):
    model = hk.without_apply_rng(hk.transform_with_state(convolution))
    x = jax.random.normal(key, (2, 5, 5, 8))
    params, state = model.init(jax.random.key(0), x)
    quantized, plain = twins(params)
    (y, found), (expected, expected_state) = wrap(model.apply)(quantized, state, x), model.apply(plain, state, x)
    assert_same(y, expected)
    assert_same(found, expected_state)


def test_stack_of_layers(wrap, key):
    model, x = hk.without_apply_rng(hk.transform(stacked)), jax.random.normal(key, (4, 16))
    quantized, plain = twins(model.init(jax.random.key(0), x))
    y = wrap(model.apply)(quantized, x)
    assert dots()
    assert_no_stack(LAYERS)
    assert_same(y, model.apply(plain, x))


@pytest.mark.parametrize("order", ["implicit(grad)", "grad(implicit)"])
def test_gradient_of_dense_parameters_and_input(order, key):
    model, x = hk.without_apply_rng(hk.transform(mlp)), jax.random.normal(key, (4, 16))
    quantized, plain = twins(model.init(jax.random.key(0), x))
    is_matrix = lambda module, name, value: name == "w"  # noqa: E731

    def loss(trained: Any, frozen: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(model.apply(hk.data_structures.merge(trained, frozen), x) ** 2)

    frozen, trained = hk.data_structures.partition(is_matrix, quantized)
    frozen_plain, _ = hk.data_structures.partition(is_matrix, plain)
    gradient = lambda f: jax.grad(f, argnums=(0, 2))  # noqa: E731
    found = (implicit(gradient(loss)) if order == "implicit(grad)" else gradient(implicit(loss)))(trained, frozen, x)
    assert_dispatched()
    DIARY.clear()
    assert_same(found, gradient(loss)(trained, frozen_plain, x))
    assert not DIARY
