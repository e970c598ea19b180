"""Generating text with a key-value cache, a few tokens per program run, and how fast that goes."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .decoder import Cache, Params, Shape, decode, make_cache

CHUNK = 16  # tokens per program run: few enough to watch, enough for the cost of a run not to matter
_ROUND = 32  # prompts are padded to a multiple, so that few programs are compiled


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _prefill(shape: Shape, params: Params, tokens: jax.Array, cache: Cache, length: jax.Array) -> tuple[Any, Cache]:
    logits, cache = decode(shape, params, tokens, cache, jnp.asarray(0))
    return logits[0, length - 1].astype(jnp.float32), cache


@functools.partial(jax.jit, static_argnums=(0, 6), donate_argnums=2)
def _steps(shape: Shape, params: Params, cache: Cache, state: Any, key: jax.Array, heat: jax.Array, count: int) -> Any:
    """`count` more tokens; `state` is the position and the logits of what comes there."""

    def step(carry: Any, _: None) -> tuple[Any, jax.Array]:
        cache, (place, logits) = carry
        noise = jax.random.gumbel(jax.random.fold_in(key, place), logits.shape)
        token = jnp.argmax(logits + heat * noise)  # no heat: the most likely one; else one of the softmax's choice
        logits, cache = decode(shape, params, token[None, None], cache, place)
        return (cache, (place + 1, logits[0, 0].astype(jnp.float32))), token

    (cache, state), tokens = jax.lax.scan(step, (cache, state), None, length=count)
    return cache, state, tokens


def generate(
    shape: Shape, params: Params, prompt: np.ndarray, count: int, *, temperature: float = 0.0, seed: int = 0
) -> Iterator[np.ndarray]:
    """Tokens that continue the prompt, in pieces of `CHUNK`."""
    padded = np.zeros(-(-len(prompt) // _ROUND) * _ROUND, np.int32)
    padded[: len(prompt)] = prompt
    # What stands behind the prompt is overwritten before anything attends to it.
    cache = make_cache(shape, 1, len(padded) + -(-count // CHUNK) * CHUNK)
    logits, cache = _prefill(shape, params, jnp.asarray(padded)[None], cache, jnp.asarray(len(prompt)))
    state, key = (jnp.asarray(len(prompt)), logits), jax.random.key(seed)
    for done in range(0, count, CHUNK):
        cache, state, tokens = _steps(shape, params, cache, state, key, jnp.float32(temperature), CHUNK)
        yield np.asarray(tokens)[: count - done]


def speeds(
    shape: Shape, models: Mapping[str, Params], *, context: int = 128, tokens: int = 64, rounds: int = 3
) -> dict[str, float]:
    """Tokens per second of one text at a time, the best of interleaved rounds: a busy machine slows all alike."""
    best = dict.fromkeys(models, 0.0)
    for number in range(rounds + 1):  # the first round compiles
        for name, params in models.items():
            cache = make_cache(shape, 1, context)
            state = jnp.asarray(0), jnp.zeros(shape.vocabulary)
            begun = time.perf_counter()
            for _ in range(0, tokens if number else 1, CHUNK):
                cache, state, _ = _steps(shape, params, cache, state, jax.random.key(0), jnp.float32(0), CHUNK)
            jax.block_until_ready(state)
            if number:
                best[name] = max(best[name], tokens / (time.perf_counter() - begun))
    return best
