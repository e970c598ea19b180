"""Generating text with a key-value cache, a few tokens per program run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._decoder import Cache, Config, Params, decode, make_cache

CHUNK = 16  # tokens per program run: few enough to watch, enough for the cost of a run not to matter
_ROUND = 32  # prompts are padded to a multiple, so that few programs are compiled


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, what turns text into its tokens (as `Tokenizer` does), and the token that ends a text."""

    config: Config
    params: Params
    tokenizer: Any = None
    end: int | None = None


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _prefill(config: Config, params: Params, tokens: jax.Array, cache: Cache, length: jax.Array) -> tuple[Any, Cache]:
    logits, cache = decode(config, params, tokens, cache, jnp.asarray(0))
    return logits[0, length - 1].astype(jnp.float32), cache


@functools.partial(jax.jit, static_argnums=(0, 6), donate_argnums=2)
def steps(config: Config, params: Params, cache: Cache, state: Any, key: jax.Array, heat: jax.Array, count: int) -> Any:
    """`count` more tokens; `state` is the position and the logits of what comes there."""

    def step(carry: Any, _: None) -> tuple[Any, jax.Array]:
        cache, (place, logits) = carry
        noise = jax.random.gumbel(jax.random.fold_in(key, place), logits.shape)
        token = jnp.argmax(logits + heat * noise)  # no heat: the most likely one; else one of the softmax's choice
        logits, cache = decode(config, params, token[None, None], cache, place)
        return (cache, (place + 1, logits[0, 0].astype(jnp.float32))), token

    (cache, state), tokens = jax.lax.scan(step, (cache, state), None, length=count)
    return cache, state, tokens


def generate(
    model: Model, prompt: Sequence[int] | np.ndarray, count: int, *, temperature: float = 0.0, seed: int = 0
) -> Iterator[np.ndarray]:
    """Up to `count` tokens that continue the prompt, in pieces of `CHUNK`; the token that ends a text is left out."""
    config, params = model.config, model.params
    padded = np.zeros(-(-len(prompt) // _ROUND) * _ROUND, np.int32)
    padded[: len(prompt)] = prompt
    # The padding after the prompt is overwritten before anything attends to it.
    cache = make_cache(config, 1, len(padded) + -(-count // CHUNK) * CHUNK)
    logits, cache = _prefill(config, params, jnp.asarray(padded)[None], cache, jnp.asarray(len(prompt)))
    state, key = (jnp.asarray(len(prompt)), logits), jax.random.key(seed)
    for done in range(0, count, CHUNK):
        cache, state, tokens = steps(config, params, cache, state, key, jnp.float32(temperature), CHUNK)
        piece = np.asarray(tokens)[: count - done]
        if model.end is not None and model.end in piece:
            yield piece[: int(np.argmax(piece == model.end))]
            return
        yield piece
