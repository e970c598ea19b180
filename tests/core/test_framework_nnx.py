"""Flax NNX models whose matrices are implicit arrays: same numbers, handlers hit, modules and their state unharmed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from eformer.jaximus import implicit, materialize

from .toys import DIARY, Block8, assert_dispatched, assert_no_stack, assert_same, dots

LAYERS = 3


class MLP(nnx.Module):
    """Two matrices, a norm, and a counter that every call advances."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] = self.calls[...] + 1
        return self.down(nnx.gelu(self.norm(self.up(x))))


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.q, self.k, self.v, self.o = (nnx.Linear(16, 16, use_bias=False, rngs=rngs) for _ in range(4))

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.norm(x)
        heads = [f(h).reshape(*h.shape[:-1], 2, 8) for f in (self.q, self.k, self.v)]
        return x + self.o(nnx.dot_product_attention(*heads).reshape(x.shape))


class LanguageModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(24, 16, rngs=rngs)
        self.attention = Attention(rngs)
        self.mlp = MLP(rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.embed.attend(self.mlp(self.attention(self.embed(tokens))))


class Convolution(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(8, 16, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.conv(x))


def quantized(model: Any) -> Any:
    """A copy whose matrices (and stacks of them) are implicit."""
    graph, state = nnx.split(model)

    def quantize(path: Any, leaf: jax.Array) -> Any:
        matrix = any(getattr(k, "key", None) in ("kernel", "embedding") for k in path)
        return Block8.quantize(leaf) if matrix else leaf

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(quantize, state))


def twins(model: Any) -> tuple[Any, Any]:
    """The same weights twice: implicit, and as the dense arrays they stand for."""
    implicit_model = quantized(model)
    graph, state = nnx.split(implicit_model)
    is_leaf = lambda x: isinstance(x, Block8)  # noqa: E731
    dense_model = nnx.merge(graph, jax.tree.map(materialize, state, is_leaf=is_leaf))
    DIARY.clear()
    return implicit_model, dense_model


def call(model: Any, x: jax.Array) -> jax.Array:
    return model(x)


def in_block(f: Any) -> Any:
    def run(model: Any, x: jax.Array) -> jax.Array:
        with implicit:
            return f(model, x)

    return run


# Each takes a fresh function, so that nothing traced for another test is reused and handlers are met again.
WAYS = {
    "argument": implicit,
    "closure": lambda f: lambda model, x: implicit(lambda x: f(model, x))(x),
    "the module itself": lambda f: lambda model, x: implicit(model)(x),
    "block": in_block,
    "implicit(nnx.jit)": lambda f: implicit(nnx.jit(f)),
    "nnx.jit(implicit)": lambda f: nnx.jit(implicit(f)),
    "nnx.jit in a block": lambda f: in_block(nnx.jit(f)),
    "remat": lambda f: implicit(nnx.remat(f)),
    "split and merge": lambda f: implicit(lambda model, x: f(nnx.merge(*nnx.split(model)), x)),
}
KEEP_STATE = [way for way in WAYS if way != "split and merge"]


def run(way: str, model: Any, x: jax.Array) -> jax.Array:
    return WAYS[way](lambda model, x: model(x))(model, x)


@pytest.mark.parametrize("way", WAYS)
def test_mlp(way, key):
    model, dense = twins(MLP(nnx.Rngs(0)))
    x = jax.random.normal(key, (4, 16))
    assert_same(run(way, model, x), dense(x))
    assert_dispatched()
    assert len(dots()) >= 2


@pytest.mark.parametrize("way", KEEP_STATE)
def test_state_updates_reach_the_caller(way):
    model, _ = twins(MLP(nnx.Rngs(0)))
    up = model.up
    for expected in (1, 2):
        run(way, model, jnp.ones((2, 16)))
        assert int(model.calls[...]) == expected
    assert model.up is up
    assert type(model.up.kernel[...]) is Block8


@pytest.mark.parametrize("way", ["argument", "block", "nnx.jit(implicit)", "implicit(nnx.jit)"])
def test_batch_statistics_are_updated(way, key):
    model, dense = twins(Convolution(nnx.Rngs(0)))
    x = jax.random.normal(key, (2, 5, 5, 8))
    assert_same(run(way, model, x), dense(x))
    assert_same(model.norm.mean[...], dense.norm.mean[...])
    assert float(jnp.abs(model.norm.mean[...]).max()) > 0


@pytest.mark.parametrize("way", ["argument", "implicit(nnx.jit)", "nnx.jit(implicit)"])
def test_language_model(way, key):
    model, dense = twins(LanguageModel(nnx.Rngs(1)))
    tokens = jax.random.randint(key, (2, 6), 0, 24)
    assert_same(run(way, model, tokens), dense(tokens))
    assert {event.shape for event in dots()} >= {(16, 16), (16, 32), (32, 16)}


def test_multi_head_attention(key):
    """Its kernels have three axes, which the toy's handler declines: dense, and equal."""
    attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0))
    model, dense = twins(attention)
    x = jax.random.normal(key, (2, 5, 16))
    assert_same(implicit(call)(model, x), dense(x))


