"""Equinox modules whose matrices are implicit arrays."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from eformer.jaximus import ImplicitArray, implicit, leaf_predicate, tree_map_with_implicit

from .toys import Block8, assert_dispatched, assert_no_stack, assert_same, dense, dots, forget

LAYERS = 3


class MLP(eqx.Module):
    up: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    down: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        k1, k2 = jax.random.split(key)
        self.up, self.down = eqx.nn.Linear(16, 32, key=k1), eqx.nn.Linear(32, 16, key=k2)
        self.norm = eqx.nn.LayerNorm(32)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.relu(self.norm(self.up(x))))


class Model(eqx.Module):
    embed: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    mlp: MLP

    def __init__(self, key: jax.Array):
        k1, k2, k3 = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(24, 16, key=k1)
        self.attention = eqx.nn.MultiheadAttention(2, 16, key=k2)
        self.mlp = MLP(k3)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = jax.vmap(self.embed)(tokens)
        x = x + self.attention(x, x, x)
        return jax.vmap(eqx.filter_checkpoint(self.mlp))(x)


def twins(model: Any) -> tuple[Any, Any]:
    def quantize(path: Any, leaf: Any) -> Any:
        matrix = eqx.is_array(leaf) and path[-1].name == "weight" and leaf.ndim >= 2
        return Block8.quantize(leaf) if matrix and leaf.shape[-2] % 8 == 0 else leaf

    quantized = jax.tree_util.tree_map_with_path(quantize, model)
    plain = tree_map_with_implicit(lambda leaf: jnp.asarray(dense(leaf)) if leaf_predicate(leaf) else leaf, quantized)
    forget()  # `weight @ x` is a jitted jnp.matmul, which would be remembered
    return quantized, plain


def call(model: Any, x: jax.Array) -> jax.Array:
    return model(x)


WAYS = {
    "argument": implicit(call),
    "closure": lambda model, x: implicit(lambda x: model(x))(x),
    "the module itself": lambda model, x: implicit(model)(x),
    "filter_jit(implicit)": eqx.filter_jit(implicit(call)),
    "implicit(filter_jit)": implicit(eqx.filter_jit(call)),
    "no wrapper": call,
}


@pytest.mark.parametrize("way", WAYS)
def test_mlp(way, key):
    model, plain = twins(MLP(jax.random.key(0)))
    x = jax.random.normal(key, (16,))
    y = WAYS[way](model, x)
    assert_dispatched()
    assert {event.shape for event in dots()} == {(16, 32), (32, 16)}
    assert_same(y, plain(x))


@pytest.mark.parametrize("way", ["argument", "filter_jit(implicit)", "implicit(filter_jit)"])
def test_embedding_attention_and_remat(way, key):
    model, plain = twins(Model(jax.random.key(0)))
    tokens = jax.random.randint(key, (6,), 0, 24)
    y = WAYS[way](model, tokens)
    assert {event.shape for event in dots()} >= {(16, 16), (16, 32), (32, 16)}
    assert_same(y, plain(tokens))


def test_convolution(key):
    model, plain = twins(eqx.nn.Conv1d(8, 16, 3, key=jax.random.key(0)))
    x = jax.random.normal(key, (8, 10))
    assert isinstance(model.weight, ImplicitArray)
    assert_same(implicit(call)(model, x), plain(x))


def test_batch_norm_state(key):
    """Equinox threads state explicitly; its markers are compared by identity and must survive."""
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(16, "batch", mode="ema")
    linear, plain = twins(eqx.nn.Linear(16, 16, key=jax.random.key(0)))

    def run(linear: Any, state: Any, x: jax.Array) -> Any:
        step = lambda x, state: norm(linear(x), state)  # noqa: E731
        return jax.vmap(step, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)

    x = jax.random.normal(key, (5, 16))
    y, found = implicit(run)(linear, state, x)
    assert dots()
    expected, expected_state = run(plain, state, x)
    assert_same(y, expected)
    assert_same(jax.tree.leaves(found), jax.tree.leaves(expected_state))


GRADIENTS = {
    "implicit(filter_grad)": lambda f: implicit(eqx.filter_grad(f)),
    "filter_grad(implicit)": lambda f: eqx.filter_grad(implicit(f)),
    "filter_jit(filter_grad(implicit))": lambda f: eqx.filter_jit(eqx.filter_grad(implicit(f))),
}


@pytest.mark.parametrize("order", GRADIENTS)
def test_gradient_of_dense_parameters_and_input(order, key):
    model, plain = twins(MLP(jax.random.key(0)))
    x = jax.random.normal(key, (16,))
    mask = tree_map_with_implicit(lambda leaf: not leaf_predicate(leaf) and eqx.is_inexact_array(leaf), model)

    def loss(pair: Any, frozen: Any) -> jax.Array:
        model, x = pair
        return jnp.mean(eqx.combine(model, frozen, is_leaf=leaf_predicate)(x) ** 2)

    diff, frozen = eqx.partition(model, mask, is_leaf=leaf_predicate)
    diff_plain, frozen_plain = eqx.partition(plain, mask)
    found = GRADIENTS[order](loss)((diff, x), frozen)
    assert_dispatched()
    assert_same(found, eqx.filter_grad(loss)((diff_plain, x), frozen_plain))
    assert len(jax.tree.leaves(found)) == 5  # two biases, weight and bias of the norm, the input


@pytest.mark.parametrize("way", ["eager", "filter_jit outside", "filter_jit inside"])
def test_scan_over_layers(way, key):
    layers, plain = twins(eqx.filter_vmap(MLP)(jax.random.split(jax.random.key(0), LAYERS)))
    x = jax.random.normal(key, (16,))

    def run(layers: Any, x: jax.Array) -> jax.Array:
        arrays, static = eqx.partition(layers, eqx.is_array)
        body = lambda x, layer: (x + eqx.combine(layer, static)(x), None)  # noqa: E731
        return jax.lax.scan(body, x, arrays)[0]

    wrapped = {
        "eager": implicit(run),
        "filter_jit outside": eqx.filter_jit(implicit(run)),
        "filter_jit inside": implicit(eqx.filter_jit(run)),
    }[way]
    y = wrapped(layers, x)
    assert dots()
    assert_no_stack(LAYERS)
    assert_same(y, run(plain, x))


def test_ensemble_with_filter_vmap(key):
    members, plain = twins(eqx.filter_vmap(MLP)(jax.random.split(jax.random.key(0), LAYERS)))
    x = jax.random.normal(key, (16,))
    ensemble = eqx.filter_vmap(call, in_axes=(eqx.if_array(0), None))
    y = implicit(ensemble)(members, x)
    assert dots()
    assert_no_stack(LAYERS)
    assert_same(y, ensemble(plain, x))


def test_module_as_result_and_update_inside():
    model, _ = twins(MLP(jax.random.key(0)))
    returned = implicit(lambda m: m)(model)
    assert jax.tree.structure(returned) == jax.tree.structure(model)
    assert_same(returned.up.weight, model.up.weight)

    zero = jnp.zeros(32)
    updated = implicit(lambda m: eqx.tree_at(lambda m: m.up.bias, m, zero))(model)
    assert isinstance(updated, MLP)
    assert isinstance(updated.up.weight, Block8)
    assert_same(updated.up.bias, zero)
