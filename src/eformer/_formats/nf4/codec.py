"""NF4: blocks of 4-bit codes with one f32 absmax each.

A value decodes to `CODEBOOK[code] * absmax[block]`; its code is the nearest one of `w * (1 / absmax)`, a tie taking the
lower code. Codes and absmax equal those of bitsandbytes byte for byte on the same blocks. Corner cases:

- Arithmetic is f32: bf16 and f16 are exact in it, f64 is rounded first.
- 0 decodes to 0 exactly, and so does every value of a block whose absmax is 0 or subnormal (stored as 0).
- NaN or an infinity anywhere in a block makes its absmax NaN: the whole block decodes to NaN.
- A ragged last block is padded in storage with code 7 (zero), which changes neither absmax nor the other codes.
- `encode(decode(q)) == q` bit for bit in f32 as long as absmax is at least 2**-122 (below, a product underflows).
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from eformer._formats import arguments as _arguments
from eformer._formats import blocks as _blocks
from eformer._formats.nf4.double import compress_absmax as compress_absmax
from eformer._formats.nf4.double import expand_absmax as expand_absmax
from eformer._kernels.encode import nf4_encoder
from eformer._kernels.formats import NF4_CODEBOOK as CODEBOOK

THRESHOLDS: np.ndarray = (CODEBOOK[:-1] + CODEBOOK[1:]) / np.float32(2)

_TINY = np.finfo(np.float32).tiny
# 1 / absmax is subnormal above 2**126 and CPUs run XLA code with subnormals flushed to zero.
_HUGE, _SHRINK = np.float32(2.0**120), np.float32(2.0**-16)


@functools.partial(jax.jit, static_argnames=("axis", "block_size"))
def encode(w: jax.Array, *, axis: int, block_size: int) -> tuple[jax.Array, jax.Array]:
    """Quantize blocks of `block_size` values along `axis`.

    Returns codes, uint8 `lead + trail + (blocks, block_size // 2)` with the first of two in the high nibble, and
    absmax, f32 `lead + trail + (blocks,)`.

    >>> packed, absmax = encode(jnp.array([0.0, 0.5, -1.0, 2.0]), axis=-1, block_size=4)
    >>> packed.tolist(), absmax.tolist()
    ([[122, 47]], [2.0])
    """
    _arguments.check_float(w, "NF4")
    axis = _arguments.check_axis(axis, w.ndim)
    block_size = _arguments.check_block_size(block_size)
    if axis == -1:
        return _encode_last(w, block_size)
    return _encode_along(w, axis, block_size)


@nf4_encoder
def _encode_last(w: jax.Array, block_size: int) -> tuple[jax.Array, jax.Array]:
    """What a native encoder may compute instead."""
    return _encode_along(w, -1, block_size)


def _encode_along(w: jax.Array, axis: int, block_size: int) -> tuple[jax.Array, jax.Array]:
    at = w.ndim + axis
    results = [_encode_blocks(piece, at) for piece in _blocks.grouped(w, axis, block_size)]
    packed = _blocks.joined([codes for codes, _ in results], at)
    absmax = _blocks.joined([scale for _, scale in results], at)
    return _blocks.group_last(packed, at, 1), _blocks.group_last(absmax, at, 0)


@functools.partial(jax.jit, static_argnames=("axis", "size", "dtype"))
def decode(packed: jax.Array, absmax: jax.Array, *, axis: int, size: int, dtype: DTypeLike) -> jax.Array:
    """The dense array of `encode`'s storage; `size` is the true length of the blocked axis.

    >>> decode(*encode(jnp.array([0.0, 0.5, -1.0, 2.0]), axis=-1, block_size=4), axis=-1, size=4, dtype=jnp.float32)
    Array([ 0.       ,  0.4922246, -1.0501461,  2.       ], dtype=float32)
    """
    at, block_size = _check_storage(packed, absmax, axis, size)
    codes = _blocks.group_at(packed, at, 1)
    pair = codes.shape[: at + 2] + (2,) + codes.shape[at + 2 :]
    # One byte feeds two rows: shifting by an iota keeps this a single elementwise loop without a stack.
    shift = (1 - lax.broadcasted_iota(jnp.uint8, pair, at + 2)) * jnp.uint8(4)
    values = _lookup((jnp.expand_dims(codes, at + 2) >> shift) & jnp.uint8(15))
    values = values * jnp.expand_dims(_blocks.group_at(absmax, at, 0), (at + 1, at + 2))
    blocks = codes.shape[at]
    dense = values.astype(dtype).reshape(codes.shape[:at] + (blocks * block_size,) + codes.shape[at + 2 :])
    return lax.slice_in_dim(dense, 0, size, axis=at)


def _encode_blocks(blocks: jax.Array, at: int) -> tuple[jax.Array, jax.Array]:
    """Encode `lead + (blocks, block_size) + trail`, the blocks being at axis `at`; keeps that layout."""
    lead, trail = blocks.shape[: at + 1], blocks.shape[at + 2 :]
    absmax = _blocks.absmax_within(blocks, at + 1).astype(jnp.float32)
    absmax = jnp.where(absmax < _TINY, 0.0, jnp.where(absmax < jnp.inf, absmax, jnp.nan))
    shrink = jnp.where(absmax > _HUGE, _SHRINK, 1.0)
    inverse = 1.0 / jnp.where(absmax == 0, 1.0, absmax * shrink)
    scaled = (blocks.astype(jnp.float32) * jnp.expand_dims(shrink, at + 1)) * jnp.expand_dims(inverse, at + 1)
    codes = _nearest(scaled).reshape(*lead, blocks.shape[at + 1] // 2, 2, *trail)
    packed = (_blocks.along(codes, 0, at + 2) << 4) | _blocks.along(codes, 1, at + 2)
    return packed, absmax


def _nearest(x: jax.Array) -> jax.Array:
    """How many thresholds lie below `x`, by bisection: four compares instead of fifteen. NaN gives 0."""
    bits: list[jax.Array] = []
    for level in range(4):
        step = 8 >> level
        bits.append(x > _pick(bits, [THRESHOLDS[i] for i in range(step - 1, 15, 2 * step)]))
    return functools.reduce(lambda code, bit: (code << 1) | bit.astype(jnp.uint8), bits, jnp.uint8(0))


def _lookup(codes: jax.Array) -> jax.Array:
    """`CODEBOOK[codes]` as a tree of selects, which vectorizes where a gather does not."""
    return _pick([(codes & jnp.uint8(8 >> level)) != 0 for level in range(4)], list(CODEBOOK))


def _pick(bits: list[jax.Array], options: list) -> jax.Array:
    """The option whose index has these `bits`, most significant first."""
    for bit in reversed(bits):
        options = [jnp.where(bit, high, low) for low, high in zip(options[::2], options[1::2], strict=True)]
    return options[0]


def _check_storage(packed: jax.Array, absmax: jax.Array, axis: int, size: int) -> tuple[int, int]:
    """The position of the blocked axis and the block size, once the two arrays are known to agree."""
    _arguments.check_storage(packed, "NF4 codes")
    if packed.ndim < 2 or packed.shape[:-1] != absmax.shape:
        raise ValueError(
            f"NF4 codes of shape {packed.shape} and absmax of shape {absmax.shape} do not belong together. "
            "Codes must have the shape of absmax and one more axis of block_size // 2 bytes."
        )
    rank = packed.ndim - 1
    block_size = _arguments.check_block_size(2 * packed.shape[-1])
    _arguments.check_size(size, packed.shape[-2], block_size, "blocks")
    return rank + _arguments.check_axis(axis, rank), block_size


def encode_reference(w: np.ndarray, *, axis: int, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """`encode`, written for reading: move, pad, scale, search."""
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


def decode_reference(packed: np.ndarray, absmax: np.ndarray, *, axis: int, size: int, dtype: DTypeLike) -> np.ndarray:
    """`decode`, written for reading: unpack, look up, scale, cut, move."""
    packed, absmax = np.asarray(packed), np.asarray(absmax)
    codes = np.stack([packed >> 4, packed & 15], axis=-1)
    values = CODEBOOK[codes] * absmax[..., None, None]
    flat = values.reshape(*absmax.shape[:-1], math.prod(values.shape[-3:]))[..., :size]
    return np.moveaxis(flat, -1, axis).astype(jnp.dtype(dtype))
