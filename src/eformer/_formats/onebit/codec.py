"""Ternary {-1, 0, 1} and binary {-1, 1} codes with a least-squares scale, packed at two bits and one.

A value decodes to `code * scale`. Ternary keeps the values with `|w| > threshold` (default: half the standard deviation
of the whole core array) and scales by the mean of their magnitudes; binary takes the sign, 0 counting as +1, and scales
by the mean of all magnitudes. For fixed codes these scales have the least squared error. Corner cases:

- Scales are f32 (f64 for f64 input), laid out as storage is: the blocked axis last, with size 1.
- Where ternary keeps nothing the scale is 0.
- NaN or an infinity makes every scale it enters NaN. With the default threshold it enters all of them.
  Without a scale (`scale=None`) there is no place for it: NaN becomes 0 (ternary) or +1 (binary).
- Sums are f32: a channel whose magnitudes add up to more than 3.4e38 gets a NaN scale.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from eformer._formats import arguments as _arguments
from eformer._formats import blocks as _blocks

ScaleKind = Literal["channel", "tensor"]
BITS = {"ternary": 2, "binary": 1}

_STATIC = ("axis", "scale", "core_ndim")


@functools.partial(jax.jit, static_argnames=_STATIC)
def ternary(
    w: jax.Array,
    *,
    axis: int,
    threshold: ArrayLike | None = None,
    scale: ScaleKind | None = "channel",
    core_ndim: int | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Codes in {-1, 0, 1}, int8 of the shape of `w`, and the scale.

    `scale="channel"` reduces over `axis`: shape `lead + trail + (1,)`. `"tensor"` reduces over the last `core_ndim`
    axes (default: all), each kept with size 1. `threshold` is absolute and broadcasts against `w`.

    >>> codes, scale = ternary(jnp.array([[0.1, -2.0, 4.0]]), axis=-1)
    >>> codes.tolist(), scale.tolist()
    ([[0, -1, 1]], [[3.0]])
    """
    values, core = _prepare(w, axis, scale, core_ndim, "ternary")
    if threshold is None:
        limit = jnp.asarray(0.5, values.dtype) * _std(values, axis, core)
    else:
        limit = jnp.asarray(threshold, values.dtype)
    codes = jnp.where(values > limit, 1, jnp.where(values < -limit, -1, 0)).astype(jnp.int8)
    if scale is None:
        return codes, None
    magnitude = jnp.abs(values)
    # NaN is not <= limit, so it stays in the sum.
    total = _reduce(jnp.where(magnitude <= limit, 0, magnitude), axis, scale, core)
    count = _reduce((magnitude > limit).astype(values.dtype), axis, scale, core)
    mean = jnp.where(total < jnp.inf, total / jnp.maximum(count, 1), jnp.nan)
    # A NaN threshold keeps nothing and sums everything: it must show in the scale.
    undefined = jnp.any(jnp.isnan(limit), axis=tuple(range(-min(core, limit.ndim), 0)), keepdims=True)
    return codes, jnp.moveaxis(jnp.where(undefined, jnp.nan, mean), axis, -1)


