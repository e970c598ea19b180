"""Which part of every stored tensor of a leaf a device holds, or a slice needs; and why it cannot be cut so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.tree_util as jtu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eformer._core import ImplicitArray
from eformer._formats.activations.array import ActivationArray
from eformer._formats.activations.numbers import FIELDS
from eformer._formats.base import QuantizedArray
from eformer._formats.shapes import blocked_axis, cuts_of_part, pad_after
from eformer._formats.sharding import ShardingError, check_fits
from eformer._jax.avals import mesh_axes
from eformer._lora.array import LoraArray
from eformer.errors import CheckpointError


def sharding_on(mesh: Mesh, spec: Any) -> NamedSharding:
    """The sharding of a spec on a mesh, if it names axes the mesh has, and each of them once."""
    if not isinstance(spec, PartitionSpec):
        raise CheckpointError(f"is to be split as {spec!r}, which is not a PartitionSpec.")
    names = [name for entry in spec for name in mesh_axes(entry)]
    wrong = [name for name in names if name not in mesh.shape or names.count(name) > 1]
    if wrong:
        why = "is not an axis of the mesh" if wrong[0] not in mesh.shape else "is used twice"
        raise CheckpointError(f"cannot be split as {spec} over {dict(mesh.shape)}: {wrong[0]!r} {why}.")
    return NamedSharding(mesh, spec)


def specs_of(leaf: Any, mesh: Any, spec: Any) -> list[PartitionSpec]:
    """The spec of every stored array of a leaf, in the order of its pytree, if the leaf can be split so."""
    sharding = sharding_on(mesh, spec)
    try:
        if isinstance(leaf, (QuantizedArray, ActivationArray)):
            check_fits(getattr(leaf, "w", leaf), sharding)
            specs = leaf.child_specs(sharding.spec)
        elif isinstance(leaf, ImplicitArray):
            specs = _of_other(leaf, sharding)
        else:
            check_fits(leaf, sharding)
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


Read = Callable[[str, Any], Any]


# What can be read in part, and says itself how it is split.
READABLE = (QuantizedArray, ActivationArray, LoraArray)


def read_part(q: Any, tensors: Mapping[int, str], index: Any, fetch: Read) -> Any:
    """`q`, whose arrays are shapes standing for `tensors` (by id), cut to `index`; `fetch` reads part of a tensor."""
    if isinstance(q, LoraArray):
        return _read_lora(q, tensors, index, fetch)
    if not isinstance(q, ActivationArray):
        return _read_quantized(q, tensors, index, fetch)
    if not isinstance(q.w, QuantizedArray):
        raise CheckpointError(f"rounds inputs of a {type(q.w).__name__}, of which no slices can be read.")
    cuts = normalized(index, q.shape)
    numbers = {}
    for name in FIELDS:
        if (number := getattr(q, name)) is not None:
            cut = tuple(c if n > 1 else slice(None) for c, n in zip(cuts, number.shape, strict=True))
            numbers[name] = fetch(tensors[id(number)], cut)
    return q.around(_read_quantized(q.w, tensors, tuple(cuts), fetch), **numbers)


def _read_quantized(q: Any, tensors: Mapping[int, str], index: Any, fetch: Read) -> Any:
    cuts = normalized(index, q.shape)
    if (pad := pad_after(q, cuts)) is None:
        axis, unit = blocked_axis(q) or 0, max(part.unit for part in q.parts)
        raise CheckpointError(
            f"holds blocks of {unit} values along axis {axis}, and {cuts[axis].start}:{cuts[axis].stop} would cut one.",
            fix=f"Begin and end at multiples of {unit}, or slice another axis.",
        )
    parts = {}
    for part in q.parts:
        stored = getattr(q, part.field)
        if stored is None:
            parts[part.field] = None
        elif id(stored) in tensors:
            parts[part.field] = fetch(tensors[id(stored)], cuts_of_part(q, part, stored.shape, cuts))
        else:  # compressed: small, and not laid out like the others, so it is read whole
            whole: Any = jtu.tree_map(lambda shape: fetch(tensors[id(shape)], ...), stored)
            parts[part.field] = whole.expanded()[cuts_of_part(q, part, whole.shape, cuts)]
    return q.moved(parts, q.blocked, pad=pad)


def _read_lora(q: LoraArray, tensors: Mapping[int, str], index: Any, fetch: Read) -> LoraArray:
    """A weight with an adapter: each factor is cut along the axes it shares with that."""
    cuts = normalized(index, q.shape)
    middle = q.ndim - q.right
    batch, every = middle - q.left, slice(None)
    if isinstance(q.w, READABLE):
        w = read_part(q.w, tensors, tuple(cuts), fetch)
    elif id(q.w) in tensors:
        w = fetch(tensors[id(q.w)], tuple(cuts))
    else:
        raise CheckpointError(f"is an adapter over a {type(q.w).__name__}, of which no slices can be read.")
    a = fetch(tensors[id(q.a)], (*cuts[:middle], every))
    b = fetch(tensors[id(q.b)], (*cuts[:batch], every, *cuts[middle:]))
    return LoraArray(w, a, b, scale=q.scale, left=q.left, right=q.right, dropout=q.dropout)


def normalized(index: Any, shape: tuple[int, ...]) -> list[slice]:
    """One slice of step 1 per axis, within bounds and not empty.

    >>> normalized((slice(1, None), ...), (4, 5))
    [slice(1, 4, 1), slice(0, 5, 1)]
    """
    given = list(index) if isinstance(index, tuple) else [index]
    missing = len(shape) - len(given) + given.count(...)
    if given.count(...) > 1 or missing < 0:
        raise IndexError(f"{index!r} does not index an array of shape {list(shape)}.")
    at = given.index(...) if ... in given else len(given)
    given[at : at + 1] = [slice(None)] * missing
    cuts = []
    for axis, (cut, size) in enumerate(zip(given, shape, strict=True)):
        if not isinstance(cut, slice):
            raise TypeError(f"axis {axis} of a quantized array is read by a slice, got {cut!r}.")
        start, stop, step = cut.indices(size)
        if step != 1 or stop <= start:
            raise IndexError(f"axis {axis}: {cut!r} of {size} entries is empty or has a step; read a plain range.")
        cuts.append(slice(start, stop, 1))
    return cuts
