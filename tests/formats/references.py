"""The codecs again, in NumPy and written for reading: what the fast ones must equal bit for bit."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from eformer._formats.int8.codec import _largest_scale
from eformer._formats.nf4.codec import _TINY, CODEBOOK, DYNAMIC_MAP, GROUP, THRESHOLDS
from eformer._formats.onebit.codec import ScaleKind


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
