"""Abstract values: shape and dtype, the mesh axes of an enclosing shard_map they vary over, explicit shardings."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import mesh as _mesh
from jax._src.core import ShardingTypeError as ShardingTypeError
from jax.sharding import PartitionSpec

from .traces import Tracer, is_staging

ShapedArray = _core.ShapedArray

_result_avals: dict[Any, list[Any] | None] = {}
_RESULT_AVALS_LIMIT = 8192
_aval = operator.attrgetter("aval")
_shape_and_dtype = operator.attrgetter("shape", "dtype")


def result_avals(primitive: Any, args: Sequence[Any], params: dict[str, Any]) -> list[Any] | None:
    """Shapes and dtypes the primitive's own rule promises, or None where it has no such rule. Remembered."""
    if primitive.multiple_results:  # these often carry jaxprs, which a memo would keep alive
        return _evaluated(primitive, args, params)
    key = (primitive, tuple(map(_shape_and_dtype, map(_aval, args))), tuple(params.items()), _config.enable_x64.value)
    try:
        return _result_avals[key]
    except TypeError:  # an unhashable parameter
        return _evaluated(primitive, args, params)
    except KeyError:
        if len(_result_avals) >= _RESULT_AVALS_LIMIT:
            _result_avals.clear()
        found = _result_avals[key] = _evaluated(primitive, args, params)
        return found


def _evaluated(primitive: Any, args: Sequence[Any], params: dict[str, Any]) -> list[Any] | None:
    abstract_eval = getattr(primitive, "abstract_eval", None)
    if abstract_eval is None:
        return None
    types = [jax.typeof(arg) for arg in args]
    try:
        out = abstract_eval(*types, **params)[0]
    except _core.ShardingTypeError:  # explicit shardings from which JAX cannot tell that of the result; a handler may
        out = abstract_eval(*(ShapedArray(t.shape, t.dtype) for t in types), **params)[0]
    return list(out) if primitive.multiple_results else [out]


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
    held = [varying_axes(value) for value in values]
    axes = frozenset[str]().union(*held)
    return [value if has == axes else vary(value, axes) for value, has in zip(values, held, strict=True)]


def zeros_like_in(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.Array:
    """Zeros that vary over the axes `like` varies over, so they can start a loop that adds to them."""
    return vary(jnp.zeros(shape, dtype), varying_axes(like))


def result_type(shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
    """The type of a result computed from `like` (a value or a type): it varies over the axes `like` varies over."""
    aval = like if isinstance(like, ShapedArray) else jax.typeof(like)
    axes = varying_axes_of_type(aval)
    return _varying(shape, dtype, aval, axes) if axes else ShapedArray(shape, dtype)


def derived_aval(shape: tuple[int, ...], dtype: Any, leaves: Sequence[Any]) -> Any:
    """Aval of an array computed from `leaves`: it varies over the axes its parts vary over."""
    varying = [leaf.aval for leaf in leaves if isinstance(leaf, Tracer) and varying_axes_of_type(leaf.aval)]
    if not varying:
        return ShapedArray(shape, dtype)
    return _varying(shape, dtype, varying[0], frozenset[str]().union(*map(varying_axes_of_type, varying)))


def _varying(shape: tuple[int, ...], dtype: Any, like: Any, axes: frozenset[str]) -> Any:
    sharding = like.sharding.update(spec=PartitionSpec(*[None] * len(shape)))
    mat = like.mat.update(varying=axes)
    return like.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding, manual_axis_type=mat)


def explicit_axes() -> tuple[str, ...] | None:
    """Those of the mesh in use, where others are manual (in a shard_map over some axes); None stands for all."""
    kinds = jax.sharding.get_abstract_mesh()
    manual = any(kind == jax.sharding.AxisType.Manual for kind in kinds.axis_types)
    return tuple(n for n in kinds.axis_names if n not in kinds.manual_axes) if manual else None


def without_manual_sharding(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters of a product without an `out_sharding` that says nothing, as JAX's own rules set in a shard_map."""
    wanted = params.get("out_sharding")
    manual = wanted is not None and not wanted.mesh.empty and wanted.mesh.are_all_axes_manual
    return {**params, "out_sharding": None} if manual else params


def mesh_axes(entry: Any) -> tuple[str, ...]:
    """The axes of a mesh that an entry of a PartitionSpec names.

    >>> mesh_axes(None), mesh_axes("x"), mesh_axes(("x", "y"))
    ((), ('x',), ('x', 'y'))
    """
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def typed_by_a_mesh(*values: Any) -> bool:
    """Do the types of values speak of a mesh? Otherwise nothing varies, and nothing is sharded explicitly."""
    return not all(jax.typeof(value).sharding.mesh.empty for value in values)


def explicit_sharding_of(leaf: Any) -> Any:
    """The sharding that is part of a leaf's type (explicit meshes), or None."""
    try:
        sharding = jax.typeof(leaf).sharding
    except (TypeError, AttributeError):
        return None
    mesh = sharding.mesh
    return sharding if not mesh.empty and mesh._any_axis_explicit else None


def in_mesh_of(leaves: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """Where operations on these may be traced: `auto_axes` asks for types of arguments when it has changed the mesh."""
    found = next((s.mesh.abstract_mesh for s in map(explicit_sharding_of, leaves) if s is not None), None)
    current = jax.sharding.get_abstract_mesh()
    if found is None or current.empty or current == found:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(found)


def on_every_device(x: jax.Array) -> jax.Array:
    """`x` without the split that is part of its type: what merges axes or picks entries needs it whole."""
    sharding = explicit_sharding_of(x)
    return x if sharding is None else jax.sharding.reshard(x, sharding.update(spec=PartitionSpec()))


def sharded_like(x: jax.Array, other: Any) -> jax.Array:
    """`x` with the sharding that is part of the type of `other`, an array of the same shape."""
    sharding = explicit_sharding_of(other)
    return x if sharding is None else jax.sharding.reshard(x, sharding)


def with_sharding_type(aval: Any, sharding: Any) -> Any:
    return aval.update(sharding=sharding)


def active_mesh() -> Any:
    """The mesh a bare PartitionSpec refers to here: that of `jax.set_mesh`, else that of `with mesh:`; else None.

    In a program being traced it is the abstract one, since JAX uses a trace again on meshes with other devices.
    """
    abstract = jax.sharding.get_abstract_mesh()
    manual = any(t == jax.sharding.AxisType.Manual for t in abstract.axis_types)
    current = abstract if manual or is_staging() else _mesh.get_concrete_mesh()
    found = (current, _mesh.thread_resources.env.physical_mesh)
    return next((mesh for mesh in found if not mesh.empty), None)


def bytes_on_device(array: Any) -> int:
    """Bytes that a computed array occupies, padding included."""
    return array.on_device_size_in_bytes()
