"""Meshes whose axes are part of the types (explicit sharding): state the sharding of the result, then let XLA split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from eformer import _jax

from .problem import Spec


def result_sharding(*axes: tuple[Any, int]) -> NamedSharding | None:
    """Every axis of the result as an axis of an operand, given as (operand, axis), is sharded.

    None unless an operand has an explicit sharding.
    """
    shardings = [_jax.explicit_sharding_of(value) for value, _ in axes]
    known = [s for s in shardings if s is not None]
    if not known:
        return None
    entries = [_entries(s, value.ndim)[axis] for s, (value, axis) in zip(shardings, axes, strict=True)]
    used: set[str] = set()
    return NamedSharding(known[0].mesh, PartitionSpec(*(_unused(entry, used) for entry in entries)))


def of_product(spec: Spec, x: Any, codes: Any) -> NamedSharding | None:
    """Rows as x has them, columns as the codes have them."""
    column = codes.ndim - spec.core_ndim + (spec.form == "axpy")
    return result_sharding(*((x, axis) for axis in range(x.ndim - 1)), (codes, column))


def in_auto_mode(product: Callable[..., jax.Array], out: NamedSharding, operands: list[jax.Array]) -> jax.Array:
    automatic: Any = jax.sharding.auto_axes(product, out_sharding=out)
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
