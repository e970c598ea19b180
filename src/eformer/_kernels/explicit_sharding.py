"""Meshes whose axes are part of the types (explicit sharding): state the sharding of the result, then let XLA split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from eformer._jax import avals


def of_result(axes: Sequence[tuple[Any, int]]) -> NamedSharding | None:
    """The sharding of a result each axis of which is sharded as an axis of an operand, given as (operand, axis).

    None unless an operand has an explicit sharding.
    """
    shardings = {id(value): avals.explicit_sharding_of(value) for value, _ in axes}
    known = next((sharding for sharding in shardings.values() if sharding is not None), None)
    if known is None:
        return None
    entries = [_entries(shardings[id(value)], value.ndim)[axis] for value, axis in axes]
    used: set[str] = set()
    return NamedSharding(known.mesh, PartitionSpec(*(_unused(entry, used) for entry in entries)))


def in_auto_mode(operation: Callable[..., jax.Array], out: NamedSharding, operands: list[jax.Array]) -> jax.Array:
    automatic: Any = jax.sharding.auto_axes(operation, out_sharding=out)
    return automatic(*operands)


def _entries(sharding: Any, ndim: int) -> tuple[Any, ...]:
    spec = () if sharding is None else tuple(sharding.spec)
    return (*spec, *[None] * (ndim - len(spec)))


def _unused(entry: Any, used: set[str]) -> Any:
    """An axis can split one dimension only: the first one keeps it."""
    axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
    if used.intersection(axes):
        return None
    used.update(axes)
    return entry
