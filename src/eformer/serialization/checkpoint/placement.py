"""Which part of every stored tensor of a leaf goes to which device, and why a leaf cannot be split as asked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.tree_util as jtu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eformer._core import ImplicitArray
from eformer._formats.base import QuantizedArray
from eformer._formats.sharding import ShardingError, check_fits
from eformer.errors import CheckpointError


def sharding_on(mesh: Mesh, spec: Any) -> NamedSharding:
    """The sharding of a spec on a mesh, if it names axes the mesh has, and each of them once."""
    if not isinstance(spec, PartitionSpec):
        raise CheckpointError(f"is to be split as {spec!r}, which is not a PartitionSpec.")
    names = [name for entry in spec for name in _names(entry)]
    wrong = [name for name in names if name not in mesh.shape or names.count(name) > 1]
    if wrong:
        why = "is not an axis of the mesh" if wrong[0] not in mesh.shape else "is used twice"
        raise CheckpointError(f"cannot be split as {spec} over {dict(mesh.shape)}: {wrong[0]!r} {why}.")
    return NamedSharding(mesh, spec)


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def specs_of(leaf: Any, mesh: Any, spec: Any) -> list[PartitionSpec]:
    """The spec of every stored array of a leaf, in the order of its pytree, if the leaf can be split so."""
    sharding = sharding_on(mesh, spec)
    try:
        if isinstance(leaf, QuantizedArray):
            check_fits(leaf, sharding)
            specs = leaf.child_specs(sharding.spec)
        elif isinstance(leaf, ImplicitArray):
            specs = _of_other(leaf, sharding)
        else:
            _check_dense(leaf.shape, sharding)
            specs = sharding.spec
    except ShardingError as err:
        raise CheckpointError(f"cannot be split as {sharding.spec}: {err}") from err
    return jtu.tree_leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def child_specs(leaf: Any, tensors: Mapping[int, str], sharding: NamedSharding) -> dict[str, PartitionSpec] | None:
    """The spec of every tensor of a leaf whose arrays are shapes (known by id); None if it is not an array."""
    if not hasattr(leaf, "shape"):
        return None
    flat = specs_of(leaf, sharding.mesh, sharding.spec)
    return {tensors[id(shape)]: spec for shape, spec in zip(jtu.tree_leaves(leaf), flat, strict=True)}


def _of_other(leaf: ImplicitArray, sharding: NamedSharding) -> Any:
    if not any(sharding.spec):  # a copy on every device
        return jtu.tree_map(lambda _: PartitionSpec(), leaf)
    specs = leaf.child_specs(sharding.spec)
    if specs is None:
        raise CheckpointError(f"is of type {type(leaf).__name__}, which does not say how it is split over devices.")
    return specs


def _check_dense(shape: tuple[int, ...], sharding: NamedSharding) -> None:
    spec, mesh = sharding.spec, sharding.mesh
    if len(spec) > len(shape):
        raise ShardingError(f"the spec has {len(spec)} entries, but the array has only {len(shape)} axes.")
    for axis, entry in enumerate(spec):
        count = math.prod(mesh.shape[name] for name in _names(entry))
        if shape[axis] % count:
            raise ShardingError(f"axis {axis} has {shape[axis]} entries, not a multiple of {count} devices.")
