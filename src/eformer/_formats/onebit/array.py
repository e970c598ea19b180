"""`Array1B`: ternary values at two bits or binary ones at one, with an optional scale."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eformer._core import aux_field, ste
from eformer._jax import traces
from eformer._kernels.formats import broadcasts

from .. import arguments as _arguments
from .. import blocks as _blocks
from ..base import Part, QuantizedArray
from . import codec


@dataclasses.dataclass
class Array1B(QuantizedArray):
    """Ternary {-1, 0, 1} or binary {-1, 1}: `w = code * scale`, or the bare codes.

    Invariants: `weight` is uint8 `(free axes..., ceil(K / (8 / bits)))`, the first value in the most significant bits;
    `bits` is 2 (ternary) or 1 (binary); `scale` is None or floating `(free axes or 1..., 1)`; `axis` is the packed
    logical axis counted from the end; `pad` values at its end exist in storage only.

    The constructor takes packed storage (uint8), bare codes (signed integers), or dense floating values, which it
    quantizes to scaled ternary.
    """

    weight: jax.Array
    scale: Any = dataclasses.field(default=None, kw_only=True)
    bits: int = aux_field(default=2, kw_only=True)
    axis: int | None = aux_field(default=None, kw_only=True)  # pyright: ignore[reportGeneralTypeIssues]
    pad: int = aux_field(default=0, kw_only=True)
    sharding: Any = aux_field(default=None, kw_only=True)
    use_kernel: bool = aux_field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        _arguments.check_fields(self, "weight")
        if self.bits not in (1, 2):
            raise ValueError(f"bits={self.bits!r} is not allowed; use 2 (ternary) or 1 (binary).")
        if _arguments.is_array(self.weight) and self.weight.dtype != jnp.uint8:
            self._become(self._from_values(self.weight))
        elif _arguments.is_storage(self.weight):
            self._check_storage()
        _arguments.check_logical_dtype(self, self.format, signed=self.scale is None)
        super().__post_init__()

    def _from_values(self, values: Any) -> Array1B:
        dtype = self.__dict__.get("_dtype")
        if self.scale is not None:
            raise TypeError(f"scale= goes with packed uint8 storage, got weight of dtype {values.dtype}.")
        if _arguments.is_dense_float(values):
            kind = "ternary" if self.bits == 2 else "binary"
            return type(self).from_float(values, kind, axis=self.axis, dtype=dtype)
        return type(self).quantize(values, dtype, self.axis, bits=self.bits)

    def _check_storage(self) -> None:
        weight, scale = self.weight, self.scale
        if weight.ndim == 0:
            raise ValueError("packed storage has rank 1 or more, got a scalar.")
        self.axis, self.pad = _arguments.axis_and_pad(self, weight.ndim, weight.shape[-1], 8 // self.bits)
        self._default_dtype(jnp.int8 if scale is None else scale.dtype)
        if scale is None or not _arguments.is_storage(scale):
            return
        size = weight.shape[-1] * (8 // self.bits) - self.pad
        full = (*weight.shape[:-1], size)
        if not jnp.issubdtype(scale.dtype, jnp.floating) or not broadcasts(scale.shape, full):
            raise ValueError(
                f"scale {scale.dtype}{list(scale.shape)} does not fit: it must be floating and broadcast against "
                f"{list(full)}, the blocked axis last."
            )

    @property
    def format(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "ternary" if self.bits == 2 else "binary"

    @property
    def parts(self) -> tuple[Part, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Part("weight", 1, 8 // self.bits), Part("scale", 1, 1, is_scale=True)

    @property
    def core_ndim(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        core = -self.blocked
        if self.scale is None:
            return core
        shapes = zip(self.weight.shape[:-1], self.scale.shape[:-1], strict=True)
        shared = [i for i, (n, s) in enumerate(shapes) if n != s]
        return max(core, self.weight.ndim - shared[0]) if shared else core

    def materialize(self) -> jax.Array:
        """The dense array, in the logical dtype, with the sharding it carries."""
        size = self.shape[self.blocked]
        dense = codec.decode(
            self.weight, self.frozen_scale(), axis=self.blocked, bits=self.bits, size=size, dtype=self.dtype
        )
        return self.constrained(dense)

    def decoded_entries(self, index: jax.Array) -> jax.Array:
        """The values at these positions of the blocked axis, (free axes..., index axes...)."""
        codes = codec.meaning(_blocks.codes_at(self.part(self.parts[0]), index, self.bits), self.bits)
        scale = self.frozen_scale()
        if scale is None:
            return codes
        shared = scale.shape[-1] == 1
        scale = jnp.take(scale, jnp.zeros_like(index) if shared else index, axis=-1)
        return codes.astype(scale.dtype) * scale

    def scaled(self, factor: jax.Array, dtype: Any, *, traced: bool = False) -> Array1B:
        if self.scale is not None:
            return super().scaled(factor, dtype, traced=traced)
        scale = jnp.broadcast_to(factor.astype(_blocks.wide(factor.dtype)), (*self.weight.shape[:-1], 1))
        return self.with_factor(scale, dtype=dtype) if traced else self.replaced(scale=scale, dtype=dtype)

    @classmethod
    def quantize(
        cls, array: jax.Array, dtype: Any = None, axis: int | tuple[int, ...] | None = None, *, bits: int = 2
    ) -> Array1B:
        """Pack values that are already in {-1, 0, 1} (or {-1, 1} with `bits=1`); exact, without a scale.

        Args:
            array: the values, of rank 1 or more.
            dtype: the logical dtype, a signed integer or floating one; by default that of `array`.
            axis: the axis values are packed along; by default the contracted one of `x @ w`.
            bits: 2 for ternary, 1 for binary.
        """
        array = _arguments.as_array(array, "Array1B")
        if array.ndim == 0:
            raise ValueError("Array1B packs arrays of rank 1 or more, got a scalar.")
        if jnp.issubdtype(array.dtype, jnp.complexfloating) or array.dtype == bool:
            raise TypeError(f"Array1B packs integers or floating values in {{-1, 0, 1}}, got dtype {array.dtype}.")
        _check_values(array, bits)
        at = _arguments.checked_axis(axis, array.ndim)
        weight = codec.pack(array.astype(jnp.int8), axis=at, bits=bits)
        pad = weight.shape[-1] * (8 // bits) - array.shape[at]
        made = cls(weight, bits=bits, axis=at, pad=pad, dtype=array.dtype if dtype is None else dtype)
        return _arguments.keep_sharding(made, array)

    @classmethod
    def from_float(
        cls,
        array: jax.Array,
        kind: Literal["ternary", "binary"] = "ternary",
        *,
        axis: int | None = None,
        scale: Literal["channel", "tensor"] | None = "channel",
        threshold: Any = None,
        dtype: Any = None,
    ) -> Array1B:
        """Quantize floating values: the nearest codes and the scale with the least squared error.

        Args:
            array: values of rank 1 or more; a sharding it has is kept.
            kind: `"ternary"` keeps values above `threshold` (default 0.5 * std), `"binary"` the sign of every value.
            axis: the axis values are packed along; by default the contracted one of `x @ w`.
            scale: one scale per output channel (all values along `axis`), one per tensor, or none.
            threshold: ternary only, absolute.
            dtype: the logical dtype, by default that of `array`.
        """
        if kind not in codec.BITS:
            raise ValueError(f"{kind=} is unknown; allowed are {', '.join(map(repr, codec.BITS))}.")
        array = _arguments.as_float(array, kind)
        if isinstance(threshold, (int, float)) and not threshold >= 0:
            raise ValueError(f"{threshold=} is not allowed: give a magnitude of at least 0, or None for 0.5 * std.")
        at = _arguments.checked_axis(axis, array.ndim)
        # Like the other encoders a step function: its derivative is zero, not the scale's alone.
        weight, scales = lax.stop_gradient(codec.encode(array, threshold, kind=kind, axis=at, scale=scale))
        if scales is not None and scale == "tensor":  # one entry per row, so that rows can be sliced
            scales = jnp.broadcast_to(scales, (*weight.shape[:-1], 1))
        pad = weight.shape[-1] * (8 // codec.BITS[kind]) - array.shape[at]
        dtype = _arguments.checked_dtype(dtype, array.dtype, kind)
        made = cls(weight, scale=scales, bits=codec.BITS[kind], axis=at, pad=pad, dtype=dtype)
        return _arguments.keep_sharding(made, array)


@ste
def straight_through_1bit(
    weights: jax.Array,
    kind: Literal["ternary", "binary"] = "ternary",
    *,
    axis: int | None = None,
    scale: Literal["channel", "tensor"] | None = "channel",
) -> Any:
    """Scaled ternary or binary values of `weights`; differentiated as the identity."""
    return Array1B.from_float(weights, kind, axis=axis, scale=scale)


def _check_values(array: jax.Array, bits: int) -> None:
    """Refuse values that cannot be stored; possible only while they are known."""
    if bits not in codec.BITS.values():
        raise ValueError(f"bits={bits!r} is not allowed; use 2 (ternary) or 1 (binary).")
    if isinstance(array, traces.Tracer):
        return
    allowed = (-1, 0, 1) if bits == 2 else (-1, 1)
    wrong = np.asarray(array)[~np.isin(np.asarray(array), allowed)]
    if wrong.size:
        raise ValueError(
            f"Array1B.quantize packs values in {set(allowed)}, got {wrong.size} other values such as {wrong.flat[0]}. "
            'Use quantize(w, dtype="ternary") (or Array1B.from_float) to round floating values.'
        )
