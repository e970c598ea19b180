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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from eformer._formats import arguments as _arguments
from eformer._formats import blocks as _blocks
from eformer._jax import avals
from eformer._kernels.encode import nf4_encoder
from eformer._kernels.formats import NF4_CODEBOOK as CODEBOOK
from eformer._kernels.formats import entries

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
    decoded = values(_blocks.unpacked(codes, at + 1, 4))
    decoded = decoded * jnp.expand_dims(_blocks.group_at(absmax, at, 0), (at + 1, at + 2))
    blocks = codes.shape[at]
    dense = decoded.astype(dtype).reshape(codes.shape[:at] + (blocks * block_size,) + codes.shape[at + 2 :])
    return lax.slice_in_dim(dense, 0, size, axis=at)


def _encode_blocks(blocks: jax.Array, at: int) -> tuple[jax.Array, jax.Array]:
    """Encode `lead + (blocks, block_size) + trail`, the blocks being at axis `at`; keeps that layout."""
    absmax = _blocks.absmax_within(blocks, at + 1).astype(jnp.float32)
    absmax = jnp.where(absmax < _TINY, 0.0, jnp.where(absmax < jnp.inf, absmax, jnp.nan))
    shrink = jnp.where(absmax > _HUGE, _SHRINK, 1.0)
    inverse = 1.0 / jnp.where(absmax == 0, 1.0, absmax * shrink)
    scaled = (blocks.astype(jnp.float32) * jnp.expand_dims(shrink, at + 1)) * jnp.expand_dims(inverse, at + 1)
    return _blocks.packed(nearest(scaled), at + 1, 4), absmax


def nearest(x: jax.Array) -> jax.Array:
    """How many thresholds lie below `x`, by bisection: four compares instead of fifteen. NaN gives 0."""
    bits: list[jax.Array] = []
    for level in range(4):
        step = 8 >> level
        limits: list[Any] = [THRESHOLDS[i] for i in range(step - 1, 15, 2 * step)]
        for bit in reversed(bits):
            limits = [jnp.where(bit, high, low) for low, high in zip(limits[::2], limits[1::2], strict=True)]
        bits.append(x > limits[0])
    return functools.reduce(lambda code, bit: (code << 1) | bit.astype(jnp.uint8), bits, jnp.uint8(0))


def values(codes: jax.Array) -> jax.Array:
    """`CODEBOOK[codes]`."""
    return entries(CODEBOOK, codes, jnp.float32)


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


# -- double quantization: the absmax of blocks, themselves at 8 bits ---------------------------------------------------
# The mean is subtracted, then groups of 256 share an f32 scale and each value takes the nearest entry of the signed
# dynamic map (sign, decimal exponent, linear fraction):
#
#     absmax ≈ DYNAMIC_MAP[code] * scale[group] + offset
#
# This is what bitsandbytes computes for `compress_statistics=True`, a tie taking the lower code. (Its CPU build first
# rounds to a grid of 2**-15, so a code there may differ; its own portable kernel agrees.) A NaN absmax is left out of
# the mean and makes the scale of its group NaN.

GROUP = 256


