"""Packing values in {-1, 0, 1} at two bits, and values in {-1, 1} at one bit, along one axis.

Two bits store `value + 1` (0b00 = -1, 0b01 = 0, 0b10 = +1; 0b11 is not used), one bit stores `value > 0`: decoding is a
shift, a mask and a subtraction, and needs no table. The first value sits in the most significant bits. An end that
does not fill a byte is padded with the value 0: 0b01 at two bits, 0b0 at one.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eformer._formats import arguments as _arguments
from eformer._formats import blocks as _blocks


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
    field = ((jnp.expand_dims(rows, at + 1) >> shift) & jnp.uint8(2**bits - 1)).astype(jnp.int8)
    codes = field - 1 if bits == 2 else 2 * field - 1
    dense = codes.reshape(*lead[:-1], lead[-1] * per_byte, *trail)
    return lax.slice_in_dim(dense, 0, size, axis=at)


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


def pack_reference(codes: np.ndarray, *, axis: int, bits: int) -> np.ndarray:
    """`pack`, written for reading: move, pad, place each value."""
    moved = np.moveaxis(np.asarray(codes), axis, -1)
    per_byte = 8 // bits
    padded = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, -moved.shape[-1] % per_byte)])
    fields = (padded > 0 if bits == 1 else padded + 1).astype(np.uint8)
    fields = fields.reshape(*moved.shape[:-1], padded.shape[-1] // per_byte, per_byte)
    places = (8 - bits * (1 + np.arange(per_byte))).astype(np.uint8)
    return np.bitwise_or.reduce(fields << places, axis=-1)


def unpack_reference(packed: np.ndarray, *, axis: int, bits: int, size: int) -> np.ndarray:
    """`unpack`, written for reading."""
    packed = np.asarray(packed)
    places = (8 - bits * (1 + np.arange(8 // bits))).astype(np.uint8)
    fields = ((packed[..., None] >> places) & (2**bits - 1)).astype(np.int8)
    values = fields - 1 if bits == 2 else 2 * fields - 1
    flat = values.reshape(*packed.shape[:-1], packed.shape[-1] * (8 // bits))
    return np.moveaxis(flat[..., :size], -1, axis).astype(np.int8)
