"""How other programs pack codes: pure functions from stored words to one code per value, and back.

Stored tensors are as files have them, codes are uint8 of the logical shape. All is plain JAX: it runs inside `jit`, and
says shapes without data.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer._formats.words import bit_stream as bit_stream
from eformer._formats.words import to_words as to_words
from eformer._formats.words import unsigned as unsigned
from eformer._formats.words import word_fields as word_fields

# AWQ: the column of every block of eight that each field of a word holds.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


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