@functools.partial(jax.jit, static_argnames=_STATIC)
def binary(
    w: jax.Array, *, axis: int, scale: ScaleKind | None = "channel", core_ndim: int | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Codes in {-1, 1}, int8 of the shape of `w`, and the scale as for `ternary`.

    >>> codes, scale = binary(jnp.array([[0.0, -2.0, 4.0]]), axis=-1)
    >>> codes.tolist(), scale.tolist()
    ([[1, -1, 1]], [[2.0]])
    """
    values, core = _prepare(w, axis, scale, core_ndim, "binary")
    codes = jnp.where(values < 0, -1, 1).astype(jnp.int8)
    if scale is None:
        return codes, None
    count = w.shape[axis] if scale == "channel" else math.prod(w.shape[w.ndim - core :])
    mean = _reduce(jnp.abs(values), axis, scale, core) / float(max(count, 1))
    return codes, jnp.moveaxis(jnp.where(mean < jnp.inf, mean, jnp.nan), axis, -1)


@functools.partial(jax.jit, static_argnames=("kind", *_STATIC))
def encode(
    w: jax.Array,
    threshold: ArrayLike | None = None,
    *,
    kind: Literal["ternary", "binary"],
    axis: int,
    scale: ScaleKind | None = "channel",
    core_ndim: int | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """`ternary` or `binary` straight to packed bytes: the int8 codes are never written to memory.

    >>> packed, scale = encode(jnp.array([[0.1, -2.0, 4.0]]), kind="ternary", axis=-1)
    >>> packed.tolist(), scale.tolist()
    ([[73]], [[3.0]])
    """
    if kind == "ternary":
        codes, scales = ternary(w, axis=axis, threshold=threshold, scale=scale, core_ndim=core_ndim)
    elif kind == "binary" and threshold is None:
        codes, scales = binary(w, axis=axis, scale=scale, core_ndim=core_ndim)
    else:
        raise ValueError(f"{kind=} with {threshold=}: allowed are 'ternary', and 'binary' without a threshold.")
    return pack(codes, axis=axis, bits=BITS[kind]), scales


@functools.partial(jax.jit, static_argnames=("axis", "bits", "size", "dtype"))
def decode(
    packed: jax.Array, scale: jax.Array | None, *, axis: int, bits: int, size: int, dtype: DTypeLike
) -> jax.Array:
    """The dense array: codes times scale, multiplied in the dtype of the scale and rounded once to `dtype`."""
    codes = unpack(packed, axis=axis, bits=bits, size=size)
    if scale is None:
        return codes.astype(dtype)
    return (codes.astype(scale.dtype) * jnp.moveaxis(scale, -1, axis)).astype(dtype)


def _prepare(
    w: jax.Array, axis: int, scale: ScaleKind | None, core_ndim: int | None, name: str
) -> tuple[jax.Array, int]:
    """The values in the dtype to compute in, and the number of core axes, once all arguments are known to fit."""
    _arguments.check_float(w, name)
    core = _arguments.check_core(core_ndim, w.ndim)
    _arguments.check_axis(axis, core)
    if scale not in ("channel", "tensor", None):
        raise ValueError(f"{scale=} is unknown. Allowed: 'channel', 'tensor', None.")
    return w.astype(_blocks.wide(w.dtype)), core


def _reduce(x: jax.Array, axis: int, scale: ScaleKind, core: int) -> jax.Array:
    """The sum over the blocked axis or, for one scale per tensor, over all core axes; reduced axes are kept."""
    partial = _blocks.sum_along(x, axis)
    if scale == "channel":
        return partial
    return jnp.sum(partial, axis=tuple(range(-core, 0)), keepdims=True)


def _std(values: jax.Array, axis: int, core: int) -> jax.Array:
    """Standard deviation over the core axes, kept with size 1; NaN if it is not finite."""
    count = float(max(math.prod(values.shape[values.ndim - core :]), 1))  # as an int it may not fit into 32 bits
    mean = _reduce(values, axis, "tensor", core) / count
    variance = _reduce(jnp.square(values - mean), axis, "tensor", core) / count
    return jnp.sqrt(jnp.where(variance < jnp.inf, variance, jnp.nan))


# -- packing along one axis --------------------------------------------------------------------------------------------
# Two bits store `value + 1` (0b00 = -1, 0b01 = 0, 0b10 = +1; 0b11 is not used), one bit stores `value > 0`: decoding is
# a shift, a mask and a subtraction, and needs no table. The first value sits in the most significant bits. An end that
# does not fill a byte is padded with the value 0: 0b01 at two bits, 0b0 at one.


@functools.partial(jax.jit, static_argnames=("axis", "bits"))
def pack(codes: jax.Array, *, axis: int, bits: int) -> jax.Array:
    """Pack int8 `codes` into uint8 `lead + trail + (ceil(K / (8 // bits)),)`; at one bit, 0 counts as -1.

    >>> pack(jnp.array([1, 0, -1, 1, -1], jnp.int8), axis=-1, bits=2).tolist()
    [146, 21]
    """
    if not jnp.issubdtype(codes.dtype, jnp.signedinteger):
        raise TypeError(f"Codes to pack must be signed integers (int8), but got dtype {codes.dtype.name}.")
    per_byte = _per_byte(bits)
    axis = _arguments.check_axis(axis, codes.ndim)
    at, size = codes.ndim + axis, codes.shape[axis]
    pieces = [_pack_pairs(piece, at, bits) for piece in _blocks.grouped(codes, axis, 2 * per_byte)]
    pairs = _blocks.pairs_last(_blocks.joined(pieces, at), at)
    packed = pairs.reshape(*pairs.shape[:-2], 2 * pairs.shape[-2])
    return lax.slice_in_dim(packed, 0, -(-size // per_byte), axis=-1)


@functools.partial(jax.jit, static_argnames=("axis", "bits", "size"))
def unpack(packed: jax.Array, *, axis: int, bits: int, size: int) -> jax.Array:
    """The int8 codes of `pack`, in logical layout; `size` is the true length of the packed axis.

    >>> unpack(jnp.array([146, 21], jnp.uint8), axis=-1, bits=2, size=5).tolist()
    [1, 0, -1, 1, -1]
    """
    _arguments.check_storage(packed, "Packed codes")
    per_byte = _per_byte(bits)
    at = packed.ndim + _arguments.check_axis(axis, packed.ndim)
    size = _arguments.check_size(size, packed.shape[-1], per_byte, "bytes")
    rows = _blocks.group_at(packed, at, 0)
    lead, trail = rows.shape[: at + 1], rows.shape[at + 1 :]
    place = lax.broadcasted_iota(jnp.uint8, (*lead, per_byte, *trail), at + 1)
    shift = jnp.uint8(8 - bits) - place * jnp.uint8(bits)
    codes = signed((jnp.expand_dims(rows, at + 1) >> shift) & jnp.uint8(2**bits - 1), bits)
    dense = codes.reshape(*lead[:-1], lead[-1] * per_byte, *trail)
    return lax.slice_in_dim(dense, 0, size, axis=at)


def signed(field: jax.Array, bits: int) -> jax.Array:
    """The int8 codes of stored fields.

    In int16: XLA's CPU backend (jaxlib 0.10, 0.12) reduces products of factors with 8-bit arithmetic to garbage.
    """
    field = field.astype(jnp.int16)
    return (field - 1 if bits == 2 else 2 * field - 1).astype(jnp.int8)


def _pack_pairs(codes: jax.Array, at: int, bits: int) -> jax.Array:
    """Two bytes for each group of `lead + (groups, 2 * per_byte) + trail`, as `lead + (groups, 2) + trail`."""
    per_byte = 8 // bits
    fields = (codes > 0 if bits == 1 else codes + 1).astype(jnp.uint8)
    fields = fields.reshape(*codes.shape[: at + 1], 2, per_byte, *codes.shape[at + 2 :])
    byte = _blocks.along(fields, 0, at + 2)
    for place in range(1, per_byte):
        byte = (byte << bits) | _blocks.along(fields, place, at + 2)
    return byte


def _per_byte(bits: int) -> int:
    if bits not in (1, 2):
        raise ValueError(f"{bits=} is not a packing. Allowed: 2 (values -1, 0, 1) and 1 (values -1, 1).")
    return 8 // bits
