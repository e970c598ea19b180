"""`ScaledArray`: a weight whose inputs were multiplied by a factor each, which the product takes back."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from eformer._core import ImplicitArray, aux_field, default_handler, implicit, materialize, register
from eformer._core.trace import is_implicit

from .. import sharding as _sharding
from ..arguments import is_storage
from ..blocks import wide


@dataclasses.dataclass
class ScaledArray(ImplicitArray, frozen=True):
    """`w * factor`, over any `w`: quantized, dense, or another implicit array.

    Invariants: `factor` is floating, of the rank of `w`, and broadcasts to it. The last `core` axes belong to one
    matrix, those in front number matrices. A product multiplies the other operand, or the result, and leaves `w`
    as it is.

    >>> q = ScaledArray(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[2.0], [0.5]]))
    >>> q.materialize().tolist(), (jnp.array([1.0, 10.0]) @ q).tolist()
    ([[2.0, 4.0], [1.5, 2.0]], [17.0, 24.0])
    """

    w: Any
    factor: jax.Array
    core: int = aux_field(default=2, kw_only=True)

    compiles_products: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if is_storage(self.w, self.factor):
            shape, given = tuple(self.w.shape), tuple(self.factor.shape)
            fits = len(shape) == len(given) and all(g in (1, n) for g, n in zip(given, shape, strict=True))
            if not fits or not jnp.issubdtype(self.factor.dtype, jnp.floating):
                raise ValueError(
                    f"factor {self.factor.dtype}{list(given)} does not fit w of shape {list(shape)}: it must be "
                    "floating, with the size of w or 1 along every axis."
                )
        super().__post_init__()

    @property
    def core_ndim(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.core

    @property
    def format(self) -> str:
        return f"{getattr(self.w, 'format', 'dense')}, scaled inputs"

    def compute_shape(self) -> tuple[int, ...]:
        return tuple(self.w.shape)

    def compute_dtype(self) -> Any:
        return self.w.dtype

    def materialize(self) -> jax.Array:
        """The dense array: multiplied in f32 at least, and rounded once to the dtype of `w`."""
        dense = materialize(self.w)
        dtype = wide(dense.dtype, self.factor.dtype)
        return (dense.astype(dtype) * self.factor.astype(dtype)).astype(dense.dtype)

    @property
    def sharding(self) -> Any:
        return getattr(self.w, "sharding", None)

    def child_specs(self, spec: PartitionSpec) -> Any:
        """One PartitionSpec per stored array: the factor is split as the axes it has."""
        entries = _sharding.full_spec(spec, self.ndim, repr(self))
        w = self.w.child_specs(spec) if is_implicit(self.w) else PartitionSpec(*entries)
        own = PartitionSpec(*(e if n > 1 else None for e, n in zip(entries, self.factor.shape, strict=True)))
        return None if w is None else self.tree_unflatten(self.tree_flatten_with_keys()[1], (w, own))

    def stored_for(self, sharding: Any) -> ScaledArray:
        """The weight is stored as it has to be."""
        return dataclasses.replace(self, w=self.w.stored_for(sharding)) if is_implicit(self.w) else self

    def with_sharding(self, sharding: NamedSharding) -> ScaledArray:
        """A copy split over devices as `sharding` splits the logical array."""
        specs = self.child_specs(sharding.spec)
        w = self.w.with_sharding(sharding) if is_implicit(self.w) else jax.device_put(self.w, sharding)
        factor = jax.device_put(self.factor, NamedSharding(sharding.mesh, specs.factor))
        return self.tree_unflatten(self.tree_flatten_with_keys()[1], (w, factor))

    def _storage(self) -> str:
        return f"{self.format}, {8 * self.nbytes / max(self.size, 1):.2f} bits per weight"


def _on_w(op: Any, *operands: Any) -> Any:
    """Handlers run outside dispatch, so it is turned on again."""
    return implicit(op)(*operands) if any(map(is_implicit, operands)) else op(*operands)


@register("dot_general")
def dot_general_right(primitive: Any, lhs: jax.Array, rhs: ScaledArray, **params: Any) -> Any:
    return _dot(primitive, lhs, rhs, False, params)


@register("dot_general")
def dot_general_left(primitive: Any, lhs: ScaledArray, rhs: jax.Array, **params: Any) -> Any:
    return _dot(primitive, rhs, lhs, True, params)


def _dot(primitive: Any, x: jax.Array, q: ScaledArray, q_first: bool, params: dict[str, Any]) -> Any:
    """Multiplies x by the factor where all its axes are contracted (or batched), else the result where none is."""
    contracting, batching = params["dimension_numbers"]
    (qc, xc), (qb, xb) = (contracting, batching) if q_first else (contracting[::-1], batching[::-1])
    held = {axis for axis, n in enumerate(q.factor.shape) if n > 1}
    before = held <= {*qc, *qb}
    if params.get("out_sharding") is not None or not (before or held.isdisjoint(qc)):
        return NotImplemented
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return NotImplemented
    if before:
        shared = {**dict(zip(qc, xc, strict=True)), **dict(zip(qb, xb, strict=True))}
        x = _times(x, _placed(q.factor, shared, x.ndim))
    made = _on_w(lambda a, b: default_handler(primitive, a, b, **params), *((q.w, x) if q_first else (x, q.w)))
    if before:
        return made
    kept = [axis for axis in range(q.ndim) if axis not in (*qc, *qb)]
    first = len(qb) if q_first else made.ndim - len(kept)
    places = {**{axis: i for i, axis in enumerate(qb)}, **{axis: first + i for i, axis in enumerate(kept)}}
    return _times(made, _placed(q.factor, places, made.ndim))


def _placed(factor: jax.Array, places: dict[int, int], ndim: int) -> jax.Array:
    """The factor with axis i at `places[i]` of `ndim` axes; axes that are nowhere have size 1."""
    axes = sorted(places, key=lambda axis: places[axis])
    kept = lax.squeeze(lax.transpose(factor, [*axes, *(a for a in range(factor.ndim) if a not in places)]),
                       range(len(axes), factor.ndim))  # fmt: skip
    return lax.expand_dims(kept, [i for i in range(ndim) if i not in places.values()])


def _times(x: jax.Array, factor: jax.Array) -> jax.Array:
    """`x * factor`, rounded once to the dtype of x."""
    dtype = wide(x.dtype)
    return (x.astype(dtype) * factor.astype(dtype)).astype(x.dtype)


@register("ragged_dot_general")
def ragged_dot_general(primitive: Any, x: jax.Array, q: ScaledArray, group_sizes: jax.Array, **params: Any) -> Any:
    """Rows of x in groups, each times its own matrix of a stack: every row is multiplied by the factor of its group."""
    numbers = params["ragged_dot_dimension_numbers"]
    (x_axes, q_axes), batch = numbers.dot_dimension_numbers
    ragged = (tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions))
    plain = (tuple(x_axes), tuple(map(tuple, batch)), ragged) == ((1,), ((), ()), ((0,), (0,)))
    inner = q.factor.shape[3 - q_axes[0]] == 1 if q.ndim == 3 and len(q_axes) == 1 else False
    if not plain or not inner or params.get("group_offset") is not None:
        return NotImplemented
    factor = lax.squeeze(q.factor, (3 - q_axes[0],))
    of_rows = jnp.repeat(factor, group_sizes, axis=0, total_repeat_length=x.shape[0]) if factor.shape[0] > 1 else factor
    return _on_w(lambda *given: default_handler(primitive, *given, **params), _times(x, of_rows), q.w, group_sizes)


@register("transpose")
def transpose(q: ScaledArray, *, permutation: Any, **params: Any) -> Any:
    batch = q.ndim - q.core
    if sorted(permutation[:batch]) != list(range(batch)):
        return NotImplemented
    w = _on_w(lambda w: lax.transpose(w, permutation), q.w)
    return dataclasses.replace(q, w=w, factor=lax.transpose(q.factor, permutation))


@register("convert_element_type")
def convert_element_type(q: ScaledArray, *, new_dtype: Any, **params: Any) -> Any:
    if params.get("sharding") is not None or not jnp.issubdtype(new_dtype, jnp.floating):
        return NotImplemented
    return dataclasses.replace(q, w=_on_w(lambda w: lax.convert_element_type(w, new_dtype), q.w))


# Stacks of matrices.


@register("slice")
def slice_(q: ScaledArray, *, start_indices: Any, limit_indices: Any, strides: Any = None, **params: Any) -> Any:
    """Some matrices, or a part of each."""
    steps = strides or (1,) * q.ndim
    whole = [n > 1 or q.shape[i] == 1 for i, n in enumerate(q.factor.shape)]
    cuts = list(zip(start_indices, limit_indices, steps, strict=True))
    own = [cut if whole[i] else (0, 1, 1) for i, cut in enumerate(cuts)]
    w = _on_w(lambda w: lax.slice(w, start_indices, limit_indices, strides), q.w)
    return dataclasses.replace(q, w=w, factor=lax.slice(q.factor, *zip(*own, strict=True)))


@register("squeeze")
def squeeze(q: ScaledArray, *, dimensions: Any, **params: Any) -> Any:
    """One matrix of a stack."""
    if any(axis >= q.ndim - q.core for axis in dimensions):
        return NotImplemented
    w = _on_w(lambda w: lax.squeeze(w, dimensions), q.w)
    return dataclasses.replace(q, w=w, factor=lax.squeeze(q.factor, dimensions))


@register("unstack")
def unstack(q: ScaledArray, *, axis: int, **params: Any) -> Any:
    return _on_w(lambda q: [lax.index_in_dim(q, i, axis, keepdims=False) for i in range(q.shape[axis])], q)


@register("broadcast_in_dim")
def broadcast_in_dim(q: ScaledArray, *, shape: Any, broadcast_dimensions: Any, **params: Any) -> Any:
    """More axes of size 1 in front."""
    more = len(shape) - q.ndim
    if tuple(shape) != (1,) * more + q.shape or tuple(broadcast_dimensions) != tuple(range(more, len(shape))):
        return NotImplemented
    w = _on_w(lambda w: lax.broadcast_in_dim(w, shape, broadcast_dimensions), q.w)
    return dataclasses.replace(q, w=w, factor=q.factor.reshape((1,) * more + q.factor.shape))


@register("concatenate")
def concatenate(first: ScaledArray, *rest: ScaledArray, dimension: int, **params: Any) -> Any:
    """Along an axis that numbers matrices."""
    arrays = (first, *rest)
    if (
        any(not isinstance(q, ScaledArray) or q.core != first.core for q in arrays)
        or dimension >= first.ndim - first.core
    ):
        return NotImplemented
    w = _on_w(lambda *ws: lax.concatenate(ws, dimension), *(q.w for q in arrays))
    shapes = [(*q.shape[: q.ndim - q.core], *q.factor.shape[q.ndim - q.core :]) for q in arrays]
    factors = [jnp.broadcast_to(q.factor, shape) for q, shape in zip(arrays, shapes, strict=True)]
    if len({f.shape[dimension + 1 :] for f in factors}) > 1:
        return NotImplemented
    return dataclasses.replace(first, w=w, factor=lax.concatenate(factors, dimension))


@register("stack")
def stack(*operands: ScaledArray, axis: int, **params: Any) -> Any:
    if axis:
        return NotImplemented
    shape = (1, *operands[0].shape)
    widened = [broadcast_in_dim(q, shape=shape, broadcast_dimensions=range(1, len(shape))) for q in operands]
    return concatenate(*widened, dimension=0)
