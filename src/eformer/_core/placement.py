"""Shardings of a logical array, as shardings of the children that store it."""

from __future__ import annotations

from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec

from .materialization import dense_for
from .trace import is_implicit, rule


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def child_specs(q: Any, spec: PartitionSpec) -> list[PartitionSpec] | None:
    """One PartitionSpec per leaf of `q`, or None if the array cannot be split that way."""
    mapped = q.child_specs(spec)
    if mapped is not None:
        return jtu.tree_leaves(mapped, is_leaf=_is_spec)
    if all(part is None for part in spec):  # replicated means replicated, whatever the layout
        return [PartitionSpec() for _ in jtu.tree_leaves(q)]
    return None


def child_shardings(q: Any, sharding: Any) -> Any:
    """A pytree like `q` of shardings of its leaves, or None."""
    leaves, treedef = jtu.tree_flatten(q)
    if isinstance(sharding, NamedSharding):
        specs = child_specs(q, sharding.spec)
        if specs is None:
            return None
        kind = sharding.memory_kind
        placed = [NamedSharding(sharding.mesh, spec, memory_kind=kind) for spec in specs]
        return jtu.tree_unflatten(treedef, placed)
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return jtu.tree_unflatten(treedef, [sharding] * len(leaves))
    return None


@rule("device_put")
def _device_put(primitive: Any, values: list[Any], params: dict[str, Any]) -> Any:
    """Move the storage; a sharding the storage cannot have moves the dense array instead."""
    return [_put(primitive, v, device) for v, device in zip(values, params["devices"], strict=True)]


def _put(primitive: Any, value: Any, device: Any) -> Any:
    if is_implicit(value) and isinstance(device, jax.sharding.Sharding):
        target = child_shardings(value, device)
        if target is not None:
            return jax.device_put(value, target)
        value = dense_for(primitive, value)
    return jax.device_put(value, device)


@rule("sharding_constraint")
def _sharding_constraint(primitive: Any, values: list[Any], params: dict[str, Any]) -> Any:
    (q,) = values
    target = child_shardings(q, params["sharding"])
    if target is None:
        return type(q).default_handler(primitive, q, params=params)
    return jtu.tree_map(jax.lax.with_sharding_constraint, q, target)
