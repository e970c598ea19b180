"""The values of a panel of bytes, plane by plane: plane i holds value i of every byte."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from . import nf4
from .panel import split_columns


def _int8(codes: jax.Array, dtype: Any) -> list[jax.Array]:
    return [codes.astype(dtype)]


def _ternary(codes: jax.Array, dtype: Any) -> list[jax.Array]:
    # By way of int8: the conversion of unsigned bytes is slower than that of signed ones.
    return [((codes >> jnp.uint8(s)) & jnp.uint8(3)).astype(jnp.int8).astype(dtype) - 1 for s in (6, 4, 2, 0)]


def _binary(codes: jax.Array, dtype: Any) -> list[jax.Array]:
    one = jnp.ones((), dtype)
    return [jnp.where((codes & jnp.uint8(1 << bit)) != 0, one, -one) for bit in range(7, -1, -1)]


UNSCALED: Mapping[str, Callable[[jax.Array, Any], list[jax.Array]]] = MappingProxyType(
    {"nf4": nf4.planes, "int8": _int8, "ternary": _ternary, "binary": _binary}
)


def planes(fmt: str, codes: jax.Array, scale: Any, dtype: Any) -> list[jax.Array]:
    """Each of the shape of the codes; scale None stands for 1."""
    return scaled(UNSCALED[fmt](codes, dtype), scale, codes)


def scaled(values: list[jax.Array], scale: Any, codes: jax.Array) -> list[jax.Array]:
    """Planes times the scale of every block (codes with an axis of blocks) or of every value."""
    if scale is None:
        return values
    factors = [scale[..., None]] if codes.ndim == 3 else split_columns(scale, len(values), codes.shape[-1])
    return [value * factors[i % len(factors)] for i, value in enumerate(values)]
