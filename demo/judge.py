"""How good and how fast a language model is, and whether any of its weights went dense on the way."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer.jaximus import explain, materialization_policy
from eformer.models import CHUNK, Config, Params, Sampling, decode, forward, make_cache
from eformer.models._generate import steps


def loss(config: Config, params: Params, inputs: jax.Array, targets: jax.Array, cache: str | None = None) -> jax.Array:
    """Mean negative log likelihood per token, in bits. With a cache, keys and values are read from it."""
    batch, length = inputs.shape
    room = _cache(config, params, batch, length, cache) if cache else None
    logits = decode(config, params, inputs, room, jnp.asarray(0))[0].astype(jnp.float32)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -jnp.mean(chosen) / jnp.log(2.0)


_loss = jax.jit(loss, static_argnums=(0, 4))


def _cache(config: Config, params: Params, batch: int, context: int, kind: str | None) -> Any:
    return make_cache(config, batch, context, format=kind, listed=not isinstance(params["layers"], Mapping))


def bits_per_token(
    config: Config, params: Params, windows: np.ndarray, batch: int = 8, cache: str | None = None
) -> float:
    """The loss over windows (count, length + 1), a few at a time."""
    pieces = [windows[i : i + batch] for i in range(0, len(windows) - len(windows) % batch, batch)]
    losses = [_loss(config, params, jnp.asarray(piece[:, :-1]), jnp.asarray(piece[:, 1:]), cache) for piece in pieces]
    return float(np.mean([float(value) for value in losses]))


def materializations(config: Config, params: Params, tokens: np.ndarray) -> int:
    """How often a forward pass turns a quantized weight into a dense array. Only traces; nothing is computed."""
    abstract = functools.partial(jax.eval_shape, functools.partial(forward, config))
    with materialization_policy("allow"):
        return len(explain(abstract)(params, jnp.asarray(tokens)).materializations)


def perplexity_change(bits: float, reference: float) -> float:
    """How much larger the perplexity is, as a fraction.

    >>> perplexity_change(3.0, 2.0)
    1.0
    """
    return 2.0 ** (bits - reference) - 1.0


def speeds(
    config: Config,
    models: Mapping[str, Params],
    *,
    context: int = 128,
    tokens: int = 64,
    rounds: int = 3,
    cache: str | None = None,
) -> dict[str, float]:
    """Tokens per second of one text at a time, the best of interleaved rounds: a busy machine slows all alike."""
    best = dict.fromkeys(models, 0.0)
    for number in range(rounds + 1):  # the first round compiles
        for name, params in models.items():
            filled = _cache(config, params, 1, context, cache)
            state, seen = (jnp.asarray(0), jnp.zeros(config.vocabulary)), jnp.zeros(config.vocabulary, bool)
            key, greedy = jax.random.key(0), Sampling().numbers
            begun = time.perf_counter()
            for _ in range(0, tokens if number else 1, CHUNK):
                filled, state, seen, _ = steps(config, params, filled, state, seen, key, greedy, CHUNK, False)
            jax.block_until_ready(state)
            if number:
                best[name] = max(best[name], tokens / (time.perf_counter() - begun))
    return best
