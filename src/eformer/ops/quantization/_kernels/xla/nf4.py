"""NF4 panels: two values per byte, one scale per block."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..reference import NF4_CODEBOOK


def lookup(codes: jax.Array, shift: int, dtype: Any) -> jax.Array:
    """Codebook values of the four bits above `shift`.

    Four levels of selects: XLA vectorizes them, while an indexed load per value becomes scalar code.
    """
    values: list[jax.Array] = [jnp.asarray(value, dtype) for value in NF4_CODEBOOK]
    for bit in range(4):
        is_set = (codes & jnp.uint8(1 << (bit + shift))) != 0
        values = [jnp.where(is_set, high, low) for low, high in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def planes(codes: jax.Array, absmax: jax.Array, dtype: Any) -> list[jax.Array]:
    """(P, blocks, bytes) and (P, blocks) -> even and odd columns, each of the shape of the codes."""
    factor = absmax.astype(dtype)[..., None]
    return [lookup(codes, shift, dtype) * factor for shift in (4, 0)]
