"""`Array8B`: 8-bit integers with a scale shared along one or more axes."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from eformer._core import aux_field, ste

from .. import arguments as _arguments
from ..base import Part, QuantizedArray
from . import codec


@dataclasses.dataclass
class Array8B(QuantizedArray):
    """Symmetric INT8: `w = weight * scale`.

    Invariants: `weight` is int8 in the logical orientation and shape; `scale` is floating, of the same rank, with size
    1 along every axis in `axis` (counted from the end) and the logical size along the others. An axis of size 1 shares
    nothing and is left out of `axis`, which may be ().
    """

    scale: jax.Array
    weight: jax.Array
    axis: tuple[int, ...] | None = aux_field(default=None)  # pyright: ignore[reportGeneralTypeIssues]
    sharding: Any = aux_field(default=None)
    use_kernel: bool = aux_field(default=True, kw_only=True)

    format: ClassVar[str] = "int8"
    pad: ClassVar[int] = 0  # pyright: ignore[reportIncompatibleVariableOverride]
    parts: ClassVar[tuple[Part, ...]] = (Part("weight"), Part("scale", is_scale=True))
    blocked: ClassVar[None] = None  # pyright: ignore[reportIncompatibleMethodOverride]

    def __post_init__(self) -> None:
        _arguments.check_fields(self, "scale", "weight")
        _arguments.check_logical_dtype(self, "INT8")
        if _arguments.is_storage(self.scale, self.weight):
            _check_storage(self)
            if self.scale.ndim < self.weight.ndim:
                self.scale = self.scale.reshape((1,) * (self.weight.ndim - self.scale.ndim) + self.scale.shape)
            self.axis = _reduced_axes(self.scale, self.weight)
            self._default_dtype(self.scale.dtype)
        super().__post_init__()

    @property
    def core_ndim(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Everything behind the first axis along which the scale is shared."""
        shapes = zip(self.weight.shape, self.scale.shape, strict=True)
        shared = [i for i, (n, s) in enumerate(shapes) if s != n]
        return self.weight.ndim - shared[0] if shared else 0

    def moved(self, parts: dict[str, Any], blocked: int | None, **more: Any) -> Array8B:
        return super().moved(parts, blocked, axis=_reduced_axes(parts["scale"], parts["weight"]), **more)

    def scaled(self, factor: jax.Array, dtype: Any, *, traced: bool = False) -> Array8B:
        made = super().scaled(factor, dtype, traced=traced)
        return made.replaced(axis=_reduced_axes(made.scale, made.weight))

    def materialize(self) -> jax.Array:
        """The dense array, in the logical dtype, with the sharding it carries."""
        return self.constrained(codec.decode(self.weight, self.frozen_scale(), dtype=self.dtype))

    @classmethod
    def quantize(cls, array: jax.Array, dtype: Any = None, axis: int | tuple[int, ...] | None = None) -> Array8B:
        """Quantize a floating array.

        Args:
            array: values of rank 1 or more; a sharding it has is kept.
            dtype: the logical dtype, by default that of `array`.
            axis: the axis or axes that share one scale, by default the last.
        """
        array = _arguments.as_float(array, "INT8")
        axes = _arguments.check_axes((-1,) if axis is None else axis, array.ndim)
        weight, scale = codec.encode(array, axes=axes)
        made = cls(scale, weight, axes, dtype=_arguments.checked_dtype(dtype, array.dtype, "INT8"))
        return _arguments.keep_sharding(made, array)


@ste
def straight_through_8bit(weights: jax.Array, axis: int | tuple[int, ...] | None = None) -> Any:
    """`Array8B.quantize(weights)`, materialized; differentiated as the identity."""
    return Array8B.quantize(weights, axis=axis)


def _reduced_axes(scale: Any, weight: Any) -> tuple[int, ...]:
    """The axes along which the scale is shared, counted from the end; along an axis of size 1 nothing is."""
    shapes = zip(weight.shape, scale.shape, strict=True)
    return tuple(i - weight.ndim for i, (n, s) in enumerate(shapes) if s == 1 and n != 1)


def _check_storage(q: Array8B) -> None:
    scale, weight = q.scale, q.weight
    if weight.dtype != jnp.int8:
        raise TypeError(f"weight must be int8 storage, got {weight.dtype}; use Array8B.quantize for dense values.")
    if not jnp.issubdtype(scale.dtype, jnp.floating):
        raise TypeError(f"scale must be floating, got {scale.dtype}.")
    aligned = zip(scale.shape[::-1], weight.shape[::-1], strict=False)
    if scale.ndim > weight.ndim or any(s not in (1, n) for s, n in aligned):
        raise ValueError(f"scale {list(scale.shape)} does not broadcast against weight {list(weight.shape)}.")
    nothing_shared = isinstance(q.axis, (tuple, list)) and not q.axis  # what such an array itself says
    if q.axis is not None and not nothing_shared:
        axes = _arguments.check_axes(q.axis, weight.ndim)
        wrong = [a for a in axes if -a <= scale.ndim and scale.shape[a] != 1]
        if wrong:
            raise ValueError(f"axis={q.axis} says the scale is shared along {wrong}, but it is {list(scale.shape)}.")
