"""Equinox models with quantized weights equal the same models on the dense weights those stand for."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from eformer.integrations.equinox import Dispatching, combine, filter_grad, filter_value_and_grad, partition
from eformer.jaximus import implicit, materialization_policy
from eformer.ops.quantization import LoraArray, add_lora, dequantize_tree, quantize_tree, split_trainable

from .compare import close


class Mlp(eqx.Module):
    up: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    down: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        k1, k2 = jax.random.split(key)
        self.up, self.down = eqx.nn.Linear(32, 48, key=k1), eqx.nn.Linear(48, 32, key=k2)
        self.norm = eqx.nn.LayerNorm(48)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.relu(self.norm(self.up(x))))


class Model(eqx.Module):
    """Embedding, attention, layers scanned and rematerialized."""

    embed: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    layers: Mlp

    def __init__(self, key: jax.Array):
        k1, k2, k3 = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(40, 32, key=k1)
        self.attention = eqx.nn.MultiheadAttention(2, 32, key=k2)
        self.layers = eqx.filter_vmap(Mlp)(jax.random.split(k3, 3))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = jax.vmap(self.embed)(tokens)
        return through(self.layers, x + self.attention(x, x, x))


def through(layers: Mlp, x: jax.Array) -> jax.Array:
    arrays, static = eqx.partition(layers, eqx.is_array)
    body = eqx.filter_checkpoint(lambda x, layer: (jax.vmap(eqx.combine(layer, static))(x), None))
    return jax.lax.scan(body, x, arrays)[0]


def loss(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def test_whole_model(key: jax.Array):
    model = quantize_tree(Model(jax.random.key(0)), {"embed*": "int8"}, min_size=0)
    dense = dequantize_tree(model)
    tokens = jax.random.randint(key, (6,), 0, 40)
    with materialization_policy("error"):
        close(eqx.filter_jit(Dispatching(model))(tokens), dense(tokens))
        found = eqx.filter_jit(filter_grad(loss))(model, tokens)
    assert len(jax.tree.leaves(found)) == 4  # two biases, weight and bias of the norm
    assert found.layers.up.weight is None
    expected = eqx.filter_grad(loss)(dense, tokens)
    close(
        (found.layers.up.bias, found.layers.norm, found.layers.down.bias),
        (expected.layers.up.bias, expected.layers.norm, expected.layers.down.bias),
    )


def test_dense_layers_are_never_made_dense(key: jax.Array):
    """Forward, gradients of input, dense parameters and adapters; training leaves the codes alone."""
    model = add_lora(quantize_tree(Mlp(jax.random.key(0)), "int8", min_size=0), "up*", 2, jax.random.key(1))
    xs = jax.random.normal(key, (4, 32))
    optimizer = optax.sgd(0.1)

    def batch_loss(model: Any, xs: jax.Array) -> jax.Array:
        return jnp.mean(jax.vmap(model)(xs) ** 2)

    @eqx.filter_jit
    def step(model: Any, state: Any, xs: jax.Array) -> Any:
        value, grads = filter_value_and_grad(batch_loss)(model, xs)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(model, updates), state, value

    with materialization_policy("error"):
        wrt_x = jax.grad(implicit(lambda xs: batch_loss(model, xs)))(xs)
        trained, state, first = step(model, optimizer.init(partition(model)[0]), xs)
        for _ in range(3):
            trained, state, last = step(trained, state, xs)
    dense = dequantize_tree(model)
    close((first, wrt_x), (batch_loss(dense, xs), jax.grad(lambda xs: batch_loss(dense, xs))(xs)))
    assert last < first
    close(jax.tree.leaves(trained.up.weight.w), jax.tree.leaves(model.up.weight.w), tol=0.0)
    assert jnp.any(trained.up.weight.a != model.up.weight.a)


def test_an_adapter_on_an_adapter_leaves_both_below_alone(key: jax.Array):
    """What is trained is what `split_trainable` trains; weight decay moves nothing else."""
    model = add_lora(Mlp(jax.random.key(0)), "up*", 2, jax.random.key(1))
    inner = model.up.weight
    model = eqx.tree_at(lambda m: m.up.weight, model, LoraArray(inner, inner.a + 1, inner.b + 1))
    trained, rest = partition(model)
    expected = split_trainable(model, also="*")[0]
    assert sorted(x.shape for x in jax.tree.leaves(trained)) == sorted(x.shape for x in expected.values())
    for parts in ((trained, rest), (rest, trained)):
        assert jax.tree.structure(combine(*parts)) == jax.tree.structure(model)
    optimizer = optax.adamw(0.1, weight_decay=0.5)
    grads = filter_grad(loss)(model, jax.random.normal(key, (32,)))
    updates, _ = optimizer.update(grads, optimizer.init(trained), trained)
    after = eqx.apply_updates(model, updates).up.weight
    close(jax.tree.leaves(after.w), jax.tree.leaves(inner), tol=0.0)
    assert jnp.all(after.a != model.up.weight.a)


def test_partition():
    model = add_lora(quantize_tree(Mlp(jax.random.key(0)), min_size=0), "up*", 2, jax.random.key(1))
    trained, rest = partition(model)
    assert len(jax.tree.leaves(trained)) == 6  # four vectors and two factors
    assert "w=None" in repr(trained.up.weight)
    again = combine(trained, rest)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    dense = add_lora(Mlp(jax.random.key(0)), "up*", 2, jax.random.key(1))
    assert partition(dense)[0].up.weight.w is None  # the base of an adapter is frozen, dense or not
    weight = dense.up.weight
    shared = eqx.tree_at(lambda m: m.down.weight, dense, weight.w)  # the base of one, and trained in another place
    assert partition(shared)[0].down.weight is weight.w

    def with_aux(model: Any, x: jax.Array) -> Any:
        return loss(model, x), x.shape

    x = jnp.ones(32)
    (value, aux), grads = filter_value_and_grad(with_aux, has_aux=True)(model, x)
    assert aux == (32,)
    close(value, loss(dequantize_tree(model), x))
    assert filter_grad(with_aux, has_aux=True)(model, x)[1] == (32,)
    assert jax.tree.structure(grads) == jax.tree.structure(trained)
