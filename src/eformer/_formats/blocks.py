"""Cutting an axis into groups without copying the array, and moving packed bytes to their place.

Notation: the blocked axis splits a logical shape into `lead + (K,) + trail`. Storage keeps the blocked axis
last, as `lead + trail + (groups, ...)`. Nothing here merges axes, so a sharding on any of them survives.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eformer._jax import avals


def common(*dtypes: Any) -> Any:
    """The dtype that holds values of all of these, whatever promotions the user has forbidden for programs.

    >>> with jax.numpy_dtype_promotion("strict"):
    ...     common(jnp.bfloat16, jnp.float32)
    dtype('float32')
    """
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes)


def wide(*dtypes: Any) -> Any:
    """The dtype to compute in: that of all of these, and float32 at least."""
    return common(jnp.dtype("float32"), *dtypes)


def grouped(x: jax.Array, axis: int, group: int) -> list[jax.Array]:
    """Views of `x` with the blocked axis cut into `(groups, group)`: the whole groups, then the padded rest.

    Padding the whole array instead would copy it, and a fused pad keeps XLA from vectorizing the loop.

    >>> [p.shape for p in grouped(jnp.zeros((10, 3)), -2, 4)]
    [(2, 4, 3), (1, 4, 3)]
    """
    at = x.ndim + axis
    size = x.shape[at]
    whole = size // group
    lead, trail = x.shape[:at], x.shape[at + 1 :]
    pieces = []
    if whole or not size:
        pieces.append(lax.slice_in_dim(x, 0, whole * group, axis=at).reshape(*lead, whole, group, *trail))
    if size % group:
        rest = lax.slice_in_dim(x, whole * group, size, axis=at)
        padding = [(0, 0)] * x.ndim
        padding[at] = (0, group - size % group)
        pieces.append(jnp.pad(rest, padding).reshape(*lead, 1, group, *trail))
    return pieces


def joined(pieces: list[jax.Array], axis: int) -> jax.Array:
    """The results for the pieces of `grouped` as one array; `axis` is where the groups are."""
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=axis)


def quotient(x: jax.Array, divisor: jax.Array, axis: int | None = None) -> jax.Array:
    """`x / divisor`, which lacks this axis, if one is named, correctly rounded.

    XLA would divide by what is the same for many values only once, and multiply by that: off by one ulp at times, and
    so by a code where a value is in the middle between two. Adding nothing of `x` keeps it from seeing that.
    """
    return x / ((divisor if axis is None else jnp.expand_dims(divisor, axis)) + 0 * x)


def packed(codes: jax.Array, at: int, bits: int) -> jax.Array:
    """Codes along axis `at` in bytes, the first of each byte in its high bits; `bits` divides 8.

    >>> packed(jnp.array([1, 2, 3, 0], jnp.uint8), 0, 4).tolist()
    [18, 48]
    """
    per_byte = 8 // bits
    fields = codes.reshape(*codes.shape[:at], codes.shape[at] // per_byte, per_byte, *codes.shape[at + 1 :])
    places = [lax.index_in_dim(fields, place, at + 1, keepdims=False) for place in range(per_byte)]
    return functools.reduce(lambda byte, field: (byte << bits) | field, places)


def unpacked(stored: jax.Array, at: int, bits: int) -> jax.Array:
    """The codes of `packed`, those of one byte on an axis of their own behind `at`.

    Shifting by an iota keeps this a single elementwise loop without a stack.
    """
    if bits == 8:
        return jnp.expand_dims(stored, at + 1)
    shape = (*stored.shape[: at + 1], 8 // bits, *stored.shape[at + 1 :])
    shift = jnp.uint8(8 - bits) - lax.broadcasted_iota(jnp.uint8, shape, at + 1) * jnp.uint8(bits)
    return (jnp.expand_dims(stored, at + 1) >> shift) & jnp.uint8(2**bits - 1)


def codes_at(stored: jax.Array, index: jax.Array, bits: int) -> jax.Array:
    """The codes at these places of the last axis, (..., index axes...)."""
    per_byte = 8 // bits
    byte = jnp.take(stored, index // per_byte, axis=-1)
    shift = jnp.broadcast_to(8 - bits * (1 + index % per_byte), byte.shape).astype(jnp.uint8)
    return byte >> shift & jnp.uint8(2**bits - 1)


def group_last(x: jax.Array, at: int, inner: int) -> jax.Array:
    """Move axis `at` and the `inner` axes after it to the end: `lead + (G, …) + trail` to `lead + trail + (G, …)`."""
    return jnp.moveaxis(x, range(at, at + inner + 1), range(-inner - 1, 0))


def group_at(x: jax.Array, at: int, inner: int) -> jax.Array:
    """The inverse of `group_last`."""
    return jnp.moveaxis(x, range(-inner - 1, 0), range(at, at + inner + 1))


def pairs_last(x: jax.Array, at: int) -> jax.Array:
    """`group_last(x, at, 1)` for an inner axis of two, kept apart from what computes `x`.

    XLA on the CPU would fuse a cheap producer into the transpose and then walk the *input* with a stride of a whole
    row for each byte (4096×4096: 250 ms instead of 20). It does not fuse across a loop, and a loop over the pair is
    free: that axis is inside a group, so only a mesh whose axes are part of types can say how it is split.
    """
    if x.ndim == at + 2:
        return x
    if avals.explicit_sharding_of(x) is not None:
        return group_last(x, at, 1)
    init = jnp.zeros_like(group_last(x, at, 1))

    def move(i: jax.Array, out: jax.Array) -> jax.Array:
        half = group_last(lax.dynamic_slice_in_dim(x, i, 1, axis=at + 1), at, 1)
        return lax.dynamic_update_slice_in_dim(out, half, i, axis=out.ndim - 1)

    return lax.fori_loop(0, 2, move, init)


def absmax_within(x: jax.Array, at: int) -> jax.Array:
    """The largest magnitude along axis `at`, a short one such as a block, in the dtype of `x`. NaN wins.

    Magnitudes are ordered as their bit patterns are, so this is an integer maximum (see `_SHORT`).
    """
    unsigned = np.dtype(f"uint{8 * x.dtype.itemsize}").type
    # Split before anything else: XLA would undo a split that comes right before the reduction.
    factors = _factors(x.shape[at])
    x = x.reshape(*x.shape[:at], *factors, *x.shape[at + 1 :])
    magnitude = lax.bitcast_convert_type(x, unsigned) & unsigned(np.iinfo(unsigned).max >> 1)
    return lax.bitcast_convert_type(lax.reduce(magnitude, unsigned(0), lax.max, range(at, at + len(factors))), x.dtype)


def absmax_along(x: jax.Array, axis: int) -> jax.Array:
    """The largest magnitude along an axis of any length, kept with size 1, in the dtype of `x`. NaN is infinite."""
    if avals.explicit_sharding_of(x) is not None:  # an axis whose type says how it is split cannot be cut further
        return largest(x, axis)
    at = x.ndim + axis
    partial = joined([absmax_within(piece, at + 1) for piece in grouped(x, axis, _SHORT)], at)
    return largest(partial, at)


def largest(x: jax.Array, axis: Any) -> jax.Array:
    """The largest magnitude along axes, kept with size 1. NaN counts as infinite: a maximum by XLA may leave it out."""
    magnitude = jnp.abs(x)
    return jnp.max(jnp.where(magnitude < jnp.inf, magnitude, jnp.inf), axis=axis, keepdims=True, initial=0)


def sum_along(x: jax.Array, axis: int) -> jax.Array:
    """The sum along an axis of any length, kept with size 1, in the dtype of `x`; -inf counts as the lowest number."""
    at = x.ndim + axis
    short = min(_SHORT, (x.shape[at] & -x.shape[at]) // _PARTS)
    if short <= 1 or avals.explicit_sharding_of(x) is not None:
        return jnp.sum(x, axis=axis, keepdims=True, dtype=x.dtype)
    (whole,) = grouped(x, axis, short)
    return jnp.sum(_sum_within(whole, at + 1), axis=at, keepdims=True, dtype=x.dtype)


# XLA on the CPU hands plain float sums and maxima to a library and cuts integer ones over more than 32 entries into a
# reduce-window. Both first write the whole operand to memory, up to twice the size of the input. It does neither, and
# fuses the reduction with what computes its operand, when the operation is not a bare float one and the axes are short.
_SHORT = 32
# Devices across which XLA splits an axis add up bare sums only. So a sum that is not bare is over a part of the axis
# that stays whole when it is split in 64 parts.
_PARTS = 64


def _sum_within(x: jax.Array, at: int) -> jax.Array:
    """The sum along axis `at` of at most 32 entries, -inf counting as the lowest number.

    The two maxima hide the sum from XLA. (It sees through -inf as the bound.)
    """
    lowest = jnp.finfo(x.dtype).min
    zero = np.zeros((), x.dtype)[()]
    return lax.reduce(x, zero, lambda a, b: jnp.maximum(a, lowest) + jnp.maximum(b, lowest), (at,))


def _factors(size: int) -> tuple[int, ...]:
    """Factors of `size`, each at most 32 where divisors allow.

    >>> _factors(64), _factors(4096), _factors(74)
    ((2, 32), (4, 32, 32), (37, 2))
    """
    if size <= _SHORT:
        return (size,)
    factor = max(d for d in range(1, _SHORT + 1) if size % d == 0)
    return (*_factors(size // factor), factor) if factor > 1 else (size,)
