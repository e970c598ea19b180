"""Flax Linen models with quantized weights equal the same models on the dense weights those stand for."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.core import freeze
from flax.training.train_state import TrainState

from eformer.errors import ForgottenImplicitError
from eformer.integrations import linen
from eformer.jaximus import explain, implicit, materialization_policy
from eformer.ops.quantization import add_lora, dequantize_tree, merge, split_trainable

from .compare import close


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> Any:
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(h)
        h = nn.Dense(48)(nn.LayerNorm()(x))
        return x + nn.Dense(32)(nn.gelu(h)), None


class Model(nn.Module):
    """Embedding read both ways, three layers scanned and rematerialized, a convolution with batch statistics."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(40, 32)
        x = embed(tokens)
        axes, rngs = {"params": 0}, {"params": True}
        x, _ = nn.scan(nn.remat(Block), variable_axes=axes, split_rngs=rngs, length=3)()(x, None)
        x = nn.BatchNorm(use_running_average=True)(nn.Conv(32, (3,))(x))
        return embed.attend(x)


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scanned = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return nn.DenseGeneral((2, 8), dtype=x.dtype)(scanned()(x, None)[0])


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> Any:
        return x + nn.Dense(32)(nn.relu(nn.LayerNorm()(nn.Dense(48)(x)))), None


def loss_of(model: nn.Module, apply: Any) -> Any:
    def loss(trainable: Any, frozen: Any, rest: Any, x: Any) -> jax.Array:
        return jnp.mean(apply({"params": merge(trainable, frozen), **rest}, x) ** 2)

    return loss


def test_whole_model(key: jax.Array):
    model, tokens = Model(), jax.random.randint(key, (2, 6), 0, 40)
    options = {"min_size": 0, "skip": ("norms", "biases", "convolutions")}
    variables = linen.quantize(model.init(jax.random.key(0), tokens), {"*embed*": "int8"}, **options)
    assert sorted(variables) == ["batch_stats", "params"]
    rest = {"batch_stats": variables["batch_stats"]}
    dense = dequantize_tree(variables)
    with materialization_policy("error"):
        close(jax.jit(linen.apply_fn(model))(variables, tokens), model.apply(dense, tokens))
    trainable, frozen = split_trainable(variables["params"], also="*")
    plain = split_trainable(dense["params"], also="*")[0]
    kept = {name: value for name, value in plain.items() if name in trainable}
    assert len(kept) == 14 == len(trainable)
    with materialization_policy("error"):
        found = jax.jit(jax.grad(loss_of(model, linen.apply_fn(model))))(trainable, frozen, rest, tokens)
    close(found, dense_gradient(model, dense, kept, rest, tokens))


def dense_gradient(model: nn.Module, dense: Any, kept: Any, rest: Any, x: Any) -> Any:
    everything, frozen = split_trainable(dense["params"], also="*")
    f = lambda kept: loss_of(model, model.apply)({**everything, **kept}, frozen, rest, x)  # noqa: E731
    return jax.grad(f)(kept)


def test_dense_layers_are_never_made_dense(key: jax.Array):
    """Forward, gradients of the input and of dense parameters, adapters too; a Linen TrainState on top."""
    model, x = Dense(), jax.random.normal(key, (4, 32))
    variables = freeze(linen.quantize(model.init(jax.random.key(0), x), min_size=0))
    params = add_lora(variables["params"], "*Dense_1*", 2, jax.random.key(1))
    trainable, frozen = split_trainable(params, also="*")
    assert sum(name.endswith(("/a", "/b")) for name in trainable) == 2
    apply = linen.apply_fn(model)

    def loss(trainable: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(apply({"params": merge(trainable, frozen)}, x) ** 2)

    with materialization_policy("error"):
        value, (found, wrt_x) = jax.jit(jax.value_and_grad(loss, (0, 1)))(trainable, x)
    plain = dequantize_tree(params)
    close((value, wrt_x), jax.value_and_grad(lambda x: jnp.mean(model.apply({"params": plain}, x) ** 2))(x))
    state = TrainState.create(apply_fn=apply, params=trainable, tx=optax.sgd(0.1))
    better = state.apply_gradients(grads=found)
    assert loss(better.params, x) < value


def test_what_is_told():
    model, x = nn.Dense(64), jnp.ones((2, 64))
    variables = linen.quantize(model.init(jax.random.key(0), x))
    assert not explain(linen.apply_fn(model))(variables, x).materializations
    assert explain(lambda v, x: implicit(model.apply)(v, x))(variables, x).kernels
    expected = linen.apply_fn(model)(variables, x)
    close(implicit(lambda v, x: model.apply(v, x))(variables, x), expected)
    close(implicit(jax.jit(model.apply))(variables, x), expected)
    close(implicit(lambda x: linen.apply_fn(model)(variables, x))(x), expected)
    for bare in (model.apply, jax.jit(model.apply), lambda v, x: implicit(lambda x: model.apply(v, x))(x)):
        with pytest.raises(ForgottenImplicitError, match=r"implicit\(model.apply\)\(variables, x\)"):
            bare(variables, x)
    assert type(linen.quantize(freeze(model.init(jax.random.key(0), x)))).__name__ == "FrozenDict"
    with pytest.raises(ValueError, match=r'"params" collection, got \[\'kernel\'\]'):
        linen.quantize({"kernel": jnp.ones((64, 64))})
