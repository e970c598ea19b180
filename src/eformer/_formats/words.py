"""Codes as other programs pack them: rows of bits in words, the lowest bit of a word first."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eformer._kernels.formats import FORMATS

from .integer.codec import kernel_format


def unsigned(words: jax.Array) -> jax.Array:
    """The same bits without a sign."""
    return lax.bitcast_convert_type(words, jnp.dtype(f"uint{8 * words.dtype.itemsize}"))


def word_fields(words: jax.Array, bits: int, order: Sequence[int] | None = None) -> jax.Array:
    """As many whole fields as fit into each word, the lowest first or in this order, along the last axis."""
    words = unsigned(words)
    fields = range(8 * words.dtype.itemsize // bits) if order is None else order
    shifts = np.array(fields, words.dtype) * words.dtype.type(bits)
    fields = words[..., None] >> shifts & (2**bits - 1)
    return fields.astype(jnp.uint8).reshape(*words.shape[:-1], words.shape[-1] * len(shifts))


# Where a field goes on in the next byte, a unit of ours, which begins with the high bits, is read from its end.


def bit_stream(words: jax.Array, bits: int) -> jax.Array:
    """Fields of `bits` bits that follow each other through the 32-bit words of the last axis.

    >>> bit_stream(jnp.array([0b101_100_011_010_001], jnp.uint32), 3).tolist()
    [1, 2, 3, 4, 5, 0, 0, 0, 0, 0]
    """
    if 32 % bits == 0:
        return word_fields(words, bits)
    row, lead, count = FORMATS[kernel_format(bits)], words.shape[:-1], words.shape[-1] * 32 // bits
    stored = lax.bitcast_convert_type(words, jnp.uint8).reshape(*lead, 4 * words.shape[-1])
    stored = _padded(stored, row.unit)
    fields = row.apart([stored[..., i :: row.unit] for i in reversed(range(row.unit))])
    return jnp.stack(fields[::-1], axis=-1).reshape(*lead, row.per_code * fields[0].shape[-1])[..., :count]


def to_words(codes: jax.Array, bits: int) -> jax.Array:
    """uint32 whose bits are those of the codes one after the other: the inverse of `bit_stream`, its end filled up."""
    row, count = FORMATS[kernel_format(bits)], -(-codes.shape[-1] * bits // 32)
    codes = _padded(codes, 32)
    stored = row.joined([codes[..., i :: row.per_code] for i in reversed(range(row.per_code))])
    stored = jnp.stack(stored[::-1], axis=-1).reshape(*codes.shape[:-1], bits * codes.shape[-1] // 32, 4)
    return lax.bitcast_convert_type(stored, jnp.uint32)[..., :count]


def _padded(array: jax.Array, unit: int) -> jax.Array:
    """With zeros behind it, up to whole units."""
    missing = -array.shape[-1] % unit
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)]) if missing else array
