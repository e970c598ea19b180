"""Which mesh axes of an enclosing shard_map a value varies over, and making operands agree on them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from eformer import _jax


def varying_axes(value: Any) -> frozenset[str]:
    """Mesh axes of the enclosing shard_map this value differs over; empty outside one."""
    return varying_axes_of_type(jax.typeof(value))


def varying_axes_of_type(aval: Any) -> frozenset[str]:
    mat = getattr(aval, "mat", None)
    return frozenset() if mat is None else frozenset(mat.varying)


def vary(value: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Mark `value` as differing over `axes`; its gradient is then summed over them."""
    missing = tuple(sorted(axes - varying_axes(value)))
    return lax.pcast(value, missing, to="varying") if missing else value


def agree(*values: jax.Array) -> list[jax.Array]:
    """Make all operands vary over the same axes, as JAX does for its own operations."""
    axes = frozenset[str]().union(*map(varying_axes, values))
    return [vary(value, axes) for value in values]


def zeros_like_in(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.Array:
    """Zeros that vary over the axes `like` varies over, so they can start a loop that adds to them."""
    return vary(jnp.zeros(shape, dtype), varying_axes(like))


def result_type(shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
    """The type of a result computed from `like` (a value or a type): it varies over the axes `like` varies over."""
    aval = like if isinstance(like, _jax.ShapedArray) else jax.typeof(like)
    if not varying_axes_of_type(aval):
        return _jax.ShapedArray(shape, dtype)
    sharding = aval.sharding.update(spec=PartitionSpec(*[None] * len(shape)))
    return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)
