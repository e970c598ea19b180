"""`PermutedArray`: a quantized matrix whose inputs were sorted, so that those that share a scale lie together."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from eformer._core import aux_field, materialize, register

from ..sharding import full_spec
from ..wrapped import Axes, Wrapped, axes_of, multiply, on_weight, register_product


@dataclasses.dataclass
class PermutedArray(Wrapped):
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

    def beside(self) -> dict[str, Axes]:
        return {"order": [*range(self.ndim - 2), None]}

    def uncut(self) -> tuple[int, ...]:
        return (self.ndim + self.axis,)

    def child_specs(self, spec: PartitionSpec) -> Any:
        """As for `w`. No part of the sorted axis is an array of its own: places of the whole axis are in `order`."""
        entries = full_spec(spec, self.ndim, repr(self))
        return None if entries[self.axis] is not None else super().child_specs(spec)

    def materialize(self) -> jax.Array:
        """The dense array, its entries where they belong."""
        dense = materialize(self.w)
        places = jnp.expand_dims(jnp.argsort(self.order, axis=-1), -1 if self.axis == -2 else -2)
        return jnp.take_along_axis(dense, places, axis=self.axis)


@register_product
def product(primitive: Any, x: jax.Array, q: PermutedArray, q_first: bool, params: dict[str, Any]) -> Any:
    """Sorts what is contracted with the sorted axis, else the result."""
    (q_axes, x_axes), batch = axes_of(params["dimension_numbers"], q_first)
    if q.ndim != 2 or any(batch) or len(q_axes) != 1:
        return NotImplemented
    sorted_axis = q.ndim + q.axis
    if q_axes[0] == sorted_axis:
        x = jnp.take(x, q.order, axis=x_axes[0])
    made = multiply(primitive, x, q.w, q_first, params)
    if q_axes[0] == sorted_axis:
        return made
    return jnp.take(made, jnp.argsort(q.order), axis=0 if q_first else made.ndim - 1)


@register("transpose")
def transpose(q: PermutedArray, *, permutation: Any, **params: Any) -> Any:
    batch = tuple(range(q.ndim - 2))
    if tuple(permutation[:-2]) != batch:
        return NotImplemented
    turned = permutation[-1] != q.ndim - 1
    w = on_weight(lambda w: lax.transpose(w, permutation), q.w)
    return q.around(w, axis=-3 - q.axis if turned else q.axis)
