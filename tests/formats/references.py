"""The codecs again, in NumPy and written for reading: what the fast ones must equal bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from eformer._formats.int8.codec import _largest_scale
from eformer._formats.nf4.codec import _TINY, CODEBOOK, DYNAMIC_MAP, GROUP, THRESHOLDS
from eformer._formats.onebit.codec import ScaleKind


def normal(shape: tuple[int, ...], seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def assert_same(got: Iterable[Any], want: Iterable[Any]) -> None:
    """Array by array, bit for bit."""
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(g), w, strict=True)


def nf4_encode(w: np.ndarray, *, axis: int, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """`nf4.codec.encode`: move, pad, scale, search."""
    moved = np.moveaxis(np.asarray(w), axis, -1).astype(np.float32)
    size = moved.shape[-1]
    blocks = math.ceil(size / block_size)
    padded = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, blocks * block_size - size)])
    padded = padded.reshape(*moved.shape[:-1], blocks, block_size)
    absmax = np.max(np.abs(padded), axis=-1, initial=0)
    absmax = np.where(absmax < _TINY, 0, np.where(np.isfinite(absmax), absmax, np.nan)).astype(np.float32)
    inverse = np.float32(1) / np.where(absmax == 0, np.float32(1), absmax)
    # nan_to_num: a block with NaN is all NaN, and by convention its codes are all 0.
    scaled = np.nan_to_num(padded * inverse[..., None], nan=-1.0)
    codes = np.searchsorted(THRESHOLDS, scaled, side="left").astype(np.uint8)
    return codes[..., ::2] << 4 | codes[..., 1::2], absmax


def nf4_decode(packed: np.ndarray, absmax: np.ndarray, *, axis: int, size: int, dtype: DTypeLike) -> np.ndarray:
    """`nf4.codec.decode`: unpack, look up, scale, cut, move."""
    packed, absmax = np.asarray(packed), np.asarray(absmax)
    codes = np.stack([packed >> 4, packed & 15], axis=-1)
    values = CODEBOOK[codes] * absmax[..., None, None]
    flat = values.reshape(*absmax.shape[:-1], math.prod(values.shape[-3:]))[..., :size]
    return np.moveaxis(flat, -1, axis).astype(jnp.dtype(dtype))


def nf4_compress(absmax: np.ndarray, offset: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of one flat f32 `absmax` for a given `offset`."""
    codes, scales = [], []
    for start in range(0, absmax.size, GROUP):
        group = absmax[start : start + GROUP] - offset
        scale = np.max(np.abs(group))
        scaled = group * (np.float32(1) / scale) if scale else group
        distance = np.abs(scaled[:, None].astype(np.float64) - DYNAMIC_MAP)
        codes.append(np.argmin(distance, axis=-1).astype(np.uint8))
        scales.append(scale)
    return np.concatenate(codes), np.array(scales, np.float32)


