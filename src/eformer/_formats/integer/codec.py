"""Integers of 2 to 8 bits in blocks, each block with a scale and perhaps a zero point or a bias.

A code is a number from 0 to 2^bits - 1. What it stands for, with h = 2^(bits-1):

    symmetric    (code - h) * scale
    zero point   (code - zero) * scale
    bias         code * scale + bias

`encode` makes all three. Symmetric: the value of the largest magnitude in a block becomes -h exactly, so its scale
has the other sign; against absmax / (h - 1), which leaves a code unused, that is 1.1 dB less noise at 4 bits and 5 dB
at 2. With a zero point: scale = (max - min) / (2^bits - 1), the range made to include 0; zero = round(-min / scale).
Codes are rounded to nearest, half to even, and clipped. Corner cases:

- `encode` computes in f32: bf16 and f16 are exact in it, f64 is rounded first. The scale is rounded to its dtype before
  codes are computed with it, and is at most the largest number of that dtype.
- 0 decodes to 0 exactly. A block whose scale is 0 or would be subnormal (stored as 0) decodes to zeros.
- NaN or an infinity anywhere in a block makes its scale NaN: the whole block decodes to NaN.
- A ragged last block is padded in storage with codes of 0.0, which changes nothing else.
- Symmetric, `encode(decode(q)) == q` bit for bit in f32.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from eformer._formats import arguments as _arguments
from eformer._formats import blocks as _blocks
from eformer._kernels.formats import pack, unpack

BITS = (2, 3, 4, 5, 6, 8)
STEP, SMALLEST, LARGEST = 8, 16, 1 << 20  # block sizes: multiples of the first, so that blocks end with a byte
SCALES = ("float32", "bfloat16", "float16")


def kernel_format(bits: int) -> str:
    return "int8_block" if bits == 8 else f"int{bits}"


def check_bits(bits: Any) -> int:
    bits = _arguments.as_index(bits, "bits")
    if bits not in BITS:
        raise ValueError(f"{bits=} is not allowed: integers have {', '.join(map(str, BITS[:-1]))} or {BITS[-1]} bits.")
    return bits


def check_block_size(block_size: Any) -> int:
    """Return `block_size` as an int, or raise unless blocks of it end with a byte whatever the number of bits."""
    block_size = _arguments.as_index(block_size, "block_size")
    if not SMALLEST <= block_size <= LARGEST or block_size % STEP:
        raise ValueError(
            f"{block_size=} is not allowed: integers are stored in blocks of a multiple of {STEP} values, {SMALLEST} "
            f"to {LARGEST}. Use 32, 64 or 128, or None for one scale per row."
        )
    return block_size


def whole_rows(size: int) -> int:
    """The block size that makes one block of so many values."""
    return max(-(-size // STEP) * STEP, SMALLEST)


def check_scale_dtype(dtype: Any) -> np.dtype:
    dtype = jnp.dtype(dtype)
    if dtype.name not in SCALES:
        raise TypeError(f"a scale of dtype {dtype.name} is not allowed: use {', '.join(SCALES)}.")
    return dtype


@functools.partial(jax.jit, static_argnames=("axis", "bits", "block_size", "symmetric", "scale_dtype", "biased"))
def encode(
    w: jax.Array,
    *,
    axis: int,
    bits: int,
    block_size: int,
    symmetric: bool = True,
    scale_dtype: Any = jnp.float32,
    biased: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Quantize blocks of `block_size` values along `axis`.

    Returns packed codes `lead + trail + (blocks, bytes)`, scales `lead + trail + (blocks,)`, and uint8 zero points of
    the shape of the scales (or biases, of the dtype of the scales), or None.

    >>> packed, scale, _ = encode(jnp.array([0.0, 0.5, 1.0, -2.0] * 4), axis=-1, bits=4, block_size=16)
    >>> packed.tolist()[0][:2], scale.tolist()
    ([138, 192], [0.25])
    """
    _arguments.check_float(w, "an integer format")
    axis, bits, block_size = _arguments.check_axis(axis, w.ndim), check_bits(bits), check_block_size(block_size)
    scale_dtype, at = check_scale_dtype(scale_dtype), w.ndim + axis
    run = _with_bias if biased else _symmetric if symmetric else _with_zero
    results = [
        run(piece.astype(jnp.float32), at + 1, bits, scale_dtype) for piece in _blocks.grouped(w, axis, block_size)
    ]
    codes, scale, zero = (_blocks.joined(list(parts), at) for parts in zip(*results, strict=True))
    packed, alone = packed_codes(_blocks.group_last(codes, at, 1), bits), symmetric and not biased
    return packed, _blocks.group_last(scale, at, 0), None if alone else _blocks.group_last(zero, at, 0)


def packed_codes(codes: jax.Array, bits: int) -> jax.Array:
    """Codes (..., block), packed; those of 8 bits are stored as signed bytes."""
    if bits == 8:
        return (codes.astype(jnp.int16) - 128).astype(jnp.int8)
    return pack(codes, kernel_format(bits))


def unpacked_codes(packed: jax.Array, bits: int) -> jax.Array:
    """Codes from 0 to 2^bits - 1, as int16."""
    return packed.astype(jnp.int16) + 128 if bits == 8 else unpack(packed, kernel_format(bits)).astype(jnp.int16)


