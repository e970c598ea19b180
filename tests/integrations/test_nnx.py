"""Flax NNX models with quantized weights equal the same models on the dense weights those stand for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from eformer.integrations.nnx import Dispatching, trainable
from eformer.jaximus import implicit, materialization_policy
from eformer.ops.quantization import (
    ArrayNF4,
    LoraArray,
    add_lora,
    dequantize_tree,
    merge,
    merge_lora,
    quantize_tree,
    split_trainable,
)

from .compare import close


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(32, 48, rngs=rngs)
        self.norm = nnx.LayerNorm(48, rngs=rngs)
        self.down = nnx.Linear(48, 32, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.relu(self.norm(self.up(x))))


class Model(nnx.Module):
    """Embedding read both ways, attention with heads as an axis, layers scanned and rematerialized, a counter."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(40, 32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 32, decode=False, rngs=rngs)
        self.layers = stack(rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        self.calls[...] = self.calls[...] + 1
        x = self.embed(tokens)
        return self.embed.attend(through(self.layers, x + self.attention(x)))


def stack(rngs: nnx.Rngs) -> Mlp:
    return nnx.split_rngs(splits=3)(nnx.vmap(Mlp))(rngs)


def through(layers: Mlp, x: jax.Array) -> jax.Array:
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    @nnx.remat
    def body(x: jax.Array, layer: Mlp) -> jax.Array:
        return layer(x)

    return body(x, layers)


def loss(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def gradient(f: Any, model: Any, wrt: Any) -> Any:
    return nnx.grad(f, argnums=nnx.DiffState(0, wrt))(model, jnp.zeros((2, 6), int))


def test_whole_model(key: jax.Array):
    model = quantize_tree(Model(nnx.Rngs(0)), {"embed*": "int8"}, min_size=0)
    dense = dequantize_tree(model)
    tokens = jax.random.randint(key, (2, 6), 0, 40)
    with materialization_policy("error"):
        close(nnx.jit(lambda m, t: m(t))(Dispatching(model), tokens), dense(tokens))
    assert int(model.calls[...]) == int(dense.calls[...]) == 1
    with materialization_policy("error"):
        found = nnx.jit(lambda m: gradient(implicit(loss), m, trainable))(model)
    same = {path for path, _ in nnx.to_flat_state(found)}
    assert len(same) == 8  # biases and norms
    expected = gradient(loss, dense, lambda path, v: isinstance(v, nnx.Param) and tuple(path) in same)
    close(jax.tree.leaves(found), jax.tree.leaves(expected))


def test_dense_layers_are_never_made_dense(key: jax.Array):
    """Forward, gradients of the input and of dense parameters, an optimizer that leaves the codes alone."""
    model = quantize_tree(stack(nnx.Rngs(1)), "ternary", min_size=0)
    dense = dequantize_tree(model)
    x = jax.random.normal(key, (4, 32))
    codes = jax.tree.leaves(model.up.kernel[...])
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=trainable)

    def run(layers: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(through(layers, x) ** 2)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: jax.Array) -> Any:
        value, (grads, wrt_x) = nnx.value_and_grad(implicit(run), argnums=(nnx.DiffState(0, trainable), 1))(model, x)
        optimizer.update(model, grads)
        return value, wrt_x

    with materialization_policy("error"):
        first, wrt_x = step(model, optimizer, x)
        second, _ = step(model, optimizer, x)
    close((first, wrt_x), nnx.value_and_grad(run, argnums=1)(dense, x))
    assert second < first
    close(jax.tree.leaves(model.up.kernel[...]), codes, tol=0.0)


def test_adapters_in_a_module(key: jax.Array):
    model = add_lora(quantize_tree(Mlp(nnx.Rngs(0)), min_size=0), "*", 2, jax.random.key(0))
    assert isinstance(model.up.kernel[...], LoraArray)
    assert isinstance(model.up.kernel[...].w, ArrayNF4)
    x = jax.random.normal(key, (4, 32))
    factors, frozen = split_trainable(model)
    factors = {name: value + 0.1 for name, value in factors.items()}
    with materialization_policy("error"):
        value, grads = jax.value_and_grad(lambda f: implicit(loss)(merge(f, frozen), x))(factors)
    dense = dequantize_tree(merge(factors, frozen))
    close(value, loss(dense, x))
    wrt_kernel = nnx.grad(loss)(dense, x).up.kernel[...]
    close(grads["up/kernel/b"], factors["up/kernel/a"].T @ wrt_kernel)


@pytest.mark.parametrize("base", ["nf4", None])
def test_the_filter_trains_adapters_as_split_trainable_does(base, key: jax.Array):
    keys = jax.random.split(key, 3)
    quantized = quantize_tree(Mlp(nnx.Rngs(0)), default=base, min_size=0)
    x, target = jax.random.normal(keys[0], (8, 32)), jax.random.normal(keys[1], (8, 32))
    tx = optax.adam(1e-2)

    @implicit
    def error(model: Any) -> jax.Array:
        return jnp.mean((model(x) - target) ** 2)

    factors, frozen = split_trainable(add_lora(quantized, "*", 2, keys[2]), also=["*bias", "*scale"])
    state = tx.init(factors)
    model = add_lora(quantized, "*", 2, keys[2])
    weights = jax.tree.leaves(model.up.kernel[...].w)
    optimizer = nnx.Optimizer(model, tx, wrt=trainable)
    seen = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, trainable))}
    assert seen == set(factors)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> jax.Array:
        value, grads = nnx.value_and_grad(error, argnums=nnx.DiffState(0, trainable))(model)
        optimizer.update(model, grads)
        return value

    with materialization_policy("error"):
        for _ in range(4):
            wanted, grads = jax.value_and_grad(lambda f: error(merge(f, frozen)))(factors)
            updates, state = tx.update(grads, state)
            factors = optax.apply_updates(factors, updates)
            close(step(model, optimizer), wanted)
    assert wanted > error(model)
    adapter = model.down.kernel[...]
    assert isinstance(adapter, LoraArray)
    assert float(jnp.abs(adapter.b).max()) > 1e-3
    close((adapter.a, adapter.b), (factors["down/kernel/a"], factors["down/kernel/b"]))
    close(jax.tree.leaves(model.up.kernel[...].w), weights, tol=0.0)
    merged, _ = merge_lora(model, "dense")
    assert isinstance(merged.up.kernel, nnx.Param)
    close(error(merged), error(model))


def test_the_filter():
    model = quantize_tree(Mlp(nnx.Rngs(0)), min_size=0)
    names = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, trainable))}
    assert names == {"up/bias", "down/bias", "norm/scale", "norm/bias"}
