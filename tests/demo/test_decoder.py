"""The decoder of the demonstration: its cache, its groups of queries, its layers, with dense and quantized weights."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.demo import generation, qat
from eformer.demo.decoder import Shape, decode, forward, init, make_cache
from eformer.demo.judge import bits_per_token, materializations
from eformer.ops.quantization import dequantize_tree, quantize_tree

SHAPE = Shape(vocabulary=32, width=64, layers=2, heads=4, kv_heads=2, hidden=96)


def test_a_cache_changes_nothing(key: jax.Array):
    params, tokens = init(SHAPE, key), jax.random.randint(key, (2, 7), 0, 32)
    for weights in (params, quantize_tree(params, "int8", donate=False, min_size=0)):
        whole = jax.jit(forward, static_argnums=0)(SHAPE, weights, tokens)
        cache = make_cache(SHAPE, 2, 9)
        run = jax.jit(decode, static_argnums=0)
        first, cache = run(SHAPE, weights, tokens[:, :4], cache, jnp.asarray(0))
        pieces = [first]
        for place in range(4, 7):
            step, cache = run(SHAPE, weights, tokens[:, place : place + 1], cache, jnp.asarray(place))
            pieces.append(step)
        np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, atol=2e-5)


def test_nothing_looks_ahead_and_order_matters(key: jax.Array):
    params, tokens = init(SHAPE, key), jax.random.randint(key, (1, 6), 0, 32)
    run = jax.jit(forward, static_argnums=0)
    whole = run(SHAPE, params, tokens)
    changed = run(SHAPE, params, tokens.at[0, 4].add(1))
    np.testing.assert_array_equal(whole[:, :4], changed[:, :4])
    assert jnp.abs(whole[:, 4:] - changed[:, 4:]).min() > 0
    swapped = run(SHAPE, params, tokens[:, ::-1])
    assert jnp.abs(swapped[:, -1] - whole[:, -1]).max() > 1e-3


def test_quantized_weights_compute_what_their_dense_values_do(key: jax.Array):
    rules = {"embedding": "int8", "*/[qk]": "ternary", "*/[vo]": "binary", "*": "nf4"}
    quantized = quantize_tree(init(SHAPE, key), rules, min_size=0)
    tokens = jax.random.randint(key, (1, 5), 0, 32)
    run = jax.jit(forward, static_argnums=0)
    expected = run(SHAPE, dequantize_tree(quantized), tokens)
    np.testing.assert_allclose(run(SHAPE, quantized, tokens), expected, atol=1e-4)
    assert materializations(SHAPE, quantized, np.asarray(tokens)) == 0


def test_generation_is_what_forward_says(key: jax.Array):
    params, prompt = init(SHAPE, key), np.array([3, 1, 4], np.int32)
    made = np.concatenate(list(generation.generate(SHAPE, params, prompt, 18)))
    assert made.shape == (18,)
    text = np.concatenate([prompt, made])
    logits = np.asarray(forward(SHAPE, params, jnp.asarray(text)[None]))[0, 2:-1]
    assert logits[np.arange(18), made] == pytest.approx(logits.max(axis=-1), abs=1e-4)


def test_training_lowers_the_loss_it_sees(key: jax.Array):
    params = init(dataclasses.replace(SHAPE, layers=1), key)
    shape, tokens = dataclasses.replace(SHAPE, layers=1), np.tile(np.arange(16, dtype=np.int32), 40)
    windows = np.stack([tokens[i : i + 17] for i in range(8)])

    def judged(params: object) -> float:
        return bits_per_token(shape, quantize_tree(params, "ternary", donate=False), windows)

    *_, (done, loss, trained) = qat.train(shape, params, tokens, "ternary", steps=30, length=16, batch=4, rate=1e-2)
    assert done == 30
    assert loss < 1.0
    assert judged(trained) < 0.5 * judged(params)
