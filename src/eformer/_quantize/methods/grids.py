"""What every block format can store: its scales, its codes, and what they stand for.

A value of a block is `unit(code, zero) * scale`. A grid proposes scales for a block, rounds numbers to codes for a
scale that is known, and makes the array of the format from both. Scales are kept as f32 numbers here, but only those
that the format can store (`snap`), so that the array decodes to exactly what was computed.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eformer._formats.floating import codec as floats
from eformer._formats.floating.array import ArrayFloat
from eformer._formats.integer import codec as integers
from eformer._formats.integer.array import ArrayInt
from eformer._formats.nf4 import codec as nf4
from eformer._formats.nf4.array import ArrayNF4, CompressedAbsmax
from eformer._formats.onebit import codec as onebit
from eformer._formats.onebit.array import Array1B

from ..config import QuantizationConfig, QuantizationType
from ..table import BIAS

Zero = jax.Array | None
_TINY = float(np.finfo(np.float32).tiny)


def _ratios(low: float, high: float, count: int) -> tuple[float, ...]:
    return tuple(np.linspace(low, high, count).tolist())


def _exponent(x: jax.Array) -> jax.Array:
    """`floor(log2(|x|))`, exactly; -127 for 0."""
    return (lax.bitcast_convert_type(jnp.abs(x), jnp.int32) >> 23) - 127


def _power(exponent: jax.Array) -> jax.Array:
    """`2 ** exponent`, exactly, of normal numbers."""
    return lax.bitcast_convert_type((jnp.clip(exponent, -126, 127) + 127) << 23, jnp.float32)


FEW_BITS_ROUNDS = 2


@dataclasses.dataclass(frozen=True)
class Grid:
    """One format.

    `ratios` are the scales to try, in units of the one that plain rounding takes; 1 is among them. `rounds` is how
    often "gptq" chooses codes and then fits scales to them: the fewer values there are, the more it gains.
    """

    ratios: ClassVar[tuple[Any, ...]] = (1.0,)
    rounds: ClassVar[int] = 1
    fits_zero: ClassVar[bool] = False  # may zero points be any numbers, fitted like scales?

    def begin(self, x: jax.Array, weights: jax.Array, axis: int) -> Any:
        """What `propose` has to know of blocks along `axis`: by default their largest magnitude."""
        return jnp.max(jnp.abs(x), axis=axis)

    def propose(self, begun: Any, ratio: Any) -> tuple[jax.Array, Zero]:
        """A scale, which `snap` makes one that can be stored, and a zero point."""
        return begun * ratio, None

    def snap(self, scale: jax.Array) -> jax.Array:
        """The nearest scale that the format can store."""
        return jnp.where(jnp.abs(scale) < _TINY, 0, scale)

    def nearest(self, quotients: jax.Array, zero: Zero) -> jax.Array:
        """The codes nearest to values that were divided by the scale."""
        raise NotImplementedError

    def units(self, codes: jax.Array, zero: Zero) -> jax.Array:
        """What codes stand for at scale 1, in f32."""
        raise NotImplementedError

    def snap_zero(self, scale: jax.Array, zero: Zero) -> Zero:
        """The nearest zero point that the format can store beside a scale."""
        return zero

    def codes(self, x: jax.Array, scale: jax.Array, zero: Zero) -> jax.Array:
        return self.nearest(jnp.where(scale == 0, 0, x / jnp.where(scale == 0, 1, scale)), zero)

    def values(self, codes: jax.Array, scale: jax.Array, zero: Zero) -> jax.Array:
        return self.units(codes, zero) * scale

    def unit(self, w: jax.Array) -> jax.Array | None:
        """A number for each matrix (S, K, N), as (S, 1, 1), to divide its values by first; None for 1."""
        return None

    @property
    def together(self) -> bool:
        """Does what is stored for one scale depend on the others?"""
        return False

    def stored(self, scale: jax.Array, axis: int) -> tuple[Any, jax.Array]:
        """Scales as the array stores them, where that depends on all of them, and as numbers again."""
        raise NotImplementedError

    def build(self, codes: Any, scale: Any, zero: Any, *, unit: Any, axis: int, dtype: Any) -> Any:
        """The array. Codes are of the logical shape, scales too but for `axis`, where there is one for each block."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class GridNF4(Grid):
    block: int = 64
    double: bool = False

    ratios: ClassVar[tuple[float, ...]] = _ratios(0.6, 1.1, 26)

    def nearest(self, quotients: jax.Array, zero: Zero) -> jax.Array:
        return nf4.nearest(quotients)

    def units(self, codes: jax.Array, zero: Zero) -> jax.Array:
        return nf4.values(codes)

    @property
    def together(self) -> bool:
        return self.double

    def stored(self, scale: jax.Array, axis: int) -> tuple[Any, jax.Array]:
        moved = jnp.moveaxis(scale, axis, -1)
        core = min(2, moved.ndim)
        made = CompressedAbsmax(*nf4.compress_absmax(moved, core_ndim=core), core=core)
        return made, jnp.moveaxis(made.expanded(), -1, axis)

    def build(self, codes: Any, scale: Any, zero: Any, *, unit: Any, axis: int, dtype: Any) -> ArrayNF4:
        pad = -codes.shape[axis] % self.block
        padding = [(0, pad if i == codes.ndim + axis else 0) for i in range(codes.ndim)]
        packed = floats.pack(jnp.pad(codes, padding, constant_values=7), axis=axis, block=self.block, per_byte=2)
        absmax = scale if isinstance(scale, CompressedAbsmax) else jnp.moveaxis(scale, axis, -1)
        return ArrayNF4(packed, absmax, self.block, axis=axis, pad=pad, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class GridInt(Grid):
    """Symmetric: the extreme value takes the code 0, or, with the other sign of the scale, the last one."""

    bits: int
    block: int

    @property
    def rounds(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return FEW_BITS_ROUNDS if self.bits <= 3 else 1

    @property
    def ratios(self) -> tuple[float, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        some = _ratios({2: 0.4, 3: 0.5}.get(self.bits, 0.6 if self.bits == 4 else 0.8), 1.1 if self.bits < 5 else 1, 21)
        return (1.0, *some, *(-ratio for ratio in some))

    def begin(self, x: jax.Array, weights: jax.Array, axis: int) -> Any:
        low, high = jnp.min(x, axis=axis), jnp.max(x, axis=axis)
        return jnp.where(-low >= high, low, high) * (-(2.0 ** (1 - self.bits)))

    def nearest(self, quotients: jax.Array, zero: Zero) -> jax.Array:
        middle = 2 ** (self.bits - 1) if zero is None else zero
        return jnp.clip(jnp.round(quotients) + middle, 0, 2**self.bits - 1).astype(jnp.uint8)

    def units(self, codes: jax.Array, zero: Zero) -> jax.Array:
        return codes.astype(jnp.float32) - (2 ** (self.bits - 1) if zero is None else zero)

    def build(self, codes: Any, scale: Any, zero: Any, *, unit: Any, axis: int, dtype: Any) -> ArrayInt:
        zero = None if zero is None else zero.astype(jnp.uint8)
        return ArrayInt.from_codes(
            codes, scale, zero=zero, bits=self.bits, block_size=self.block, axis=axis, dtype=dtype
        )


@dataclasses.dataclass(frozen=True)
class GridIntZero(GridInt):
    """With a zero point: both ends move inwards together."""

    @property
    def ratios(self) -> tuple[float, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (1.0, *_ratios({2: 0.4, 3: 0.5}.get(self.bits, 0.6), 1.05, 24))

    def begin(self, x: jax.Array, weights: jax.Array, axis: int) -> Any:
        return jnp.min(x, axis=axis, initial=0.0), jnp.max(x, axis=axis, initial=0.0)

    def propose(self, begun: Any, ratio: Any) -> tuple[jax.Array, Zero]:
        low, high = begun
        scale = self.snap((high - low) * ratio / (2**self.bits - 1))
        zero = jnp.round(-low * ratio / jnp.where(scale == 0, 1, scale))
        return scale, jnp.clip(zero, 0, 2**self.bits - 1)


@dataclasses.dataclass(frozen=True)
class GridIntBias(GridIntZero):
    """With a bias, here a zero point that may be any number: both ends move apart from each other."""

    fits_zero: ClassVar[bool] = True

    @property
    def ratios(self) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        some = _ratios({2: 0.3, 3: 0.4}.get(self.bits, 0.6), 1.05, 12)
        return tuple((low, high) for low in some for high in some)

    def begin(self, x: jax.Array, weights: jax.Array, axis: int) -> Any:
        return jnp.min(x, axis=axis), jnp.max(x, axis=axis)

    def propose(self, begun: Any, ratio: Any) -> tuple[jax.Array, Zero]:
        at_low, at_high = jnp.broadcast_to(jnp.asarray(ratio), (2,))
        low, high = begun[0] * at_low, begun[1] * at_high
        scale = self.snap((high - low) / (2**self.bits - 1))
        return scale, self.snap_zero(scale, -low / jnp.where(scale == 0, 1, scale))

    def snap(self, scale: jax.Array) -> jax.Array:
        return super().snap(scale).astype(BIAS).astype(jnp.float32)

    def snap_zero(self, scale: jax.Array, zero: Zero) -> Zero:
        assert zero is not None
        stored = (-zero * scale).astype(BIAS).astype(jnp.float32)
        return jnp.where(scale == 0, zero, -stored / jnp.where(scale == 0, 1, scale))

    def nearest(self, quotients: jax.Array, zero: Zero) -> jax.Array:
        assert zero is not None
        return jnp.clip(jnp.round(quotients + zero), 0, 2**self.bits - 1).astype(jnp.uint8)

    def build(self, codes: Any, scale: Any, zero: Any, *, unit: Any, axis: int, dtype: Any) -> ArrayInt:
        numbers = {"scale": scale.astype(BIAS), "bias": (-zero * scale).astype(BIAS)}
        options: dict[str, Any] = {"bits": self.bits, "block_size": self.block, "axis": axis, "dtype": dtype}
        return ArrayInt.from_codes(codes, **numbers, **options)


@dataclasses.dataclass(frozen=True)
class GridFloat(Grid):
    """Small floats in blocks, and IQ4_NL."""

    kind: str

    @property
    def row(self) -> floats.Kind:
        return floats.KINDS[self.kind]

    @property
    def ratios(self) -> tuple[float, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.row.scale == "e8m0":
            return (1.0, 0.5, 2.0)
        some = _ratios(0.6, 1.1, 21)
        return (1.0, *some, *(-r for r in some)) if self.kind == "iq4_nl" else (1.0, *some)

    def begin(self, x: jax.Array, weights: jax.Array, axis: int) -> Any:
        absmax = jnp.max(jnp.abs(x), axis=axis)
        if self.row.scale == "e8m0":
            return _power(_exponent(absmax) - self.row.exponent)
        if self.kind == "iq4_nl":
            return floats.searched(x, absmax, axis - 1)
        return absmax / self.row.largest

    def snap(self, scale: jax.Array) -> jax.Array:
        if self.row.scale == "e8m0":
            return _power(_exponent(scale * np.float32(2**0.5)))  # the nearest of them, as exponents go
        if self.row.scale == "e4m3":
            return jnp.clip(scale, 0, 448).astype(jnp.float8_e4m3fn).astype(jnp.float32)
        return jnp.clip(scale, -65504, 65504).astype(jnp.float16).astype(jnp.float32)

    def nearest(self, quotients: jax.Array, zero: Zero) -> jax.Array:
        return floats.nearest(quotients, self.row)

    def units(self, codes: jax.Array, zero: Zero) -> jax.Array:
        return floats.element_values(codes, self.row.element)

    def unit(self, w: jax.Array) -> jax.Array | None:
        """A power of two, so that nothing is rounded, and large enough for every block scale to be below 448."""
        if self.row.scale != "e4m3":
            return None
        absmax = jnp.max(jnp.abs(w), axis=(-2, -1), keepdims=True)
        return _power(_exponent(absmax / np.float32(6 * 448 / 1.25)) + 1)

    def build(self, codes: Any, scale: Any, zero: Any, *, unit: Any, axis: int, dtype: Any) -> ArrayFloat:
        if self.row.scale == "e8m0":
            stored = lax.bitcast_convert_type(scale, jnp.uint32) >> 23
        else:
            stored = scale
        as_dtype = {"e8m0": jnp.uint8, "e4m3": jnp.float8_e4m3fn}.get(self.row.scale, jnp.float16)
        return ArrayFloat.from_codes(
            codes, stored.astype(as_dtype), kind=self.kind, tensor_scale=unit, axis=axis, dtype=dtype
        )


@dataclasses.dataclass(frozen=True)
class GridOneBit(Grid):
    """Ternary and binary values: one block as long as the axis. Scales are in units of the mean magnitude."""

    bits: int
    rounds: ClassVar[int] = FEW_BITS_ROUNDS

    @property
    def ratios(self) -> tuple[float, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (1.0,) if self.bits == 1 else _ratios(0.8, 2.4, 33)

    def begin(self, x: jax.Array, weights: jax.Array, axis: int) -> Any:
        total = jnp.sum(jnp.broadcast_to(weights, x.shape), axis=axis)
        return jnp.sum(weights * jnp.abs(x), axis=axis) / jnp.where(total == 0, 1, total)

    def nearest(self, quotients: jax.Array, zero: Zero) -> jax.Array:
        if self.bits == 1:
            return jnp.where(quotients < 0, -1, 1).astype(jnp.int8)
        return jnp.clip(jnp.round(quotients), -1, 1).astype(jnp.int8)

    def codes(self, x: jax.Array, scale: jax.Array, zero: Zero) -> jax.Array:
        return self.nearest(x / jnp.where(scale == 0, 1, scale), zero)

    def units(self, codes: jax.Array, zero: Zero) -> jax.Array:
        return codes.astype(jnp.float32)

    def build(self, codes: Any, scale: Any, zero: Any, *, unit: Any, axis: int, dtype: Any) -> Array1B:
        pad = -codes.shape[axis] % (8 // self.bits)
        packed = onebit.pack(codes, axis=axis, bits=self.bits)
        return Array1B(packed, scale=jnp.moveaxis(scale, axis, -1), bits=self.bits, axis=axis, pad=pad, dtype=dtype)


def grid_of(config: QuantizationConfig, size: int) -> tuple[Grid, int] | None:
    """The grid of a format and its block size, for an axis of so many values; None for one without blocks along it."""
    kind, block = QuantizationType(config.dtype), config.block_size
    if kind == "nf4":
        assert block is not None
        return GridNF4(block, config.double_quant), block
    if kind.startswith("int") and not (kind == "int8" and block is None):
        block = block or integers.whole_rows(size)
        made = GridIntBias if config.biased else GridInt if config.symmetric else GridIntZero
        return made(int(kind.removeprefix("int")), block), block
    if kind in ("ternary", "binary"):
        return GridOneBit(onebit.BITS[kind]), size
    if kind in floats.KINDS and floats.KINDS[kind].block is not None:
        return GridFloat(kind.value), floats.KINDS[kind].block or 0
    return None


@dataclasses.dataclass(frozen=True)
class GridFixed(Grid):
    """INT8 and FP8 with scales that are those of plain rounding: of rows, of tensors, of tiles."""

    kind: str

    def nearest(self, quotients: jax.Array, zero: Zero) -> jax.Array:
        if self.kind == "int8":
            return jnp.clip(jnp.round(quotients), -127, 127).astype(jnp.int8)
        return floats.nearest(quotients, floats.KINDS[self.kind])

    def units(self, codes: jax.Array, zero: Zero) -> jax.Array:
        if self.kind == "int8":
            return codes.astype(jnp.float32)
        return floats.element_values(codes, floats.KINDS[self.kind].element)

    def scales(self, rounded: Any) -> jax.Array:
        """The scale of every value of an array that plain rounding made."""
        if self.kind == "int8":
            return jnp.broadcast_to(rounded.scale, rounded.shape)
        scale = rounded.part(rounded.scale_part)
        if rounded.axis is None:
            return jnp.broadcast_to(scale, rounded.shape)
        long = jnp.repeat(scale, floats.TILE, axis=-1)[..., : rounded.shape[rounded.axis]]
        return jnp.moveaxis(long, -1, rounded.axis)

    def rebuilt(self, rounded: Any, codes: jax.Array) -> Any:
        """The same array with other codes, which are of the logical shape."""
        if self.kind == "int8":
            return rounded.replaced(weight=codes)
        if rounded.axis is not None:
            codes = floats.pack(codes, axis=rounded.axis, block=floats.TILE, per_byte=1)
        return rounded.replaced(codes=codes)
