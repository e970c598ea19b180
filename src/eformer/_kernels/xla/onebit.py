"""Ternary (two bits) and binary (one bit) panels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def ternary(codes: jax.Array, dtype: Any) -> list[jax.Array]:
    """Four planes of -1, 0, +1."""
    # By way of int8: the conversion of unsigned bytes is slower than that of signed ones.
    return [((codes >> jnp.uint8(s)) & jnp.uint8(3)).astype(jnp.int8).astype(dtype) - 1 for s in (6, 4, 2, 0)]


def binary(codes: jax.Array, dtype: Any) -> list[jax.Array]:
    """Eight planes of -1, +1."""
    one = jnp.ones((), dtype)
    return [jnp.where((codes & jnp.uint8(1 << bit)) != 0, one, -one) for bit in range(7, -1, -1)]
