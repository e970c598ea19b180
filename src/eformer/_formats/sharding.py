"""Splitting a quantized array over devices: the spec of the logical array, mapped to every stored array."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from eformer._jax import avals, traces
from eformer.errors import ShardingError


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
                lambda path, leaf, part=part: _leaf_spec(q, entries, blocked, part, leaf, path), array
            )
    return q.replaced(**specs)


def _leaf_spec(
    q: Any, entries: tuple[Any, ...], blocked: int | None, part: Any, leaf: Any, path: tuple[Any, ...]
) -> PartitionSpec:
    free = [e for axis, e in enumerate(entries) if axis != blocked]
    sizes = [n for axis, n in enumerate(q.shape) if axis != blocked]
    # A compressed absmax keeps small arrays that are not laid out like the others.
    if path and path[-1].name in ("scale", "offset"):
        batch = min(leaf.ndim, q.ndim - q.core_ndim)
        return PartitionSpec(*(entries[:batch]))
    # A size-1 axis of a scale serves the whole logical axis: every device needs it.
    front = [e if leaf.shape[i] == sizes[i] else None for i, e in enumerate(free)]
    if part.tail and blocked is not None:
        whole = leaf.shape[len(free)] * part.unit >= q.shape[blocked]
        front.append(entries[blocked] if whole else None)
    return PartitionSpec(*front, *[None] * (part.tail - 1))


def place(q: Any, sharding: Any) -> Any:
    if sharding is None:
        return q.replaced(sharding=None)
    leaves = jax.tree_util.tree_leaves(q)
    named = _named(sharding, leaves)
    check_fits(q, named)
    traced = isinstance(named.mesh, AbstractMesh) or _is_traced(leaves)
    put = _constrainer(named.mesh) if traced else jax.device_put
    specs = child_specs(q, named.spec)
    shardings = jax.tree_util.tree_map(
        lambda s: NamedSharding(named.mesh, s), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    placed = {
        p.field: jax.tree_util.tree_map(put, getattr(q, p.field), getattr(shardings, p.field))
        for p in q.parts
        if getattr(q, p.field) is not None
    }
    # In full, so that it still means the same axes behind new leading ones.
    full = PartitionSpec(*full_spec(named.spec, q.ndim, repr(q)))
    return q.replaced(**placed, sharding=NamedSharding(named.mesh, full))


def _is_traced(leaves: Sequence[Any]) -> bool:
    """Are these, or is whatever is made of them here, values of a traced program?"""
    return any(isinstance(leaf, traces.Tracer) for leaf in leaves) or traces.is_staging()


def _constrainer(mesh: Any) -> Callable[[Any, NamedSharding], Any]:
    return jax.sharding.reshard if mesh.are_all_axes_explicit else jax.lax.with_sharding_constraint


def _named(sharding: Any, leaves: Sequence[Any]) -> NamedSharding:
    """`sharding` with the mesh it is meant for, one with devices wherever the arrays have some."""
    if isinstance(sharding, NamedSharding):
        named = _with_devices(sharding, leaves)
        if named is None:
            raise ShardingError(
                f"{sharding} has a mesh without devices, and neither the array nor an active mesh says which ones are "
                "meant. Pass NamedSharding(mesh, spec) with a mesh of devices, or use jax.set_mesh."
            )
        return named
    if not isinstance(sharding, PartitionSpec):
        raise TypeError(f"expected a NamedSharding, a PartitionSpec or None, got {sharding!r}.")
    mesh = avals.active_mesh()
    if mesh is None:
        raise ShardingError(
            f"{sharding} names mesh axes, but no mesh is active. Pass NamedSharding(mesh, spec), or use jax.set_mesh."
        )
    return NamedSharding(mesh, sharding)


def _with_devices(sharding: NamedSharding, leaves: Sequence[Any]) -> NamedSharding | None:
    """A sharding made inside jit has an abstract mesh. Outside, its devices are those the arrays lie on."""
    mesh = sharding.mesh
    if not isinstance(mesh, AbstractMesh) or _is_traced(leaves):
        return sharding
    held = [x.sharding.mesh for x in leaves if isinstance(getattr(x, "sharding", None), NamedSharding)]
    for found in (*held, avals.active_mesh()):
        if isinstance(found, Mesh) and found.shape_tuple == mesh.shape_tuple:
            return NamedSharding(found, sharding.spec)
    return None


def from_mesh_and_axis(mesh_and_axis: Any) -> NamedSharding:
    """The sharding of a pair of a mesh and an axis specification."""
    pair = mesh_and_axis if isinstance(mesh_and_axis, (tuple, list)) else ()
    if len(pair) != 2 or not isinstance(pair[0], (Mesh, AbstractMesh)):
        raise TypeError(
            f"expected a pair (mesh, axis), got {mesh_and_axis!r}. Pass for example (mesh, PartitionSpec(None, 'x')); "
            "(mesh, None) copies the array to every device."
        )
    mesh, axis = pair
    entries = () if axis is None else (axis,) if isinstance(axis, str) else axis
    if not isinstance(entries, (PartitionSpec, tuple, list)) or not all(map(_is_entry, entries)):
        raise TypeError(
            f"{axis!r} does not say how to split the axes of an array: allowed are None, the name of a mesh axis, or a "
            f"PartitionSpec, tuple or list with one entry per axis (None, a name, or a tuple of names). The mesh has "
            f"{tuple(mesh.axis_names)}; pass for example (mesh, (None, {mesh.axis_names[0]!r}))."
        )
    return NamedSharding(mesh, entries if isinstance(entries, PartitionSpec) else PartitionSpec(*entries))


def _is_entry(entry: Any) -> bool:
    return (
        entry is None or isinstance(entry, str) or (isinstance(entry, tuple) and all(isinstance(e, str) for e in entry))
    )


def after_reshape(q: Any, new: Sequence[int], groups: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Any:
    """The sharding carried through a reshape to `new`; `groups` are runs of old and new axes of equal size.

    A split of the first axis of a run is one into whole stretches of memory, which merging and dividing axes keeps. One
    of a later axis is lost where axes are merged. None when nothing is left of what was split.
    """
    if not isinstance(q.sharding, NamedSharding) or len(q.sharding.spec) > q.ndim:
        return None
    mesh, entries = q.sharding.mesh, full_spec(q.sharding.spec, q.ndim, repr(q))
    moved: list[Any] = [None] * len(new)
    for old_axes, new_axes in groups:
        old_axes, new_axes = [a for a in old_axes if q.shape[a] != 1], [a for a in new_axes if new[a] != 1]
        if old_axes and all(entries[a] is None for a in old_axes[1:]):
            entry = entries[old_axes[0]]
            if new[new_axes[0]] % _devices_along(mesh, entry) == 0:
                moved[new_axes[0]] = entry
    if any(e is not None for e in entries) and all(e is None for e in moved):
        return None
    return NamedSharding(mesh, PartitionSpec(*moved))


def _devices_along(mesh: Any, entry: Any) -> int:
    names = avals.mesh_axes(entry)
    unknown = [n for n in names if n not in mesh.shape]
    if unknown:
        raise ShardingError(f"unknown mesh axes {unknown}; the mesh has {tuple(mesh.shape)}.")
    return math.prod(mesh.shape[n] for n in names)


def check_fits(q: Any, sharding: NamedSharding) -> None:
    """Raise unless every device gets whole blocks, and as many entries as the others; `q` may be dense."""
    entries, blocked = full_spec(sharding.spec, q.ndim, repr(q)), getattr(q, "blocked", None)
    for axis, entry in enumerate(entries):
        devices = _devices_along(sharding.mesh, entry)
        if devices == 1:
            continue
        if blocked is not None and axis == q.ndim + blocked:
            _check_blocked(q, axis, devices)
        elif q.shape[axis] % devices:
            raise ShardingError(f"axis {axis} of {q!r} has {q.shape[axis]} entries, not a multiple of {devices}.")


def _check_blocked(q: Any, axis: int, devices: int) -> None:
    size = q.shape[axis]
    unit = max(p.unit for p in q.parts)
    if q.pad or size % (unit * devices):
        share = size // devices if size % devices == 0 else 0
        step = getattr(q, "block_step", 0)
        fits = [b for b in range(unit, 1, -1) if share and step and share % b == 0 and b % step == 0]
        hint = f"a block size of {fits[0]} fits" if fits else f"split another axis than {axis}"
        raise ShardingError(
            f"splitting axis {axis} of {q!r} over {devices} devices would cut a block of {unit} values in two; {hint}."
        )


def constrain(dense: jax.Array, sharding: Any) -> jax.Array:
    """`dense` with a sharding meant for its last axes; inside shard_map, where it means nothing, unchanged."""
    if sharding is None or not isinstance(sharding, NamedSharding):
        return dense
    if any(t == jax.sharding.AxisType.Manual for t in jax.sharding.get_abstract_mesh().axis_types):
        return dense
    named = _with_devices(sharding, [dense])
    if named is None:
        return dense
    entries = (*[None] * (dense.ndim - len(named.spec)), *named.spec)
    if len(entries) != dense.ndim or any(
        n % _devices_along(named.mesh, e) for n, e in zip(dense.shape, entries, strict=True)
    ):
        return dense
    return _constrainer(named.mesh)(dense, NamedSharding(named.mesh, PartitionSpec(*entries)))
