"""Caches to try things on, and what their rows should be."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer import QuantizedCache

from .references import bits_in_a_row, integer_encode

KINDS = ("int8", "int4")
SHAPE = (2, 6, 3, 40)  # batch, positions, heads, size: rows that are no multiple of 16 or 64


def random(shape: Any, dtype: Any = jnp.float32, seed: int = 0) -> jax.Array:
    rng = np.random.default_rng([seed, *np.atleast_1d(shape)])
    return jnp.asarray(rng.standard_normal(shape), dtype)


def twin(cache: QuantizedCache, rows: Any) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of rows (..., size), computed by NumPy."""
    how: dict[str, Any] = {"bits": cache.bits, "block_size": cache.block_size, "scale_dtype": cache.scale.dtype}
    codes, scale, _ = integer_encode(np.asarray(rows, np.float32), axis=-1, **how)
    if cache.bits == 8:
        return (codes.astype(np.int16) - 128).astype(np.int8), scale
    return bits_in_a_row(codes, cache.bits), scale


def check_write(before: QuantizedCache, after: Any, index: Any, rows: Any) -> None:
    """After `cache.at[index].set(rows)` these rows are those of the twin, all others as before, bit for bit."""
    assert type(after) is QuantizedCache
    assert jax.tree.structure(after) == jax.tree.structure(before)
    packed, scale = np.array(before.packed), np.array(before.scale)
    packed[index], scale[index] = twin(before, np.asarray(rows.astype(before.dtype)))
    np.testing.assert_array_equal(np.asarray(after.packed), packed)
    np.testing.assert_array_equal(np.asarray(after.scale).view(np.uint8), scale.view(np.uint8))


def filled(kind: str, shape: Any = SHAPE, dtype: Any = jnp.float32, **options: Any) -> QuantizedCache:
    return QuantizedCache.quantize(random(shape, dtype, 9), kind, **options)


def attention(q: Any, keys: Any, values: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, keys).astype(jnp.float32) * q.shape[-1] ** -0.5
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(q.dtype), values)
