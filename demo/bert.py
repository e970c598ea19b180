"""A sentence encoder shaped like BERT in plain JAX, for weights of any kind, named as in its safetensors file."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer.jaximus import implicit, materialize

Params = dict[str, Any]
_EPSILON = 1e-12


def nested(flat: Mapping[str, Any]) -> Params:
    """Dicts in dicts, by the dots in names.

    >>> nested({"a.b.c": 1, "a.d": 2})
    {'a': {'b': {'c': 1}, 'd': 2}}
    """
    tree: Params = {}
    for name, value in flat.items():
        *holders, last = name.split(".")
        node = tree
        for holder in holders:
            node = node.setdefault(holder, {})
        node[last] = value
    return tree


def padded(sentences: Sequence[np.ndarray], multiple: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (sentences, length) and which of them are real."""
    length = -(-max(map(len, sentences)) // multiple) * multiple
    tokens = np.zeros((len(sentences), length), np.int32)
    for row, sentence in zip(tokens, sentences, strict=True):
        row[: len(sentence)] = sentence
    real = np.arange(length) < np.array([[len(sentence)] for sentence in sentences])
    return tokens, real


@functools.partial(jax.jit, static_argnums=0)
@implicit
def embed(heads: int, params: Params, tokens: jax.Array, real: jax.Array) -> jax.Array:
    """One vector of length 1 per sentence: the mean over its tokens."""
    tables = params["embeddings"]
    # Said here because it is meant: of the whole table only the rows that were looked up are decoded.
    words = materialize(tables["word_embeddings"]["weight"][tokens])
    places = tables["position_embeddings"]["weight"][: tokens.shape[1]]
    x = _norm(words + places + tables["token_type_embeddings"]["weight"][0], tables["LayerNorm"])
    layers = params["encoder"]["layer"]
    for number in range(len(layers)):
        w = layers[str(number)]
        mixed = _attention(heads, w["attention"]["self"], x, real)
        x = _norm(x + _linear(w["attention"]["output"]["dense"], mixed), w["attention"]["output"]["LayerNorm"])
        hidden = jax.nn.gelu(_linear(w["intermediate"]["dense"], x), approximate=False)
        x = _norm(x + _linear(w["output"]["dense"], hidden), w["output"]["LayerNorm"])
    mean = jnp.sum(x * real[..., None], axis=1) / jnp.sum(real, axis=1, keepdims=True)
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def _linear(w: Params, x: jax.Array) -> jax.Array:
    return x @ w["weight"].T + w["bias"]


def _attention(heads: int, w: Params, x: jax.Array, real: jax.Array) -> jax.Array:
    q, k, v = (_linear(w[name], x).reshape(*x.shape[:-1], heads, -1) for name in ("query", "key", "value"))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(real[:, None, None], scores, -jnp.inf))
    return jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape)


def _norm(x: jax.Array, w: Params) -> jax.Array:
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + _EPSILON)
    return x * w["weight"] + w["bias"]
