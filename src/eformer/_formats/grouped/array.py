"""`GroupedArray`: weights as ggml stores them, in groups of 32 with a scale and perhaps an offset, kept as they are."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from eformer._core import aux_field

from ..base import Part, QuantizedArray

GROUP = 32


@dataclasses.dataclass
class GroupedArray(QuantizedArray):
    """Uniform codes in groups of 32: `w[..., k] = (code[..., k] - zero) * scale[..., k // 32] + offset[..., k // 32]`.

    Invariants: `codes` is int8 `(free axes..., groups, 32)` for 8 bits, or uint8 `(free axes..., groups, 16)` for 4,
    the first 16 values of a group in the low nibbles and the others in the high ones; `scale` and `offset` (or None)
    are floating `(free axes..., groups)`; `axis` is the grouped logical axis counted from the end. A ragged end is not
    possible, as ggml has none.

    Q4_0, Q4_1 and Q8_0 of GGUF files fit exactly. Shape operations move codes and scales, a product with a dense
    array decodes 256 rows at a time.
    """

    codes: jax.Array
    scale: jax.Array
    offset: Any = None
    zero: int = aux_field(default=0, kw_only=True)
    axis: int = aux_field(default=-1, kw_only=True)  # pyright: ignore[reportGeneralTypeIssues]
    pad: int = aux_field(default=0, kw_only=True)
    sharding: Any = aux_field(default=None, kw_only=True)
    use_kernel: bool = aux_field(default=True, kw_only=True)

    format: ClassVar[str] = "grouped"
    blocks_carry_scales: ClassVar[bool] = True
    parts: ClassVar[tuple[Part, ...]] = (
        Part("codes", 2, GROUP),
        Part("scale", 1, GROUP, is_scale=True),
        Part("offset", 1, GROUP, is_offset=True),
    )

    def __post_init__(self) -> None:
        if all(hasattr(array, "dtype") for array in (self.codes, self.scale)):
            _check(self)
            self._default_dtype(jnp.float32)
        super().__post_init__()

    @property
    def bits(self) -> int:
        return 8 if self.codes.dtype == jnp.int8 else 4

    def materialize(self) -> jax.Array:
        """The dense array, decoded in f32 and rounded once to the logical dtype."""
        values = _decoded(self.codes, self.frozen_scale(), self.offset, self.zero, linear=self.carries_factor)
        dense = values.reshape(*self.codes.shape[:-2], self.codes.shape[-2] * GROUP)
        return self.constrained(jnp.moveaxis(dense, -1, self.axis).astype(self.dtype))

    def decoded_entries(self, index: jax.Array) -> jax.Array:
        """The values at these positions of the grouped axis, (free axes..., index axes...)."""
        group, place = index // GROUP, index % GROUP
        flat = self.codes.reshape(*self.codes.shape[:-2], -1)
        if self.bits == 8:
            codes = jnp.take(flat, index, axis=-1)
        else:
            byte = jnp.take(flat, group * 16 + place % 16, axis=-1)
            codes = byte >> (4 * (place // 16)).astype(jnp.uint8) & 15
        scale = jnp.take(self.frozen_scale(), group, axis=-1)
        values = (codes.astype(jnp.float32) - self.zero) * scale.astype(jnp.float32)
        return values if self.offset is None else values + jnp.take(self.offset, group, axis=-1).astype(jnp.float32)

    def scaled(self, factor: jax.Array, dtype: Any, *, traced: bool = False) -> GroupedArray:
        """In f32, since the product of two f16 numbers is none."""
        wide = factor.astype(jnp.float32)
        offset = None if self.offset is None else self.offset.astype(jnp.float32) * wide
        made = self.replaced(scale=self.part(self.scale_part).astype(jnp.float32), offset=offset)
        return super(GroupedArray, made).scaled(wide, dtype, traced=traced)


def _check(q: GroupedArray) -> None:
    packed = q.codes.dtype == jnp.uint8
    last = 16 if packed else GROUP
    if q.codes.dtype not in (jnp.uint8, jnp.int8) or q.codes.ndim < 2 or q.codes.shape[-1] != last:
        raise ValueError(f"codes {q.codes.dtype}{list(q.codes.shape)} are neither uint8 (..., 16) nor int8 (..., 32).")
    numbers = {"scale": q.scale} if q.offset is None else {"scale": q.scale, "offset": q.offset}
    for name, array in numbers.items():
        if array.shape != q.codes.shape[:-1] or not jnp.issubdtype(array.dtype, jnp.floating):
            what = f"{name} {array.dtype}{list(array.shape)} does not fit codes {list(q.codes.shape)}"
            raise ValueError(f"{what}: it must be floating, {list(q.codes.shape[:-1])}.")
    if not -(q.codes.ndim - 1) <= q.axis <= -1 or q.pad:
        raise ValueError(f"axis={q.axis} and pad={q.pad} are not allowed for codes {list(q.codes.shape)}.")


def _decoded(codes: jax.Array, scale: jax.Array, offset: Any, zero: int, *, linear: bool) -> jax.Array:
    """f32 `(..., groups, 32)`; `linear` where scale and offset are differentiated."""
    if codes.dtype == jnp.uint8:
        codes = jnp.concatenate([codes & 15, codes >> 4], axis=-1)
    values = (codes.astype(jnp.float32) - zero) * scale[..., None].astype(jnp.float32)
    if offset is None:
        return values
    # The maximum changes nothing but keeps compilers from contracting to a fused multiply-add.
    values = values if linear else jnp.maximum(values, jnp.finfo(jnp.float32).min)
    return values + offset[..., None].astype(jnp.float32)
