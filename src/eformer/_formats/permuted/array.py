"""`PermutedArray`: a quantized matrix whose inputs were sorted, so that those that share a scale lie together."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eformer._core import ImplicitArray, aux_field, default_handler, implicit, register


@dataclasses.dataclass
class PermutedArray(ImplicitArray, frozen=True):
    """Matrices with the entries of one axis in another order: place `order[i]` along `axis` holds place `i` of `w`.

    Invariants: `w` is (batch..., rows, columns), `axis` is -1 or -2, `order` is int32 (batch..., size of that axis) and
    a permutation. A product sorts the other operand, or the result, and leaves `w` as it is.

    >>> q = PermutedArray(jnp.array([[1.0, 2.0, 3.0]]), jnp.array([2, 0, 1]))
    >>> q.materialize().tolist(), (q @ jnp.array([10.0, 20.0, 30.0])).tolist()
    ([[2.0, 3.0, 1.0]], [110.0])
    """

    w: Any
    order: jax.Array
    axis: int = aux_field(default=-1, kw_only=True)

    def __post_init__(self) -> None:
        if hasattr(self.w, "shape") and hasattr(self.order, "shape") and len(self.w.shape) > 1:
            expected = (*self.w.shape[:-2], self.w.shape[self.axis]) if self.axis in (-1, -2) else ()
            if tuple(self.order.shape) != expected or not jnp.issubdtype(self.order.dtype, jnp.integer):
                raise ValueError(
                    f"order {self.order.dtype}{list(self.order.shape)} does not sort axis {self.axis} of an array of "
                    f"shape {list(self.w.shape)}: it must be an integer for each place, {list(expected)}."
                )
        super().__post_init__()

    @property
    def core_ndim(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 2

    @property
    def format(self) -> str:
        return f"{getattr(self.w, 'format', 'dense')}, sorted"

    def compute_shape(self) -> tuple[int, ...]:
        return tuple(self.w.shape)

    def compute_dtype(self) -> Any:
        return self.w.dtype

    def materialize(self) -> jax.Array:
        """The dense array, its entries where they belong."""
        dense = self.w.materialize() if isinstance(self.w, ImplicitArray) else self.w
        places = jnp.expand_dims(jnp.argsort(self.order, axis=-1), -1 if self.axis == -2 else -2)
        return jnp.take_along_axis(dense, places, axis=self.axis)

    def _storage(self) -> str:
        return f"{self.format}, {8 * self.nbytes / max(self.size, 1):.2f} bits per weight"


def _on_w(op: Any, *operands: Any) -> Any:
    """Handlers run outside dispatch, so it is turned on again."""
    return implicit(op)(*operands)


@register("dot_general")
def dot_general_right(primitive: Any, lhs: jax.Array, rhs: PermutedArray, **params: Any) -> Any:
    return _dot(primitive, lhs, rhs, False, params)


@register("dot_general")
def dot_general_left(primitive: Any, lhs: PermutedArray, rhs: jax.Array, **params: Any) -> Any:
    return _dot(primitive, rhs, lhs, True, params)


def _dot(primitive: Any, x: jax.Array, q: PermutedArray, q_first: bool, params: dict[str, Any]) -> Any:
    """Sorts what is contracted with the sorted axis, else the result."""
    contracting, batching = params["dimension_numbers"]
    (q_axes, x_axes) = contracting if q_first else contracting[::-1]
    if q.ndim != 2 or any(batching) or len(q_axes) != 1:
        return NotImplemented
    sorted_axis = q.ndim + q.axis
    if q_axes[0] == sorted_axis:
        x = jnp.take(x, q.order, axis=x_axes[0])
    made = _on_w(lambda a, b: default_handler(primitive, a, b, **params), *((q.w, x) if q_first else (x, q.w)))
    if q_axes[0] == sorted_axis:
        return made
    return jnp.take(made, jnp.argsort(q.order), axis=0 if q_first else made.ndim - 1)


@register("transpose")
def transpose(q: PermutedArray, *, permutation: Any, **params: Any) -> Any:
    batch = tuple(range(q.ndim - 2))
    if tuple(permutation[:-2]) != batch:
        return NotImplemented
    turned = permutation[-1] != q.ndim - 1
    w = _on_w(lambda w: lax.transpose(w, permutation), q.w)
    return dataclasses.replace(q, w=w, axis=-3 - q.axis if turned else q.axis)


@register("convert_element_type")
def convert_element_type(q: PermutedArray, *, new_dtype: Any, **params: Any) -> Any:
    if params.get("sharding") is not None or not jnp.issubdtype(new_dtype, jnp.floating):
        return NotImplemented
    return dataclasses.replace(q, w=_on_w(lambda w: lax.convert_element_type(w, new_dtype), q.w))


# Stacks of matrices.


@register("broadcast_in_dim")
def broadcast_in_dim(q: PermutedArray, *, shape: Any, broadcast_dimensions: Any, **params: Any) -> Any:
    """More axes of size 1 in front."""
    more = len(shape) - q.ndim
    if tuple(shape) != (1,) * more + q.shape or tuple(broadcast_dimensions) != tuple(range(more, len(shape))):
        return NotImplemented
    w = _on_w(lambda w: lax.broadcast_in_dim(w, shape, broadcast_dimensions), q.w)
    return dataclasses.replace(q, w=w, order=q.order.reshape((1,) * more + q.order.shape))


@register("concatenate")
def concatenate(first: PermutedArray, *rest: PermutedArray, dimension: int, **params: Any) -> Any:
    """Along an axis that numbers matrices."""
    arrays = (first, *rest)
    fits = all(isinstance(q, PermutedArray) and q.axis == first.axis for q in arrays)
    if not fits or dimension >= first.ndim - 2:
        return NotImplemented
    w = _on_w(lambda *ws: lax.concatenate(ws, dimension), *(q.w for q in arrays))
    return dataclasses.replace(first, w=w, order=lax.concatenate([q.order for q in arrays], dimension))


@register("stack")
def stack(*operands: PermutedArray, axis: int, **params: Any) -> Any:
    if axis:
        return NotImplemented
    shape = (1, *operands[0].shape)
    widened = [broadcast_in_dim(q, shape=shape, broadcast_dimensions=range(1, len(shape))) for q in operands]
    return concatenate(*widened, dimension=0)
