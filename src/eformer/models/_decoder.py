"""A decoder-only transformer shaped like LLaMA in plain JAX, for weights of any kind: `x @ w`, whatever `w` is.

Layers are stacked along their first axis and scanned. The head is the embedding, transposed. Text is generated with a
key-value cache, a few tokens per program run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer._core import implicit, materialize

Params = dict[str, Any]
Cache = tuple[jax.Array, jax.Array]  # keys and values, (layers, batch, context, heads, size)
CHUNK = 16  # tokens per program run: few enough to watch, enough for the cost of a run not to matter
_ROUND = 32  # prompts are padded to a multiple, so that few programs are compiled


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a model, and what cannot be read from its weights."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    rope_base: float = 10000.0
    epsilon: float = 1e-5

    @property
    def head_size(self) -> int:
        return self.width // self.heads


def init(config: Config, key: jax.Array) -> Params:
    """Random weights, (in, out) each."""
    inner, kv = config.heads * config.head_size, config.kv_heads * config.head_size
    sizes = {"q": (config.width, inner), "k": (config.width, kv), "v": (config.width, kv), "o": (inner, config.width)}
    sizes |= {"gate": (config.width, config.hidden), "up": (config.width, config.hidden)}
    sizes |= {"down": (config.hidden, config.width)}
    first, *keys = jax.random.split(key, 1 + len(sizes))
    layers = {
        name: jax.random.normal(k, (config.layers, *size)) * size[0] ** -0.5
        for k, (name, size) in zip(keys, sizes.items(), strict=True)
    }
    norms = {name: jnp.ones((config.layers, config.width)) for name in ("norm_attention", "norm_mlp")}
    embedding = jax.random.normal(first, (config.vocabulary, config.width)) * config.width**-0.5
    return {"embedding": embedding, "layers": {**layers, **norms}, "norm": jnp.ones(config.width)}


def make_cache(config: Config, batch: int, context: int, dtype: Any = jnp.float32) -> Cache:
    """Room for `context` tokens."""
    size = (config.layers, batch, context, config.kv_heads, config.head_size)
    return jnp.zeros(size, dtype), jnp.zeros(size, dtype)


def forward(config: Config, params: Params, tokens: jax.Array) -> jax.Array:
    """Logits (batch, time, vocabulary) of whole texts."""
    return decode(config, params, tokens, None, jnp.asarray(0))[0]


@implicit
def decode(config: Config, params: Params, tokens: jax.Array, cache: Cache | None, start: jax.Array) -> tuple[Any, Any]:
    """Logits of tokens (batch, time) that begin at position `start`, and the cache with them filled in."""
    places = start + jnp.arange(tokens.shape[1])
    # Explicit on purpose: only the rows that were looked up are decoded, not the table.
    x = materialize(params["embedding"][tokens])

    def layer(carry: Any, weights: tuple[Params, jax.Array]) -> tuple[Any, None]:
        x, cache = carry
        w, number = weights
        h, cache = _attention(config, w, _norm(x, w["norm_attention"], config.epsilon), cache, number, places)
        x = x + h
        h = _norm(x, w["norm_mlp"], config.epsilon)
        return (x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], cache), None

    (x, cache), _ = jax.lax.scan(layer, (x, cache), (params["layers"], jnp.arange(config.layers)))
    return _norm(x, params["norm"], config.epsilon) @ params["embedding"].T, cache


def _attention(
    config: Config, w: Params, x: jax.Array, cache: Cache | None, number: jax.Array, places: jax.Array
) -> tuple[jax.Array, Cache | None]:
    def heads(name: str, count: int) -> jax.Array:
        return (x @ w[name]).reshape(*x.shape[:-1], count, config.head_size)

    q = _rotate(heads("q", config.heads), places, config.rope_base)
    keys, values = _rotate(heads("k", config.kv_heads), places, config.rope_base), heads("v", config.kv_heads)
    there = places
    if cache is not None:
        begin = (number, 0, places[0], 0, 0)
        filled = [
            jax.lax.dynamic_update_slice(old, new[None].astype(old.dtype), begin)
            for old, new in zip(cache, (keys, values), strict=True)
        ]
        keys, values = (part[number].astype(x.dtype) for part in filled)
        cache, there = (filled[0], filled[1]), jnp.arange(keys.shape[1])
    q = q.reshape(*q.shape[:2], config.kv_heads, -1, config.head_size)  # queries share keys in groups
    scores = jnp.einsum("btkgd,bskd->bkgts", q, keys) * config.head_size**-0.5
    scores = jnp.where(there <= places[:, None], scores.astype(jnp.float32), -jnp.inf)
    mixed = jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(scores).astype(x.dtype), values)
    return mixed.reshape(*x.shape[:-1], -1) @ w["o"], cache


def _norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + epsilon)).astype(x.dtype) * weight


def _rotate(x: jax.Array, places: jax.Array, base: float) -> jax.Array:
    """Turn neighbouring pairs of (batch, time, heads, size) by angles that grow with the position."""
    half = x.shape[-1] // 2
    angle = places[:, None, None] * base ** (-jnp.arange(half) / half)
    a, b = x[..., 0::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
    turned = a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)
    return jnp.stack(turned, axis=-1).reshape(x.shape).astype(x.dtype)


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