def loss(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


GRADIENTS = {
    "implicit(nnx.grad)": lambda wrt: implicit(nnx.grad(loss, argnums=wrt)),
    "nnx.grad(implicit)": lambda wrt: nnx.grad(implicit(loss), argnums=wrt),
    "nnx.jit(nnx.grad(implicit))": lambda wrt: nnx.jit(nnx.grad(implicit(loss), argnums=wrt)),
    "implicit(nnx.jit(nnx.grad))": lambda wrt: implicit(nnx.jit(nnx.grad(loss, argnums=wrt))),
}


@pytest.mark.parametrize("order", GRADIENTS)
def test_gradient_of_dense_parameters_and_input(order, key):
    model, dense = twins(MLP(nnx.Rngs(0)))
    x = jax.random.normal(key, (4, 16))
    quantized_paths = {("up", "kernel"), ("down", "kernel")}
    by_path = lambda path, v: isinstance(v, nnx.Param) and tuple(path) not in quantized_paths  # noqa: E731
    expected = nnx.grad(loss, argnums=(nnx.DiffState(0, by_path), 1))(dense, x)
    DIARY.clear()
    found = GRADIENTS[order]((nnx.DiffState(0, by_path), 1))(model, x)
    assert_same(jax.tree.leaves(found), jax.tree.leaves(expected))
    assert len(jax.tree.leaves(found)) == 5  # two biases, scale and bias of the norm, the input
    assert_dispatched()


def stack(model_class: Any = MLP) -> Any:
    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap
    def create(rngs: nnx.Rngs) -> Any:
        return model_class(rngs)

    return create(nnx.Rngs(2))


def through_layers(layers: Any, x: jax.Array) -> jax.Array:
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def body(x: jax.Array, layer: Any) -> jax.Array:
        return x + layer(x)

    return body(x, layers)


@pytest.mark.parametrize(
    "wrap",
    [implicit, lambda f: nnx.jit(implicit(f)), lambda f: implicit(nnx.jit(f))],
    ids=["eager", "jit outside", "jit inside"],
)
def test_scan_over_layers(wrap, key):
    layers, dense = twins(stack())
    x = jax.random.normal(key, (4, 16))
    assert layers.up.kernel[...].shape == (LAYERS, 16, 32)
    expected = through_layers(dense, x)
    DIARY.clear()
    assert_same(wrap(through_layers)(layers, x), expected)
    assert dots()
    assert_no_stack(LAYERS)
    np.testing.assert_array_equal(layers.calls[...], np.ones(LAYERS))


def test_vmap_over_an_ensemble(key):
    members, dense = twins(stack())
    x = jax.random.normal(key, (4, 16))
    ensemble = nnx.vmap(call, in_axes=(0, None))
    expected = ensemble(dense, x)
    DIARY.clear()
    assert_same(implicit(ensemble)(members, x), expected)
    assert dots()
    assert_no_stack(LAYERS)


def test_module_as_result():
    model, _ = twins(MLP(nnx.Rngs(0)))
    result = implicit(lambda m: m)(model)
    assert jax.tree.structure(nnx.state(result)) == jax.tree.structure(nnx.state(model))
    assert type(result.up.kernel[...]) is Block8
    assert_same(result.up.kernel[...], model.up.kernel[...])


def test_dropout_draws_new_numbers_on_every_call():
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    drop = implicit(call)
    first, second = drop(model, jnp.ones(64)), drop(model, jnp.ones(64))
    assert not np.array_equal(first, second)
