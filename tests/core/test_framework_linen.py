"""Flax Linen models whose matrices are implicit arrays."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from eformer.jaximus import implicit, tree_map_with_implicit

from .toys import DIARY, Block8, assert_dispatched, assert_no_stack, assert_same, dense, dots

LAYERS = 3


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.LayerNorm()(nn.Dense(32)(x))
        return nn.Dense(16)(nn.relu(h))


class Model(nn.Module):
    """Embedding, attention, MLP; the embedding is read both ways."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(24, 16)
        x = embed(tokens)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
        return embed.attend(x + nn.remat(MLP)()(x))


class Convolution(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.BatchNorm(use_running_average=False)(nn.Conv(16, (3, 3))(x))


class Step(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        return x + MLP()(x), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = nn.scan(Step, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        return layers()(x, None)[0]


def twins(variables: Any) -> tuple[Any, Any]:
    """The variables with implicit matrices, and with the dense arrays they stand for."""

    def quantize(path: Any, leaf: jax.Array) -> Any:
        return Block8.quantize(leaf) if path[-1].key in ("kernel", "embedding") and leaf.shape[-2] % 8 == 0 else leaf

    quantized = jax.tree_util.tree_map_with_path(quantize, variables)
    plain = tree_map_with_implicit(lambda leaf: jnp.asarray(dense(leaf)), quantized)
    DIARY.clear()
    return quantized, plain


def test_mlp(wrap, key):
    model, x = MLP(), jax.random.normal(key, (4, 16))
    quantized, plain = twins(model.init(jax.random.key(0), x))
    assert_same(wrap(lambda v, x: model.apply(v, x))(quantized, x), model.apply(plain, x))
    assert_dispatched()
    assert {event.shape for event in dots()} == {(16, 32), (32, 16)}


def test_weights_closed_over(key):
    model, x = MLP(), jax.random.normal(key, (4, 16))
    quantized, plain = twins(model.init(jax.random.key(0), x))
    assert_same(implicit(lambda x: model.apply(quantized, x))(x), model.apply(plain, x))
    assert_dispatched()


def test_bound_module_in_a_block(key):
    model, x = MLP(), jax.random.normal(key, (4, 16))
    quantized, plain = twins(model.init(jax.random.key(0), x))
    with implicit:
        y = model.bind(quantized)(x)
    assert_same(y, model.apply(plain, x))
    assert_dispatched()


def test_embedding_attention_and_remat(wrap, key):
    model, tokens = Model(), jax.random.randint(key, (2, 6), 0, 24)
    quantized, plain = twins(model.init(jax.random.key(0), tokens))
    assert_same(wrap(lambda v, t: model.apply(v, t))(quantized, tokens), model.apply(plain, tokens))
    assert {event.shape for event in dots()} >= {(16, 32), (32, 16)}


def test_convolution_and_mutable_state(wrap, key):
    model, x = Convolution(), jax.random.normal(key, (2, 5, 5, 8))
    quantized, plain = twins(model.init(jax.random.key(0), x))
    run = lambda v, x: model.apply(v, x, mutable=["batch_stats"])  # noqa: E731
    (y, updates), (expected, expected_updates) = wrap(run)(quantized, x), run(plain, x)
    assert_same(y, expected)
    assert_same(updates, expected_updates)
    assert float(jnp.abs(updates["batch_stats"]["BatchNorm_0"]["mean"]).max()) > 0


def test_scan_over_layers(wrap, key):
    model, x = Stack(), jax.random.normal(key, (4, 16))
    quantized, plain = twins(model.init(jax.random.key(0), x))
    assert_same(wrap(lambda v, x: model.apply(v, x))(quantized, x), model.apply(plain, x))
    assert dots()
    assert_no_stack(LAYERS)


@pytest.mark.parametrize("order", ["implicit(grad)", "grad(implicit)", "jit(grad(implicit))"])
@pytest.mark.parametrize("model", [MLP(), Stack()], ids=["mlp", "scan"])
def test_gradient_of_dense_parameters_and_input(model, order, key):
    x = jax.random.normal(key, (4, 16))
    quantized, plain = twins(model.init(jax.random.key(0), x))

    def split(variables: Any) -> tuple[Any, Any]:
        is_leaf = lambda leaf: isinstance(leaf, Block8)  # noqa: E731
        leaves, treedef = jax.tree.flatten(variables, is_leaf=is_leaf)
        fixed = [i for i, leaf in enumerate(jax.tree.leaves(quantized, is_leaf=is_leaf)) if is_leaf(leaf)]
        trained = [leaf for i, leaf in enumerate(leaves) if i not in fixed]
        merge = lambda trained, frozen: treedef.unflatten(  # noqa: E731
            [
                frozen[fixed.index(i)] if i in fixed else trained[i - sum(f < i for f in fixed)]
                for i in range(len(leaves))
            ]
        )
        frozen = [leaves[i] for i in fixed]
        return (trained, frozen), lambda t, f, x: jnp.mean(model.apply(merge(t, f), x) ** 2)

    (trained, frozen), loss = split(quantized)
    (trained_plain, frozen_plain), loss_plain = split(plain)
    expected = jax.grad(loss_plain, argnums=(0, 2))(trained_plain, frozen_plain, x)
    transform = {
        "implicit(grad)": lambda f: implicit(jax.grad(f, argnums=(0, 2))),
        "grad(implicit)": lambda f: jax.grad(implicit(f), argnums=(0, 2)),
        "jit(grad(implicit))": lambda f: jax.jit(jax.grad(implicit(f), argnums=(0, 2))),
    }[order]
    DIARY.clear()
    assert_same(transform(loss)(trained, frozen, x), expected)
    assert len(trained) == 4  # two biases, scale and bias of the norm
    assert dots()
    assert_no_stack(LAYERS)


def test_variables_as_result(key):
    model, x = MLP(), jax.random.normal(key, (4, 16))
    quantized, _ = twins(model.init(jax.random.key(0), x))
    returned = implicit(lambda v: v)(quantized)
    assert jax.tree.structure(returned) == jax.tree.structure(quantized)
    assert_same(returned, quantized)
