"""Splitting a quantized array over devices: the spec of the logical array, mapped to every stored array."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from eformer import _jax_compat as compat


class ShardingError(ValueError):
    """A sharding does not fit the array or would cut a block in two."""


def full_spec(spec: PartitionSpec, ndim: int, what: str) -> tuple[Any, ...]:
    """One entry per axis."""
    if len(spec) > ndim:
        raise ShardingError(f"{spec} has {len(spec)} entries, but {what} has only {ndim} axes.")
    return (*spec, *[None] * (ndim - len(spec)))


def child_specs(q: Any, spec: PartitionSpec) -> Any:
    """A pytree like `q` of PartitionSpecs."""
    entries = full_spec(spec, q.ndim, repr(q))
    blocked = None if q.blocked is None else q.ndim + q.blocked
    if blocked is not None and entries[blocked] is not None and q.pad:
        raise ShardingError(
            f"axis {blocked} of {q!r} ends in the middle of a block and cannot be split; split another axis, or "
            f"quantize with a block size that divides {q.shape[blocked]}."
        )
    specs = {}
    for part in q.parts:
        array = getattr(q, part.field)
        if array is not None:
            specs[part.field] = jax.tree_util.tree_map_with_path(
                lambda path, leaf, part=part: _leaf_spec(q, entries, blocked, part.tail, leaf, path), array
            )
    return q.replaced(**specs)


def _leaf_spec(
    q: Any, entries: tuple[Any, ...], blocked: int | None, tail: int, leaf: Any, path: tuple[Any, ...]
) -> PartitionSpec:
    free = [e for axis, e in enumerate(entries) if axis != blocked]
    sizes = [n for axis, n in enumerate(q.shape) if axis != blocked]
    if (
        path and path[-1].name != "codes"
    ):  # a compressed absmax keeps small arrays that are not laid out like the others
        batch = min(leaf.ndim, q.ndim - q.core_ndim)
        return PartitionSpec(*(entries[:batch]))
    # A size-1 axis of a scale serves the whole logical axis: every device needs it.
    front = [e if leaf.shape[i] == sizes[i] else None for i, e in enumerate(free)]
    if tail:
        along = entries[blocked] if blocked is not None and leaf.shape[len(free)] != 1 else None
        return PartitionSpec(*front, along, *[None] * (tail - 1))
    return PartitionSpec(*front)


def place(q: Any, sharding: Any) -> Any:
    if sharding is None:
        return q.replaced(sharding=None)
    named = _named(sharding)
    check_fits(q, named)
    specs = child_specs(q, named.spec)
    shardings = jax.tree_util.tree_map(
        lambda s: NamedSharding(named.mesh, s), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    traced = any(isinstance(leaf, compat.Tracer) for leaf in jax.tree_util.tree_leaves(q))
    put = jax.lax.with_sharding_constraint if traced else jax.device_put
    placed = {
        p.field: jax.tree_util.tree_map(put, getattr(q, p.field), getattr(shardings, p.field))
        for p in q.parts
        if getattr(q, p.field) is not None
    }
    if isinstance(sharding, NamedSharding):  # in full, so that it still means the same axes behind new leading ones
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*full_spec(sharding.spec, q.ndim, repr(q))))
    return q.replaced(**placed, sharding=sharding)


def _named(sharding: Any) -> NamedSharding:
    if isinstance(sharding, NamedSharding):
        return sharding
    if not isinstance(sharding, PartitionSpec):
        raise TypeError(f"expected a NamedSharding, a PartitionSpec or None, got {sharding!r}.")
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        raise ShardingError(
            f"{sharding} names mesh axes, but no mesh is active. Pass NamedSharding(mesh, spec), or use jax.set_mesh."
        )
    return NamedSharding(mesh, sharding)


def _devices_along(mesh: Any, entry: Any) -> int:
    names = () if entry is None else (entry,) if isinstance(entry, str) else entry
    unknown = [n for n in names if n not in mesh.shape]
    if unknown:
        raise ShardingError(f"unknown mesh axes {unknown}; the mesh has {tuple(mesh.shape)}.")
    return math.prod(mesh.shape[n] for n in names)


def check_fits(q: Any, sharding: NamedSharding) -> None:
    """Raise unless every device gets whole blocks, and as many entries as the others."""
    entries = full_spec(sharding.spec, q.ndim, repr(q))
    for axis, entry in enumerate(entries):
        devices = _devices_along(sharding.mesh, entry)
        if devices == 1:
            continue
        if q.blocked is None or axis != q.ndim + q.blocked:
            if q.shape[axis] % devices:
                raise ShardingError(f"axis {axis} of {q!r} has {q.shape[axis]} entries, not a multiple of {devices}.")
            continue
        _check_blocked(q, axis, devices)


def _check_blocked(q: Any, axis: int, devices: int) -> None:
    size = q.shape[axis]
    unit = max(p.unit for p in q.parts)
    if q.pad or size % (unit * devices):
        share = size // devices if size % devices == 0 else 0
        fits = [b for b in range(unit, 1, -1) if share and share % b == 0 and b % 2 == 0]
        hint = f"a block size of {fits[0]} fits" if fits and q.format == "nf4" else f"split another axis than {axis}"
        raise ShardingError(
            f"splitting axis {axis} of {q!r} over {devices} devices would cut a block of {unit} values in two; {hint}."
        )


def constrain(dense: jax.Array, sharding: Any) -> jax.Array:
    """`dense` with a sharding meant for its last axes; inside shard_map, where it means nothing, unchanged."""
    if sharding is None or not isinstance(sharding, NamedSharding):
        return dense
    if any(t == jax.sharding.AxisType.Manual for t in jax.sharding.get_abstract_mesh().axis_types):
        return dense
    entries = (*[None] * (dense.ndim - len(sharding.spec)), *sharding.spec)
    if len(entries) != dense.ndim or any(
        n % _devices_along(sharding.mesh, e) for n, e in zip(dense.shape, entries, strict=True)
    ):
        return dense
    return jax.lax.with_sharding_constraint(dense, NamedSharding(sharding.mesh, PartitionSpec(*entries)))
