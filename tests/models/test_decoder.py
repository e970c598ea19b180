"""The decoder: its cache, its groups of queries, its layers, with dense and quantized weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.jaximus import explain
from eformer.models import Config, Model, decode, forward, generate, init, make_cache
from eformer.ops.quantization import dequantize_tree, quantize_tree

CONFIG = Config(vocabulary=32, width=64, layers=2, heads=4, kv_heads=2, hidden=96)


def test_a_cache_changes_nothing(key: jax.Array):
    params, tokens = init(CONFIG, key), jax.random.randint(key, (2, 7), 0, 32)
    for weights in (params, quantize_tree(params, "int8", donate=False, min_size=0)):
        whole = jax.jit(forward, static_argnums=0)(CONFIG, weights, tokens)
        cache = make_cache(CONFIG, 2, 9)
        run = jax.jit(decode, static_argnums=0)
        first, cache = run(CONFIG, weights, tokens[:, :4], cache, jnp.asarray(0))
        pieces = [first]
        for place in range(4, 7):
            step, cache = run(CONFIG, weights, tokens[:, place : place + 1], cache, jnp.asarray(place))
            pieces.append(step)
        np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, atol=2e-5)


def test_nothing_looks_ahead_and_order_matters(key: jax.Array):
    params, tokens = init(CONFIG, key), jax.random.randint(key, (1, 6), 0, 32)
    run = jax.jit(forward, static_argnums=0)
    whole = run(CONFIG, params, tokens)
    changed = run(CONFIG, params, tokens.at[0, 4].add(1))
    np.testing.assert_array_equal(whole[:, :4], changed[:, :4])
    assert jnp.abs(whole[:, 4:] - changed[:, 4:]).min() > 0
    swapped = run(CONFIG, params, tokens[:, ::-1])
    assert jnp.abs(swapped[:, -1] - whole[:, -1]).max() > 1e-3


def test_quantized_weights_compute_what_their_dense_values_do(key: jax.Array):
    rules = {"embedding": "int8", "*/[qk]": "ternary", "*/[vo]": "binary", "*": "nf4"}
    quantized = quantize_tree(init(CONFIG, key), rules, min_size=0)
    tokens = jax.random.randint(key, (1, 5), 0, 32)
    run = jax.jit(forward, static_argnums=0)
    expected = run(CONFIG, dequantize_tree(quantized), tokens)
    np.testing.assert_allclose(run(CONFIG, quantized, tokens), expected, atol=1e-4)
    assert not explain(lambda params: forward(CONFIG, params, tokens))(quantized).materializations


def test_generation_is_what_forward_says(key: jax.Array):
    params, prompt = init(CONFIG, key), np.array([3, 1, 4], np.int32)
    made = np.concatenate(list(generate(Model(CONFIG, params), prompt, 18)))
    assert made.shape == (18,)
    text = np.concatenate([prompt, made])
    logits = np.asarray(forward(CONFIG, params, jnp.asarray(text)[None]))[0, 2:-1]
    assert logits[np.arange(18), made] == pytest.approx(logits.max(axis=-1), abs=1e-4)
    end = int(made[17])
    ended = np.concatenate(list(generate(Model(CONFIG, params, end=end), prompt, 18)))
    assert ended.tolist() == made.tolist()[: made.tolist().index(end)]
