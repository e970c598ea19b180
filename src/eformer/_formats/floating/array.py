"""`ArrayFloat`: codes that are small floats (FP8, MXFP4, MXFP8, NVFP4) or entries of IQ4_NL's table, with scales."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eformer._core import aux_field
from eformer._jax import traces
from eformer._kernels.formats import BYTE_SCALES, FORMATS, broadcasts, float_scale, one_of

from .. import arguments as _arguments
from ..base import Part, QuantizedArray
from ..blocks import codes_at
from ..gradients import frozen
from . import codec


@dataclasses.dataclass
class ArrayFloat(QuantizedArray):
    """`w = element[code] * scale * tensor_scale`; `kind` says what elements and scales are (see `codec`).

    Invariants: `codes` is uint8, two 4-bit codes a byte, the first one high. In blocks it is `(free axes..., blocks,
    bytes)`, `scale` is `(free axes..., blocks)` and `axis` is the blocked logical axis, counted from the end; `pad`
    values at its end exist in storage only. FP8 has blocks of 128 whose scales may serve 128 entries of the last free
    axis too, or, with `axis=None`, codes in the logical shape and a scale that broadcasts to it.

    Scales are stored as the format has them: uint8 is e8m0, and NVFP4 has float8_e4m3fn and a `tensor_scale`, f32 with
    size 1 along the axes it serves. Multiplied by a factor they become one f32 scale.
    """

    codes: jax.Array
    scale: Any
    tensor_scale: Any = None
    kind: str = aux_field(default="fp8", kw_only=True)
    axis: int | None = aux_field(default=None, kw_only=True)  # pyright: ignore[reportGeneralTypeIssues]
    pad: int = aux_field(default=0, kw_only=True)
    sharding: Any = aux_field(default=None, kw_only=True)
    use_kernel: bool = aux_field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        one_of("kind", self.kind, codec.KINDS)
        _arguments.check_fields(self, "codes", "scale")
        _arguments.check_logical_dtype(self, self.kind)
        stored = (self.codes, self.scale) if self.tensor_scale is None else (self.codes, self.scale, self.tensor_scale)
        if _arguments.is_storage(*stored):
            _check_storage(self)
            self._default_dtype(jnp.float32)
        super().__post_init__()

    @property
    def format(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.kind

    @property
    def row(self) -> codec.Kind:
        return codec.KINDS[self.kind]

    @property
    def block_size(self) -> int | None:
        """Values along the axis that share a scale; None if no axis is cut into blocks."""
        return None if self.axis is None else self.row.block or codec.TILE

    @property
    def shared_axes(self) -> tuple[int, ...]:
        """The axes along which the scale is shared, counted from the end; for an array without blocks."""
        shapes = zip(self.codes.shape, self.scale.shape, strict=True)
        return tuple(i - self.codes.ndim for i, (n, s) in enumerate(shapes) if s != n)

    @property
    def blocked(self) -> int | None:
        return self.axis

    @property
    def parts(self) -> tuple[Part, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.axis is None:
            return Part("codes"), Part("scale", is_scale=True)
        block = self.row.block or codec.TILE
        return Part("codes", 2, block), Part("scale", 1, block, is_scale=True), Part("tensor_scale", 1, block)

    @property
    def kernel_format(self) -> str:
        return self.row.element if self.axis is None or self.row.per_byte == 2 else f"{self.row.element}_block"

    @property
    def kernel_block(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.block_size

    @property
    def nan_scale(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What to store for a scale that is NaN."""
        return 255 if self.scale.dtype == jnp.uint8 else float("nan")

    @property
    def blocks_carry_scales(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.tensor_scale is None

    @property
    def core_ndim(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Everything behind the first axis that is blocked, or along which a scale is shared."""
        scales = [scale for scale in (self.scale, self.tensor_scale) if scale is not None]
        ndim, free = self.codes.ndim - (self.axis is not None), self.codes.ndim - 2 * (self.axis is not None)
        shared = [i for i in range(free) if any(s.shape[i] != self.codes.shape[i] for s in scales)]
        if not shared:
            return -(self.axis or 0)
        first = shared[0] + (self.axis is not None and shared[0] >= ndim + self.axis)
        return max(ndim - first, -(self.axis or 0))

    def part(self, part: Part) -> Any:
        """The stored array of a part; a scale of tiles has one entry for each of their rows."""
        array, last = super().part(part), self.codes.ndim - 3
        if not part.is_scale or self.axis is None or last < 0 or array.shape[last] == self.codes.shape[last]:
            return array
        rows, tiles = self.codes.shape[last], array.shape[last]
        if tiles != -(-rows // codec.TILE):
            raise ValueError(
                f"codes of {rows} rows do not go with scales of {tiles} tiles of {codec.TILE} rows. Where shard_map "
                "took a part of the codes, split the array itself: implicit(jax.shard_map(f, in_specs=...))(q)."
            )
        return codec.spread(array, last, rows)

    def stored_for(self, sharding: Any) -> ArrayFloat:
        """A device that takes some of the rows takes their scales with them, so there must be one for each row."""
        scale = self.part(self.scale_part)
        if scale.shape == self.scale.shape:
            return self
        last = max(axis for axis in range(self.ndim) if axis - self.ndim != self.axis)
        return self.replaced(scale=scale) if any(sharding.spec[last : last + 1]) else self

    def float_scale(self) -> Any:
        """The scale of the blocks and that of the tensor as one array of numbers."""
        return float_scale(self.part(self.scale_part), self.tensor_scale)

    @property
    def has_byte_scales(self) -> bool:
        """Are scales of blocks bytes, with one factor at most for a matrix? So kernels take them as they are stored."""
        whole = self.tensor_scale
        of_matrix = whole is None or (whole.dtype == jnp.float32 and whole.shape[-2:] == (1, 1))
        return self.axis is not None and of_matrix and self.part(self.scale_part).dtype in BYTE_SCALES

    def frozen_scale(self) -> Any:
        return self.part(self.scale_part) if self.carries_factor else frozen(self.float_scale(), self.format)

    def kernel_operands(self) -> tuple[jax.Array, Any]:
        return self.codes, self.part(self.scale_part) if self.has_byte_scales else self.float_scale()

    @property
    def kernel_factor(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.tensor_scale if self.has_byte_scales else None

    def with_factor(self, scale: jax.Array, **changes: Any) -> ArrayFloat:
        return super().with_factor(scale, **{"tensor_scale": self._ones(), **changes})

    def _ones(self) -> Any:
        """What is left of the scale of the tensor once it is part of the others."""
        return None if self.tensor_scale is None else jnp.ones_like(self.tensor_scale)

    def scaled(self, factor: jax.Array, dtype: Any, *, traced: bool = False) -> Any:
        """In f32, since a scale of the format times a number need not be one."""
        return QuantizedArray.scaled(self.with_plain_scale(), factor.astype(jnp.float32), dtype, traced=traced)

    def with_plain_scale(self) -> ArrayFloat:
        if self.carries_factor:
            return self
        return self.replaced(scale=self.float_scale().astype(jnp.float32), tensor_scale=self._ones())

    def materialize(self) -> jax.Array:
        """The dense array, in the logical dtype, with the sharding it carries."""
        dense = codec.decode(
            self.codes,
            self.frozen_scale(),
            element=self.row.element,
            axis=self.axis,
            size=0 if self.axis is None else self.shape[self.axis],
            dtype=self.dtype,
        )
        return self.constrained(dense)

    def decoded_entries(self, index: jax.Array) -> jax.Array:
        """The values at these positions of the blocked axis, (free axes..., index axes...)."""
        codes = codes_at(self.part(self.parts[0]).reshape(*self.codes.shape[:-2], -1), index, 8 // self.row.per_byte)
        scale = jnp.take(self.frozen_scale(), index // (self.row.block or codec.TILE), axis=-1)
        return codec.decode(codes, scale, element=self.row.element, axis=None, size=0, dtype=jnp.float32)

    @classmethod
    def quantize(
        cls, array: jax.Array, kind: str = "fp8", *, axis: Any = None, block_size: int | None = None, dtype: Any = None
    ) -> ArrayFloat:
        """Quantize a floating array.

        Args:
            array: values of rank 1 or more; a sharding it has is kept.
            kind: one of `fp8`, `fp8_e5m2`, `mxfp4`, `mxfp8`, `mxfp8_e5m2`, `nvfp4`, `iq4_nl`.
            axis: the axis blocks run along, by default the contracted one of `x @ w`; for FP8 without blocks the axis
                or axes that share one scale, all of them for one scale per tensor.
            block_size: 128 gives FP8 one scale per 128 × 128 values. The other kinds have their own.
            dtype: the logical dtype, by default that of `array`.
        """
        one_of("kind", kind, codec.KINDS)
        array, row = _arguments.as_float(array, kind), codec.KINDS[kind]
        block_size = codec.check_block_size(row.block if block_size is None else block_size, kind)
        dtype = _arguments.checked_dtype(dtype, array.dtype, kind)
        if block_size is None:
            axes = _arguments.check_axes(
                _arguments.checked_axis(None, array.ndim) if axis is None else axis, array.ndim
            )
            made = cls(*codec.encode_whole(array, kind=kind, axes=axes), kind=kind, dtype=dtype)
            return _arguments.keep_sharding(made, array)
        at = _arguments.checked_axis(axis, array.ndim)
        encode = codec.encode if row.block else codec.encode_tiles
        codes, *scales = encode(array, kind=kind, axis=at)
        pad = -array.shape[at] % block_size
        return _arguments.keep_sharding(cls(codes, *scales, kind=kind, axis=at, pad=pad, dtype=dtype), array)

    @classmethod
    def from_codes(
        cls,
        codes: Any,
        scale: Any,
        *,
        kind: str,
        tensor_scale: Any = None,
        axis: int | None = None,
        dtype: Any = jnp.float32,
    ) -> ArrayFloat:
        """An array of codes and scales that exist, as a checkpoint has them. Nothing is rounded.

        Args:
            codes: one per value, in the logical shape: bytes, floats of 8 bits, or for 4-bit kinds 0 to 15.
            scale: of the same rank; along `axis` one entry per block. Bytes (or float8_e8m0fnu) are e8m0. For FP8 each
                axis may have the logical size or size 1; or `axis` has one entry per 128, and the last of the other
                axes may, too.
            kind: as for `quantize`.
            tensor_scale: NVFP4's, one number, or one for each matrix of a stack.
            axis: the axis blocks run along, by default the contracted one of `x @ w`.
            dtype: the logical dtype.
        """
        one_of("kind", kind, codec.KINDS)
        row, codes, scale = codec.KINDS[kind], _as_bytes(codes, kind), _as_scale(scale)
        block = row.block or codec.TILE
        if row.block is None and scale.ndim == 0:
            scale = scale.reshape((1,) * codes.ndim)
        if scale.ndim != codes.ndim:
            raise ValueError(f"a scale {list(scale.shape)} does not have the rank of the codes, {list(codes.shape)}.")
        if tensor_scale is not None:
            tensor_scale = jnp.asarray(tensor_scale)
            tensor_scale = tensor_scale.reshape(*tensor_scale.shape, *[1] * (codes.ndim - tensor_scale.ndim))
        elif row.block is None and broadcasts(scale.shape, codes.shape):
            return cls(codes, scale, kind=kind, dtype=dtype)
        at = _arguments.checked_axis(axis, codes.ndim)
        scale = _fitted(scale, codes.shape, at, kind)
        stored = codec.pack(codes, axis=at, block=block, per_byte=row.per_byte)
        scales = [None if s is None else jnp.moveaxis(s, at, -1) for s in (scale, tensor_scale)]
        return cls(stored, *scales, kind=kind, axis=at, pad=-codes.shape[at] % block, dtype=dtype)


def _as_bytes(codes: Any, kind: str) -> jax.Array:
    """The codes as uint8, once they are known to be possible."""
    codes, row = _arguments.as_array(codes, kind), FORMATS[codec.KINDS[kind].element]
    if codes.ndim == 0:
        raise ValueError(f"{kind} has arrays of rank 1 or more, got a scalar.")
    if row.bits_of is not None and codes.dtype == row.bits_of:
        return lax.bitcast_convert_type(codes, jnp.uint8)
    if codes.dtype != jnp.uint8:
        also = "" if row.bits_of is None else f" or {jnp.dtype(row.bits_of).name}"
        raise TypeError(f"codes of {kind} must be uint8{also}, one for each value, got {codes.dtype}.")
    if row.per_code == 2 and not isinstance(codes, traces.Tracer) and (largest := np.max(codes, initial=0)) > 15:
        raise ValueError(
            f"codes of {kind} are 0 to 15, one for each value, got {largest}. Take packed ones apart first."
        )
    return codes


def _fitted(scale: jax.Array, shape: tuple[int, ...], axis: int, kind: str) -> jax.Array:
    """The scale with one entry per block along the axis, where that of FP8 has one for all of them."""
    row, wanted = codec.KINDS[kind], list(shape)
    wanted[axis] = -(-shape[axis] // (row.block or codec.TILE))
    tiled = list(wanted)
    if row.block is None and len(shape) > 1:
        last = -1 if axis != -1 else -2
        tiled[last] = -(-shape[last] // codec.TILE)
        own = [t if s == 1 and n != 1 else s for s, t, n in zip(scale.shape, tiled, shape, strict=True)]
        scale = jnp.broadcast_to(scale, own)
    if list(scale.shape) not in (wanted, tiled):
        also = "" if tiled == wanted else f" or {tiled}"
        raise ValueError(
            f"a scale {list(scale.shape)} does not fit codes of {kind} {list(shape)} along axis {axis}: it must be "
            f"{wanted}{also}."
        )
    return scale


def _as_scale(scale: Any) -> jax.Array:
    scale = _arguments.as_array(scale, "scale")
    return lax.bitcast_convert_type(scale, jnp.uint8) if scale.dtype == jnp.float8_e8m0fnu else scale


def _is_scale(array: Any) -> bool:
    return array.dtype == jnp.uint8 or jnp.issubdtype(array.dtype, jnp.floating)


def _check_storage(q: ArrayFloat) -> None:
    """Raise unless codes and scales belong together; settle `axis` and `pad`."""
    codes, scale, whole, row = q.codes, q.scale, q.tensor_scale, q.row
    if codes.dtype != jnp.uint8 or not _is_scale(scale) or (whole is not None and not _is_scale(whole)):
        dtypes = ", ".join(str(a.dtype) for a in (codes, scale, whole) if a is not None)
        raise TypeError(f"{q.kind} takes codes of uint8, and scales that are floating or uint8 (e8m0); got {dtypes}.")
    if scale.dtype == jnp.uint8 and row.scale not in ("e8m0", "f32"):
        own = {"e4m3": "float8_e4m3fn", "f16": "float16"}[row.scale]
        raise TypeError(
            f"a scale of bytes is e8m0, which {q.kind} does not have; its own is {own}. If these are bytes of it, view "
            f"them so: scale.view(jnp.{own})."
        )
    if q.axis is None and row.block is None:
        if not broadcasts(scale.shape, codes.shape) or whole is not None:
            what = f"scale {list(scale.shape)} does not broadcast against codes {list(codes.shape)}"
            raise ValueError(
                f"{what}." if whole is None else f"tensor_scale has no meaning for {q.kind} without blocks."
            )
        return
    block = row.block or codec.TILE
    if codes.ndim < 2 or codes.shape[-1] * row.per_byte != block:
        raise ValueError(
            f"codes {list(codes.shape)} are not stored {q.kind}, which is (..., blocks, {block // row.per_byte}). "
            "ArrayFloat.from_codes takes codes in the logical shape."
        )
    *free, blocks = codes.shape[:-1]
    wanted = [*free, blocks]
    tiles = [*free[:-1], -(-free[-1] // codec.TILE), blocks] if row.block is None and free else wanted
    if list(scale.shape) not in (wanted, tiles):
        also = "" if tiles == wanted else f" or {tiles}"
        raise ValueError(
            f"scale {list(scale.shape)} does not fit codes {list(codes.shape)}: it must be {wanted}{also}."
        )
    if whole is not None and not broadcasts(whole.shape, [*free, 1]):
        what = f"tensor_scale {list(whole.shape)} does not fit: it must have {len(wanted)} axes"
        raise ValueError(f"{what}, of size 1 or as in {[*free, 1]}.")
    q.axis, q.pad = _arguments.axis_and_pad(q, codes.ndim - 1, blocks, block)
