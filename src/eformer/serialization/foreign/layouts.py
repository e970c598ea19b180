"""How other programs pack codes: pure functions from stored words to one code per value, and back.

Stored tensors are as files have them, codes are uint8 of the logical shape. All is plain JAX: it runs inside `jit`, and
says shapes without data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# AWQ: the column of every block of eight that each field of a word holds.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def unsigned(words: jax.Array) -> jax.Array:
    """The same bits without a sign."""
    return lax.bitcast_convert_type(words, jnp.dtype(f"uint{8 * words.dtype.itemsize}"))


def word_fields(words: jax.Array, bits: int, order: Sequence[int] | None = None) -> jax.Array:
    """As many whole fields as fit into each word, the lowest first or in this order, along the last axis."""
    words = unsigned(words)
    fields = range(8 * words.dtype.itemsize // bits) if order is None else order
    shifts = np.array(fields, words.dtype) * words.dtype.type(bits)
    fields = words[..., None] >> shifts & (2**bits - 1)
    return fields.astype(jnp.uint8).reshape(*words.shape[:-1], -1)


def bit_stream(words: jax.Array, bits: int) -> jax.Array:
    """Fields of `bits` bits that follow each other through the 32-bit words of the last axis, the lowest bit first."""
    if 32 % bits == 0:
        return word_fields(words, bits)
    count = words.shape[-1] * 32 // bits
    padded = jnp.pad(unsigned(words), [(0, 0)] * (words.ndim - 1) + [(0, -words.shape[-1] % bits)])
    groups = padded.reshape(*words.shape[:-1], -1, bits)  # 32 fields in every `bits` words
    begin = np.arange(32) * bits
    word, shift = begin // 32, (begin % 32).astype(np.uint32)
    low = groups[..., word] >> shift
    above = groups[..., np.minimum(word + 1, bits - 1)] << ((32 - shift) % 32)
    fields = (low | jnp.where(shift + bits > 32, above, 0)) & (2**bits - 1)
    return fields.astype(jnp.uint8).reshape(*words.shape[:-1], -1)[..., :count]


# How many bits of every code each plane holds, the lowest first. Other numbers of bits have one plane: whole fields.
PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2)}


def bit_planes(words: jax.Array, bits: int) -> jax.Array:
    """GPTQModel's 'gptq_p': 32 codes in every `bits` words of the last axis, their low bits before their high ones."""
    groups = words.reshape(*words.shape[:-1], -1, bits)
    codes, place = jnp.zeros((*groups.shape[:-1], 32), jnp.uint8), 0
    for width in PLANES[bits]:
        codes |= word_fields(groups[..., place : place + width], width) << place
        place += width
    return codes.reshape(*words.shape[:-1], -1)


def along(unpack: Any, words: jax.Array, bits: int, axis: int) -> jax.Array:
    """`unpack` along another axis than the last."""
    return jnp.moveaxis(unpack(jnp.moveaxis(words, axis, -1), bits), -1, axis)


def awq_columns(words: jax.Array, bits: int) -> jax.Array:
    """AWQ packs eight columns into a word in an order of its own."""
    return word_fields(words, bits, np.argsort(AWQ_ORDER).tolist())


def ggml_nibbles(packed: jax.Array) -> jax.Array:
    """Blocks of ggml: the first half of the values in the low nibbles, the others in the high ones."""
    return jnp.concatenate([packed & 15, packed >> 4], axis=-1)


def to_words(codes: jax.Array, bits: int) -> jax.Array:
    """uint32 whose bits are those of the codes one after the other: the inverse of `bit_stream`, its end filled up."""
    stream = (codes[..., None] >> jnp.arange(bits, dtype=jnp.uint8)) & 1
    stream = stream.reshape(*codes.shape[:-1], codes.shape[-1] * bits)
    stream = jnp.pad(stream, [(0, 0)] * (stream.ndim - 1) + [(0, -stream.shape[-1] % 32)])
    places = jnp.arange(32, dtype=jnp.uint32)
    return (stream.reshape(*stream.shape[:-1], -1, 32).astype(jnp.uint32) << places).sum(axis=-1, dtype=jnp.uint32)
