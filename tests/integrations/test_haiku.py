"""Haiku needs no helper: parameters are a dict of dicts."""

from __future__ import annotations

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from eformer.jaximus import implicit, materialization_policy
from eformer.ops.quantization import dequantize_tree, merge, quantize_tree, split_trainable

from .compare import close


def network(x: jax.Array) -> jax.Array:
    def layer(x: jax.Array) -> jax.Array:
        h = hk.LayerNorm(-1, create_scale=True, create_offset=True)(hk.Linear(48)(x))
        return x + hk.Linear(32)(jax.nn.relu(h))

    return hk.Linear(8)(hk.experimental.layer_stack(3)(hk.remat(layer))(x))


def test_forward_and_gradients(key: jax.Array):
    model, x = hk.without_apply_rng(hk.transform(network)), jax.random.normal(key, (4, 32))
    params = quantize_tree(model.init(jax.random.key(0), x), min_size=0)
    trainable, frozen = split_trainable(params, also="*")
    assert len(trainable) == 5  # three biases, scale and offset of the norms

    def loss(trainable: Any, frozen: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(model.apply(merge(trainable, frozen), x) ** 2)

    with materialization_policy("error"):
        found = jax.jit(jax.value_and_grad(implicit(loss), (0, 2)))(trainable, frozen, x)
    dense = dequantize_tree(frozen)
    close(found, jax.value_and_grad(loss, (0, 2))(trainable, dense, x))