def int8_encode(w: np.ndarray, *, axes: int | tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """`int8.codec.encode`."""
    values = np.asarray(w)
    values = values.astype(np.float64 if values.dtype == np.float64 else np.float32)
    absmax = np.max(np.abs(values), axis=axes, keepdims=True, initial=0)
    scale = np.where(np.isfinite(absmax), absmax, np.nan).astype(values.dtype) / values.dtype.type(127)
    scale = np.where(scale < np.finfo(values.dtype).tiny, 0, np.minimum(scale, _largest_scale(values.dtype)))
    rounded = np.rint(values * (1 / np.where(scale == 0, 1, scale)).astype(values.dtype))
    return np.nan_to_num(np.clip(rounded, -127, 127), nan=0).astype(np.int8), scale.astype(values.dtype)


def int8_decode(weight: np.ndarray, scale: np.ndarray, *, dtype: DTypeLike) -> np.ndarray:
    """`int8.codec.decode`."""
    scale = np.asarray(scale)
    return (np.asarray(weight).astype(scale.dtype) * scale).astype(jnp.dtype(dtype))


def ternary(
    w: np.ndarray, *, axis: int, threshold: float | None = None, scale: ScaleKind | None = "channel"
) -> tuple[np.ndarray, np.ndarray | None]:
    """`ternary` of one core array in f64."""
    values = np.asarray(w, np.float64)
    limit = 0.5 * np.std(values) if threshold is None else threshold
    codes = np.where(values > limit, 1, np.where(values < -limit, -1, 0)).astype(np.int8)
    axes = axis if scale == "channel" else None
    kept = np.maximum(np.sum(np.abs(codes), axis=axes, keepdims=True), 1)
    mean = np.sum(np.abs(values * codes), axis=axes, keepdims=True) / kept
    return codes, None if scale is None else np.moveaxis(mean, axis, -1)


def binary(w: np.ndarray, *, axis: int, scale: ScaleKind | None = "channel") -> tuple[np.ndarray, np.ndarray | None]:
    """`binary` of one core array in f64."""
    values = np.asarray(w, np.float64)
    codes = np.where(values < 0, -1, 1).astype(np.int8)
    mean = np.mean(np.abs(values), axis=axis if scale == "channel" else None, keepdims=True)
    return codes, None if scale is None else np.moveaxis(mean, axis, -1)


def pack(codes: np.ndarray, *, axis: int, bits: int) -> np.ndarray:
    """`onebit.codec.pack`: move, pad, place each value."""
    moved = np.moveaxis(np.asarray(codes), axis, -1)
    per_byte = 8 // bits
    padded = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, -moved.shape[-1] % per_byte)])
    fields = (padded > 0 if bits == 1 else padded + 1).astype(np.uint8)
    fields = fields.reshape(*moved.shape[:-1], padded.shape[-1] // per_byte, per_byte)
    places = (8 - bits * (1 + np.arange(per_byte))).astype(np.uint8)
    return np.bitwise_or.reduce(fields << places, axis=-1)


def unpack(packed: np.ndarray, *, axis: int, bits: int, size: int) -> np.ndarray:
    """`onebit.codec.unpack`."""
    packed = np.asarray(packed)
    places = (8 - bits * (1 + np.arange(8 // bits))).astype(np.uint8)
    fields = ((packed[..., None] >> places) & (2**bits - 1)).astype(np.int8)
    values = fields - 1 if bits == 2 else 2 * fields - 1
    flat = values.reshape(*packed.shape[:-1], packed.shape[-1] * (8 // bits))
    return np.moveaxis(flat[..., :size], -1, axis).astype(np.int8)


# -- small floats, written from their specifications -------------------------------------------------------------------
# OCP 8-bit floating point 1.0 (e4m3, e5m2), OCP Microscaling Formats 1.0 (e2m1, e8m0).


def small_float(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """What a code stands for, but for the special ones: sign, exponent with a bias, mantissa."""
    mantissa = code % 2**mantissa_bits
    exponent = code >> mantissa_bits & 2**exponent_bits - 1
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) & 1 else 1.0
    bias = 2 ** (exponent_bits - 1) - 1
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


def element_table(element: str) -> np.ndarray:
    """All values of an element, in f64, in code order."""
    if element == "fp4":
        return np.array([small_float(c, 2, 1) for c in range(16)])
    if element == "iq4_nl":
        return np.array([-127.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
    if element == "fp8_e4m3":  # no infinity; S.1111.111 is NaN
        return np.array([math.nan if c & 127 == 127 else small_float(c, 4, 3) for c in range(256)])
    values = [small_float(c, 5, 2) for c in range(256)]
    for sign in (0, 128):  # S.11111.00 is an infinity, the three above are NaN
        values[124 + sign] = -math.inf if sign else math.inf
        values[125 + sign : 128 + sign] = [math.nan] * 3
    return np.array(values)


def e8m0_table() -> np.ndarray:
    return np.array([2.0 ** (c - 127) for c in range(255)] + [math.nan])


def nearest_code(x: np.ndarray, element: str) -> np.ndarray:
    """The nearest code, a tie to the even one, saturating; searched in the table. NaN gives 0."""
    table = element_table(element)
    finite = np.flatnonzero(np.isfinite(table[: table.size // 2]))
    size, sign = np.abs(np.asarray(x, np.float64)), np.signbit(x)
    distance = np.abs(size[..., None] - table[finite])
    least = distance == distance.min(axis=-1, keepdims=True)
    codes = np.argmax(2 * least - (finite % 2) * 0.5, axis=-1)  # of two nearest, the even one
    return np.where(np.isnan(x), 0, codes + np.where(sign, table.size // 2, 0)).astype(np.uint8)


def in_blocks(w: np.ndarray, axis: int, block: int) -> np.ndarray:
    """f32 `(free axes..., blocks, block)`, padded with zeros."""
    moved = np.moveaxis(np.asarray(w), axis, -1).astype(np.float32)
    padded = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, -moved.shape[-1] % block)])
    return padded.reshape(*moved.shape[:-1], padded.shape[-1] // block, block)


def mx_encode(w: np.ndarray, *, axis: int, element: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes, one a value, and e8m0 scales of blocks of 32, by section 6.3 of the specification."""
    emax = {"fp4": 2, "fp8_e4m3": 8, "fp8_e5m2": 15}[element]
    blocks = in_blocks(w, axis, 32)
    amax = np.max(np.abs(blocks), axis=-1)
    broken = ~np.isfinite(amax)
    with np.errstate(divide="ignore"):
        exponent = np.floor(np.log2(np.where(broken, 1, amax).astype(np.float64))) - emax
    exponent = np.clip(exponent, -127, 127)
    scaled = np.where(broken[..., None], 0, blocks).astype(np.float64) / 2.0 ** exponent[..., None]
    return nearest_code(scaled, element), np.where(broken, 255, exponent + 127).astype(np.uint8)


def nvfp4_encode(w: np.ndarray, *, axis: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, one a value, scales of blocks of 16 as e4m3 codes, and the scale of the whole array."""
    blocks = in_blocks(w, axis, 16)
    amax = np.max(np.abs(blocks), axis=-1)
    finite = np.isfinite(amax)
    whole = np.max(np.where(finite, amax, 0), initial=0) / np.float32(6 * 448)
    whole = np.float32(max(whole, np.finfo(np.float32).tiny))
    wanted = np.where(finite, amax, 0) / np.float32(6) / whole
    scale = nearest_code(np.minimum(wanted, 448), "fp8_e4m3")
    unit = element_table("fp8_e4m3")[scale].astype(np.float32) * whole
    with np.errstate(invalid="ignore"):
        scaled = np.where(unit[..., None] == 0, 0 * blocks, blocks / np.where(unit == 0, 1, unit)[..., None])
    scaled = np.where(finite[..., None], scaled, 0)
    return nearest_code(scaled, "fp4"), np.where(finite, scale, 127).astype(np.uint8), whole


def fp8_encode(w: np.ndarray, amax: np.ndarray, *, element: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes, one a value, and f32 scales for the largest magnitudes `amax` of what shares a scale."""
    table = element_table(element)
    values, largest = np.asarray(w).astype(np.float32), np.float32(np.nanmax(table[np.isfinite(table)]))
    scale = np.asarray(amax, np.float32) / largest
    scale = np.where(scale < np.finfo(np.float32).tiny, np.float32(0), scale)
    codes = nearest_code(values / np.where(scale == 0, np.float32(1), scale), element)
    special = np.where(np.isnan(values), 126, np.where(np.signbit(values), 252, 124))  # e4m3 has no infinity
    special = np.where(element == "fp8_e4m3", 127, special)
    return np.where(np.isfinite(values), codes, special).astype(np.uint8), scale


def iq4_nl_encode(block: np.ndarray) -> tuple[np.ndarray, np.float16]:
    """One block of 32: of 16 scales the one with the least squared error, each with its best codes."""
    table, x = element_table("iq4_nl"), np.asarray(block, np.float64)
    extreme = x[np.argmax(np.abs(x))]
    best = (math.inf, 0.0)
    for place in np.outer((-127, 113), np.linspace(0.82, 1.13, 8)).ravel():
        codes = np.argmin(np.abs(x[:, None] * place / extreme - table), axis=-1)
        scale = x @ table[codes] / (table[codes] @ table[codes])
        best = min(best, (float(np.sum((x - scale * table[codes]) ** 2)), scale))
    scale = np.float16(best[1])
    return np.argmin(np.abs(x[:, None] - table * np.float64(scale)), axis=-1).astype(np.uint8), scale


def integer_encode(
    w: np.ndarray,
    *,
    axis: int,
    bits: int,
    block_size: int,
    symmetric: bool = True,
    scale_dtype: DTypeLike = np.float32,
    biased: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """`integer.codec.encode`: codes (free axes..., blocks, block_size), not packed."""
    moved = np.moveaxis(np.asarray(w), axis, -1).astype(np.float32)
    blocks = math.ceil(moved.shape[-1] / block_size)
    padded = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, blocks * block_size - moved.shape[-1])])
    padded = padded.reshape(*moved.shape[:-1], blocks, block_size)
    low, high = np.min(padded, -1, initial=0), np.max(padded, -1, initial=0)
    wrong = ~(np.isfinite(low) & np.isfinite(high))
    low, high = np.where(wrong, np.float32(np.nan), low), np.where(wrong, np.float32(np.nan), high)
    half, steps = 2 ** (bits - 1), np.float32(2**bits - 1)
    symmetric = symmetric and not biased
    scale = np.where(-low >= high, low, high) / np.float32(-half) if symmetric else high / steps - low / steps
    scale = np.where(np.abs(scale) < _TINY, np.float32(0), scale).astype(jnp.dtype(scale_dtype))
    wide = scale.astype(np.float32)
    divisor = np.where(wide == 0, np.float32(1), wide)
    if biased:
        bias = low.astype(jnp.dtype(scale_dtype))
        codes = np.rint((padded - bias.astype(np.float32)[..., None]) / divisor[..., None])
        return np.nan_to_num(np.clip(codes, 0, steps), nan=0).astype(np.uint8), scale, bias
    zero = np.clip(np.nan_to_num(np.rint(-low / divisor)), 0, steps)
    codes = np.rint(padded / divisor[..., None]) + (half if symmetric else zero[..., None])
    codes = np.nan_to_num(np.clip(codes, 0, steps), nan=half if symmetric else 0).astype(np.uint8)
    return codes, scale, None if symmetric else zero.astype(np.uint8)


def integer_decode(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray | None, bias: np.ndarray | None, bits: int):
    """`integer.codec.values_of` for codes with one axis more than the other arrays."""
    values, scale = np.asarray(codes).astype(np.float32), np.asarray(scale).astype(np.float32)[..., None]
    if bias is not None:
        return values * scale + np.asarray(bias).astype(np.float32)[..., None]
    return (values - (2 ** (bits - 1) if zero is None else np.asarray(zero).astype(np.float32)[..., None])) * scale


def bits_in_a_row(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes (..., n) as bytes, one after the other, high bits first."""
    each = np.unpackbits(np.asarray(codes, np.uint8)[..., None], axis=-1)[..., 8 - bits :]
    return np.packbits(each.reshape(*codes.shape[:-1], codes.shape[-1] * bits), axis=-1)