def _symmetric(blocks: jax.Array, at: int, bits: int, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    half = 2 ** (bits - 1)
    low, high = _ends(blocks, at)
    scale = _stored(jnp.where(-low >= high, low, high) * np.float32(-1 / half), dtype)
    codes = _rounded(blocks, scale, at) + half
    return _codes(codes, half, bits), scale, jnp.zeros(scale.shape, jnp.uint8)


def _with_zero(blocks: jax.Array, at: int, bits: int, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    low, high = _ends(blocks, at)
    # Divided first: the difference of the ends may be too large. By a value XLA cannot turn into a factor.
    steps = jnp.where(high - high == 0, 2**bits - 1, jnp.nan).astype(jnp.float32)
    scale = _stored(high / steps - low / steps, dtype)
    exact = -low / _divisor(scale)
    zero = jnp.clip(jnp.where(jnp.isnan(exact), 0, jnp.round(exact)), 0, 2**bits - 1)
    codes = _rounded(blocks, scale, at) + jnp.expand_dims(zero, at)
    return _codes(codes, 0, bits), scale, zero.astype(jnp.uint8)


def _with_bias(blocks: jax.Array, at: int, bits: int, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    low, high = _ends(blocks, at)
    steps = jnp.where(high - high == 0, 2**bits - 1, jnp.nan).astype(jnp.float32)  # as above
    scale, bias = _stored(high / steps - low / steps, dtype), _stored(low, dtype)
    codes = _rounded(blocks - jnp.expand_dims(bias.astype(jnp.float32), at), scale, at)
    return _codes(codes, 0, bits), scale, bias


def _ends(blocks: jax.Array, at: int) -> tuple[jax.Array, jax.Array]:
    """The smallest and the largest value of every block, 0 at most and at least; NaN for both if any is not finite."""
    low, high = jnp.min(blocks, at, initial=0.0), jnp.max(blocks, at, initial=0.0)
    finite = _blocks.absmax_within(blocks, at) < jnp.inf  # extremes by XLA may leave out NaN
    return jnp.where(finite, low, jnp.nan), jnp.where(finite, high, jnp.nan)


def _stored(scale: jax.Array, dtype: Any) -> jax.Array:
    limits = jnp.finfo(dtype)
    scale = jnp.where(jnp.abs(scale) < jnp.finfo(jnp.float32).tiny, 0, scale)
    return jnp.clip(scale, limits.min.astype(np.float32), limits.max.astype(np.float32)).astype(dtype)


def _divisor(scale: jax.Array) -> jax.Array:
    scale = scale.astype(jnp.float32)
    return jnp.where(scale == 0, 1, scale)


def _rounded(blocks: jax.Array, scale: jax.Array, at: int) -> jax.Array:
    return jnp.round(_blocks.quotient(blocks, _divisor(scale), at))


def _codes(codes: jax.Array, nothing: int, bits: int) -> jax.Array:
    return jnp.where(jnp.isnan(codes), nothing, jnp.clip(codes, 0, 2**bits - 1)).astype(jnp.uint8)


@functools.partial(jax.jit, static_argnames=("axis", "size", "bits", "dtype", "linear"))
def decode(
    packed: jax.Array,
    scale: jax.Array,
    zero: Any,
    bias: Any,
    *,
    axis: int,
    size: int,
    bits: int,
    dtype: DTypeLike,
    linear: bool = False,
) -> jax.Array:
    """The dense array of storage as `encode` makes it; `size` is the true length of the blocked axis.

    >>> stored = encode(jnp.array([0.0, 0.5, 1.0, -2.0] * 4), axis=-1, bits=4, block_size=16)
    >>> decode(*stored, None, axis=-1, size=4, bits=4, dtype=jnp.float32)
    Array([ 0. ,  0.5,  1. , -2. ], dtype=float32)
    """
    codes = unpacked_codes(packed, bits)
    numbers = (None if a is None else a[..., None] for a in (scale, zero, bias))
    values = values_of(bits, codes, *numbers, dtype=dtype, linear=linear)
    dense = values.astype(dtype).reshape(*packed.shape[:-2], values.shape[-2] * values.shape[-1])[..., :size]
    return jnp.moveaxis(dense, -1, axis)


def values_of(
    bits: int, codes: jax.Array, scale: Any, zero: Any, bias: Any, *, dtype: DTypeLike, linear: bool = False
) -> jax.Array:
    """What codes stand for, in f32, or in f64 for that dtype; scale, zero and bias broadcast against them.

    `linear` leaves out what makes a sum round twice, which has no transpose: for scales that are differentiated.
    """
    wide = _blocks.wide(dtype)
    scale, codes = scale.astype(wide), codes.astype(wide)
    if bias is None:
        return (codes - (2 ** (bits - 1) if zero is None else zero.astype(wide))) * scale
    # The maximum changes nothing but keeps compilers from contracting to a fused multiply-add, which rounds once.
    values = codes * scale
    return (values if linear else jnp.maximum(values, jnp.finfo(wide).min)) + bias.astype(wide)