def _dynamic_map() -> np.ndarray:
    """256 sorted values: 0, 1 and ± the midpoints of 2**e equal steps over [0.1, 1] times 10**(e - 6), e = 0…6.

    Every rounding to f32 is part of the format: checkpoints hold the codes, and often the table.
    """
    f32 = np.float32
    values = [f32(0), f32(1)]
    for exponent in range(7):
        steps = 2**exponent
        step = float((f32(1) - f32(0.1)) / f32(steps))
        index = np.arange(steps + 1)
        # Counted from the nearer end.
        edges = np.where(index < (steps + 1) // 2, f32(0.1) + step * index, 1.0 - step * (steps - index)).astype(f32)
        middles = f32(10.0 ** (exponent - 6)) * ((edges[:-1] + edges[1:]) / f32(2))
        values += [*middles, *-middles]
    return np.sort(np.array(values, f32))


DYNAMIC_MAP: np.ndarray = _dynamic_map()
_BOUNDS: np.ndarray = (DYNAMIC_MAP[:-1] + DYNAMIC_MAP[1:]) / np.float32(2)


@functools.partial(jax.jit, static_argnames=("core_ndim",))
def compress_absmax(absmax: jax.Array, *, core_ndim: int | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantize `absmax` to 8 bits; its last `core_ndim` axes (default: all) are flattened together.

    Returns codes of the shape of `absmax`, scales `batch + (groups,)` and offsets `batch`.

    >>> codes, scale, offset = compress_absmax(jnp.array([1.0, 2.0, 6.0]))
    >>> codes.tolist(), scale.tolist(), offset.tolist()
    ([23, 47, 255], [3.0], 3.0)
    """
    _arguments.check_float(absmax, "double quantization")
    batch, flat = _flat(avals.on_every_device(absmax).astype(jnp.float32), core_ndim)
    finite = jnp.isfinite(flat)
    count = jnp.sum(finite, axis=-1, dtype=jnp.int32)
    offset = jnp.sum(jnp.where(finite, flat, 0.0), axis=-1) / jnp.maximum(count, 1).astype(jnp.float32)
    codes, scale = _compress_centred(flat - offset[..., None])
    return avals.sharded_like(codes.reshape(absmax.shape), absmax), scale, offset.reshape(batch)


@functools.partial(jax.jit, static_argnames=("core_ndim",))
def expand_absmax(codes: jax.Array, scale: jax.Array, offset: jax.Array, *, core_ndim: int | None = None) -> jax.Array:
    """The f32 absmax that `compress_absmax` stored."""
    _arguments.check_storage(codes, "absmax codes")
    batch, flat = _flat(avals.on_every_device(codes), core_ndim)
    scale, offset = avals.on_every_device(scale), avals.on_every_device(offset)
    groups = math.ceil(flat.shape[-1] / GROUP)
    if scale.shape != batch + (groups,) or offset.shape != batch:
        raise ValueError(
            f"absmax codes of shape {codes.shape} with core_ndim={core_ndim} need scales of shape {batch + (groups,)} "
            f"and offsets of shape {batch}, but got {scale.shape} and {offset.shape}. Where shard_map or an index took "
            "a part of the codes, expand them first: q = dataclasses.replace(q, absmax=q.absmax.expanded())."
        )
    scales = jnp.repeat(scale, GROUP, axis=-1)[..., : flat.shape[-1]]
    product = jnp.asarray(DYNAMIC_MAP)[flat] * scales
    # The maximum changes nothing but keeps compilers from contracting to a fused multiply-add, which rounds once where
    # the format rounds twice.
    product = jnp.maximum(product, jnp.finfo(jnp.float32).min)
    return avals.sharded_like((product + offset[..., None]).reshape(codes.shape), codes)


def _flat(x: jax.Array, core_ndim: int | None) -> tuple[tuple[int, ...], jax.Array]:
    core = _arguments.check_core(core_ndim, x.ndim)
    batch = x.shape[: x.ndim - core]
    return batch, x.reshape(*batch, math.prod(x.shape[x.ndim - core :]))


def _compress_centred(centred: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes and scales for values `batch + (n,)` from which the offset is already taken."""
    size = centred.shape[-1]
    groups = math.ceil(size / GROUP)
    padding = [(0, 0)] * (centred.ndim - 1) + [(0, groups * GROUP - size)]
    blocks = jnp.pad(centred, padding).reshape(*centred.shape[:-1], groups, GROUP)
    scale = _blocks.largest(blocks, -1)[..., 0]
    scale = jnp.where(jnp.isfinite(scale), scale, jnp.nan)
    scaled = blocks * (1.0 / jnp.where(scale == 0, 1.0, scale))[..., None]
    codes = jnp.searchsorted(_BOUNDS, scaled, side="left").astype(jnp.uint8)
    return codes.reshape(*centred.shape[:-1], groups * GROUP)[..., :size], scale
