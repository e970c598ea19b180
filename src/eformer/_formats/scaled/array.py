"""`ScaledArray`: a weight whose inputs were multiplied by a factor each, which the product takes back."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eformer._core import aux_field, materialize, register
from eformer._core.trace import is_implicit
from eformer._kernels.formats import broadcasts

from ..arguments import is_storage
from ..blocks import wide
from ..wrapped import Wrapped, axes_of, gathered, is_plain_ragged, multiply, redo, register_product, taken


@dataclasses.dataclass
class ScaledArray(Wrapped):
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

    def __post_init__(self) -> None:
        if is_storage(self.w, self.factor):
            shape, given = tuple(self.w.shape), tuple(self.factor.shape)
            if not broadcasts(given, shape) or not jnp.issubdtype(self.factor.dtype, jnp.floating):
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

    def beside(self) -> dict[str, range]:
        return {"factor": range(self.ndim)}

    def materialize(self) -> jax.Array:
        """The dense array: multiplied in f32 at least, and rounded once to the dtype of `w`."""
        dense = materialize(self.w)
        dtype = wide(dense.dtype, self.factor.dtype)
        return (dense.astype(dtype) * self.factor.astype(dtype)).astype(dense.dtype)


@register_product
def product(primitive: Any, x: jax.Array, q: ScaledArray, q_first: bool, params: dict[str, Any]) -> Any:
    """Multiplies x by the factor where all its axes are contracted (or batched), else the result where none is."""
    (qc, xc), (qb, xb) = axes_of(params["dimension_numbers"], q_first)
    held = {axis for axis, n in enumerate(q.factor.shape) if n > 1}
    before = held <= {*qc, *qb}
    if params.get("out_sharding") is not None or not (before or held.isdisjoint(qc)):
        return NotImplemented
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return NotImplemented
    if before:
        shared = {**dict(zip(qc, xc, strict=True)), **dict(zip(qb, xb, strict=True))}
        x = _times(x, _placed(q.factor, shared, x.ndim))
    made = multiply(primitive, x, q.w, q_first, params)
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
    (_, (contracted, *_)), _ = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    if not is_plain_ragged(params, x.ndim, q.ndim) or q.factor.shape[3 - contracted] != 1:
        return NotImplemented
    factor = lax.squeeze(q.factor, (3 - contracted,))
    of_rows = jnp.repeat(factor, group_sizes, axis=0, total_repeat_length=x.shape[0]) if factor.shape[0] > 1 else factor
    return redo(primitive, params, _times(x, of_rows), q.w, group_sizes)


@register("transpose")
def transpose(q: ScaledArray, *, permutation: Any, **params: Any) -> Any:
    batch = q.ndim - q.core
    if sorted(permutation[:batch]) != list(range(batch)):
        return NotImplemented
    return q.moved(lambda x, _: lax.transpose(x, permutation))


@register("gather")
def gather(primitive: Any, q: ScaledArray, indices: jax.Array, **params: Any) -> Any:
    """Rows or entries come out dense, times their factors; whole matrices of a stack keep theirs."""
    fill, numbers = params.get("fill_value"), params["dimension_numbers"]
    if fill is not None and fill == fill and fill != 0:
        return NotImplemented
    found = redo(primitive, params, q.w, indices)
    factor = gathered(q.factor, q, indices, params)
    last = tuple(range(found.ndim - q.core, found.ndim))
    return _taken(q, found, factor, tuple(numbers.offset_dims[-q.core :]) == last)


@register("dynamic_slice")
def dynamic_slice(primitive: Any, q: ScaledArray, *starts: jax.Array, **params: Any) -> Any:
    """As `gather`."""
    found = redo(primitive, params, q.w, *starts)
    return _taken(q, found, taken(q.factor, starts, params["slice_sizes"]), True)


def _taken(q: ScaledArray, found: Any, factor: jax.Array, is_stack: bool) -> Any:
    if is_implicit(found) and is_stack:
        return q.around(found, factor=factor)
    return _times(materialize(found), factor)
