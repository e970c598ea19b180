"""One decode step of a small model shaped like LLaMA, on weights of any kind.

The code is what a user would write: `x @ w`, whatever `w` is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    layers: int = 8
    width: int = 1024
    heads: int = 16
    hidden: int = 2816
    vocabulary: int = 32000
    context: int = 256


def make_params(shape: Shape, convert: Callable[[jax.Array], Any], dtype: Any) -> Params:
    """Random weights; matrices go through `convert`, norms and the embedding stay dense in `dtype`."""
    keys = iter(jax.random.split(jax.random.key(0), 8 * shape.layers + 2))

    def matrix(k: int, n: int) -> Any:
        return convert(jax.random.normal(next(keys), (k, n), jnp.float32) / jnp.sqrt(k))

    def layer() -> Params:
        w, h = shape.width, shape.hidden
        sizes = {"q": (w, w), "k": (w, w), "v": (w, w), "o": (w, w), "gate": (w, h), "up": (w, h), "down": (h, w)}
        norms = {"norm_attention": jnp.ones(w, dtype), "norm_mlp": jnp.ones(w, dtype)}
        return {**{name: matrix(*size) for name, size in sizes.items()}, **norms}

    return {
        "embedding": jax.random.normal(next(keys), (shape.vocabulary, shape.width), jnp.float32).astype(dtype),
        "layers": [layer() for _ in range(shape.layers)],
        "norm": jnp.ones(shape.width, dtype),
        "head": matrix(shape.width, shape.vocabulary),
    }


def make_cache(shape: Shape, dtype: Any) -> list[tuple[jax.Array, jax.Array]]:
    size = (shape.context, shape.heads, shape.width // shape.heads)
    return [(jnp.zeros(size, dtype), jnp.zeros(size, dtype)) for _ in range(shape.layers)]


def decode_step(shape: Shape, params: Params, cache: Any, token: jax.Array, position: jax.Array) -> tuple[Any, Any]:
    """The next token after `token` (greedy), and the cache with this position filled in."""
    x = params["embedding"][token][None]
    filled = []
    for layer, (keys, values) in zip(params["layers"], cache, strict=True):
        y = _norm(x, layer["norm_attention"])
        q, k, v = ((y @ layer[name]).reshape(shape.heads, -1) for name in "qkv")
        q, k = _rotate(q, position), _rotate(k, position)
        keys, values = keys.at[position].set(k), values.at[position].set(v)
        filled.append((keys, values))
        x = x + _attend(q, keys, values, position).reshape(1, -1) @ layer["o"]
        y = _norm(x, layer["norm_mlp"])
        x = x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]
    logits = _norm(x, params["norm"]) @ params["head"]
    return jnp.argmax(logits[0]), filled


def _norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype) * weight


def _rotate(x: jax.Array, position: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angle = position * 10000.0 ** (-jnp.arange(half) / half)
    a, b = x[:, :half].astype(jnp.float32), x[:, half:].astype(jnp.float32)
    turned = (a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle))
    return jnp.concatenate(turned, -1).astype(x.dtype)


def _attend(q: jax.Array, keys: jax.Array, values: jax.Array, position: jax.Array) -> jax.Array:
    scores = jnp.einsum("hd,thd->ht", q, keys).astype(jnp.float32) / jnp.sqrt(q.shape[-1])
    scores = jnp.where(jnp.arange(keys.shape[0]) <= position, scores, -jnp.inf)
    return jnp.einsum("ht,thd->hd", jax.nn.softmax(scores).astype(values.dtype), values)
