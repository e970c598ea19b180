"""A weight with more arrays beside it: factors, an order, an adapter. What is the same for all of these.

Everything beside a weight says which axis of the weight each of its axes is. So one function serves all types where the
array is split over devices, cut, or joined with others.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from eformer._core import default_handler, implicit, register
from eformer._core.fields import layout
from eformer._core.trace import is_implicit
from eformer._jax import avals

from .base import Packed
from .sharding import full_spec

W = TypeVar("W", bound="Wrapped")
Axes = Sequence[int | None]
Product = Callable[[Any, jax.Array, Any, bool, dict[str, Any]], Any]


def on_weight(op: Callable[..., Any], *operands: Any) -> Any:
    """An operation on a weight. Handlers run outside dispatch, so it is turned on again for an implicit one."""
    return implicit(op)(*operands) if any(map(is_implicit, operands)) else op(*operands)


def redo(primitive: Any, params: dict[str, Any], *operands: Any) -> Any:
    """The operation that is being handled, on other operands."""
    return on_weight(lambda *given: default_handler(primitive, *given, **params), *operands)


def multiply(primitive: Any, x: Any, weight: Any, q_first: bool, params: dict[str, Any]) -> Any:
    """The product that is being handled, with another weight."""
    return redo(primitive, params, *((weight, x) if q_first else (x, weight)))


class Wrapped(Packed, frozen=True):
    """Base of the arrays around a weight. Their first field is the weight: dense, quantized, or another such array."""

    compiles_products: ClassVar[bool] = True

    def beside(self) -> Mapping[str, Axes]:
        """For every other array there is, which axis of the weight each of its axes is; None is an axis of its own.

        An axis of size 1 serves the whole axis of the weight.
        """
        raise NotImplementedError

    def uncut(self) -> Iterable[int]:
        """The axes of which no part can be taken."""
        return ()

    @property
    def weight(self) -> Any:
        return getattr(self, layout(type(self)).children[0])

    def around(self: W, weight: Any, **changes: Any) -> W:
        """The same around another weight."""
        return dataclasses.replace(self, **{layout(type(self)).children[0]: weight}, **changes)

    def moved(self: W, op: Callable[[Any, Axes], Any], **changes: Any) -> W:
        """`op(array, axes)` for the weight and everything beside it; `axes` are those of the weight."""
        weight = on_weight(lambda w: op(w, range(self.ndim)), self.weight)
        return self.around(weight, **{name: op(getattr(self, name), axes) for name, axes in self.beside().items()},
                           **changes)  # fmt: skip

    def compute_shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    def compute_dtype(self) -> Any:
        return self.weight.dtype

    def stored_like(self: W, other: Any) -> W:
        alike = type(other) is type(self) and is_implicit(self.weight)
        return self.around(self.weight.stored_like(other.weight)) if alike else self

    # -- several devices -----------------------------------------------------------------------------------------------

    @property
    def sharding(self) -> Any:
        return getattr(self.weight, "sharding", None)

    def stored_for(self: W, sharding: Any) -> W:
        return self.around(self.weight.stored_for(sharding)) if is_implicit(self.weight) else self

    def child_specs(self, spec: PartitionSpec) -> Any:
        """One PartitionSpec per stored array: what is beside the weight is split as the axes they share."""
        entries = full_spec(spec, self.ndim, repr(self))
        weight = self.weight.child_specs(spec) if is_implicit(self.weight) else PartitionSpec(*entries)
        if weight is None:
            return None
        specs = dict.fromkeys(layout(type(self)).children[1:])
        for name, axes in self.beside().items():
            sizes = getattr(self, name).shape
            held = [None if axis is None or n == 1 else entries[axis] for axis, n in zip(axes, sizes, strict=True)]
            specs[name] = PartitionSpec(*held)  # pyright: ignore[reportArgumentType]
        return self.tree_unflatten(self.tree_flatten_with_keys()[1], (weight, *specs.values()))

    def with_sharding(self: W, sharding: NamedSharding) -> W:
        """A copy split over devices as `sharding` splits the logical array."""
        weight = self.weight
        if is_implicit(weight) and not hasattr(weight, "with_sharding"):
            raise TypeError(f"{weight!r} cannot be split over devices.")
        weight = weight.with_sharding(sharding) if is_implicit(weight) else jax.device_put(weight, sharding)
        if not self.beside() or not isinstance(sharding, NamedSharding):
            return self.around(weight)
        specs = Wrapped.child_specs(self, sharding.spec)
        put = {
            n: jax.device_put(getattr(self, n), NamedSharding(sharding.mesh, getattr(specs, n))) for n in self.beside()
        }
        return self.around(weight, **put)


# -- products ----------------------------------------------------------------------------------------------------------


def register_product(function: Product) -> Product:
    """Make `function(primitive, x, q, q_first, params)` the product of any x with a `q` of its type, on either side."""
    kind = typing.get_type_hints(function)["q"]

    def right(primitive: Any, lhs: Any, rhs: Any, **params: Any) -> Any:
        return function(primitive, lhs, rhs, False, params)

    def left(primitive: Any, lhs: Any, rhs: Any, **params: Any) -> Any:
        return function(primitive, rhs, lhs, True, params)

    for handler, types in ((right, (jax.Array, kind)), (left, (kind, jax.Array))):
        handler.__module__, handler.__qualname__ = function.__module__, function.__qualname__
        handler.__annotations__ = {"lhs": types[0], "rhs": types[1]}
        register("dot_general")(handler)
    return function


def axes_of(dimension_numbers: Any, q_first: bool) -> Any:
    """The axes of a product that are contracted, of q and of x, and those that number matrices, of q and of x."""
    return tuple(pair if q_first else pair[::-1] for pair in dimension_numbers)


def result_dtype(primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """The dtype that a product promises, by the rules of the primitive; None where it has none."""
    if (wanted := params.get("preferred_element_type")) is not None:
        return wanted
    (aval,) = avals.result_avals(primitive, operands, params) or [None]
    return None if aval is None else aval.dtype


def is_plain_ragged(params: dict[str, Any], x_ndim: int, q_ndim: int) -> bool:
    """Rows of x in consecutive groups, each times its own matrix of a stack, as `lax.ragged_dot` does?"""
    numbers = params["ragged_dot_dimension_numbers"]
    (x_axes, _), batch = numbers.dot_dimension_numbers
    ragged = tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions)
    plain = (tuple(x_axes), tuple(map(tuple, batch)), ragged) == ((1,), ((), ()), ((0,), (0,)))
    return plain and (x_ndim, q_ndim) == (2, 3) and params.get("group_offset") is None


# -- parts, stacks and dtypes ------------------------------------------------------------------------------------------


@register("convert_element_type")
def convert_element_type(q: Wrapped, *, new_dtype: Any, **params: Any) -> Any:
    """Another dtype for the weight; what is beside it stays in its own."""
    if params.get("sharding") is not None or not jnp.issubdtype(new_dtype, jnp.floating):
        return NotImplemented
    return q.around(on_weight(lambda w: lax.convert_element_type(w, new_dtype), q.weight))


@register("slice")
def slice_(q: Wrapped, *, start_indices: Any, limit_indices: Any, strides: Any = None, **params: Any) -> Any:
    """Some matrices of a stack, or a part of each."""
    cuts = list(zip(start_indices, limit_indices, strides or (1,) * q.ndim, strict=True))
    if any(cuts[axis] != (0, q.shape[axis], 1) for axis in q.uncut()):
        return NotImplemented

    def part(x: Any, axes: Axes) -> Any:
        ends = [
            (0, n, 1) if axis is None or n != q.shape[axis] else cuts[axis]
            for axis, n in zip(axes, x.shape, strict=True)
        ]
        return lax.slice(x, *zip(*ends, strict=True))

    return q.moved(part)


@register("squeeze")
def squeeze(q: Wrapped, *, dimensions: Any, **params: Any) -> Any:
    """One matrix of a stack."""
    if any(axis >= _batch(q) for axis in dimensions):
        return NotImplemented
    return q.moved(lambda x, axes: lax.squeeze(x, [i for i, axis in enumerate(axes) if axis in dimensions]))


@register("unstack")
def unstack(q: Wrapped, *, axis: int, **params: Any) -> Any:
    return implicit(lambda q: [lax.index_in_dim(q, i, axis, keepdims=False) for i in range(q.shape[axis])])(q)


@register("broadcast_in_dim")
def broadcast_in_dim(q: Wrapped, *, shape: Any, broadcast_dimensions: Any, **params: Any) -> Any:
    """More axes of size 1 in front."""
    more = len(shape) - q.ndim
    if tuple(shape) != (1,) * more + q.shape or tuple(broadcast_dimensions) != tuple(range(more, len(shape))):
        return NotImplemented
    return q.moved(lambda x, _: lax.expand_dims(x, range(more)))


@register("concatenate")
def concatenate(first: Wrapped, *rest: Wrapped, dimension: int, **params: Any) -> Any:
    """Along an axis that numbers matrices."""
    arrays, beside = (first, *rest), first.beside()
    settings = [getattr(first, name) for name in layout(type(first)).aux]
    for q in arrays:
        if type(q) is not type(first) or q.beside() != beside or dimension >= _batch(q):
            return NotImplemented
        if [getattr(q, name) for name in layout(type(q)).aux] != settings:
            return NotImplemented
    joined = {name: _joined(arrays, name, axes, dimension) for name, axes in beside.items()}
    if any(x is None for x in joined.values()):
        return NotImplemented
    weight = on_weight(lambda *ws: lax.concatenate(ws, dimension), *(q.weight for q in arrays))
    return first.around(weight, **joined)


def _joined(arrays: Sequence[Wrapped], name: str, axes: Axes, dimension: int) -> jax.Array | None:
    """What is beside the weights, one behind the other; None where that does not fit."""
    held = [getattr(q, name) for q in arrays]
    shapes = [
        [n if axis is None or axis >= _batch(q) else q.shape[axis] for axis, n in zip(axes, x.shape, strict=True)]
        for q, x in zip(arrays, held, strict=True)
    ]
    if len({tuple(n for i, n in enumerate(shape) if axes[i] != dimension) for shape in shapes}) > 1:
        return None
    return lax.concatenate([jnp.broadcast_to(x, s) for x, s in zip(held, shapes, strict=True)], axes.index(dimension))


@register("stack")
def stack(*operands: Wrapped, axis: int, **params: Any) -> Any:
    if axis:
        return NotImplemented
    return implicit(lambda *qs: lax.concatenate([lax.expand_dims(q, [0]) for q in qs], 0))(*operands)


# -- lookups of numbers that have one axis for every axis of the weight ------------------------------------------------


def gathered(numbers: jax.Array, q: Wrapped, indices: jax.Array, params: dict[str, Any]) -> jax.Array:
    """Those of what a `gather` takes out of the weight. An index out of range, where values are filled, has some."""
    where, mode = params["dimension_numbers"], lax.GatherScatterMode.CLIP
    shared = [n == 1 for n in numbers.shape]
    for axis in where.operand_batching_dims:
        numbers = jnp.repeat(numbers, q.shape[axis], axis) if shared[axis] else numbers
    places = jnp.where(jnp.array([shared[axis] for axis in where.start_index_map], bool), 0, indices)
    sizes = [min(n, cut) for n, cut in zip(numbers.shape, params["slice_sizes"], strict=True)]
    return lax.gather(numbers, places, where, sizes, mode=mode)


def taken(numbers: jax.Array, starts: Sequence[jax.Array], sizes: Sequence[int]) -> jax.Array:
    """Those of what a `dynamic_slice` takes out of the weight."""
    kept = [min(n, cut) for n, cut in zip(numbers.shape, sizes, strict=True)]
    places = [jnp.clip(at, 0, n - size) for at, n, size in zip(starts, numbers.shape, kept, strict=True)]
    return lax.dynamic_slice(numbers, places, kept)


def _batch(q: Any) -> int:
    """How many axes number matrices."""
    return 0 if q.core_ndim is None else q.ndim - q.core_ndim
