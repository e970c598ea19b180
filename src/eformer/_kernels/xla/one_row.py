"""M = 1: the products where a decoded panel would be written and read again to use each value once.

Multiplying while decoding adds values up before anything is stored, so what is stored is a fraction of the panel; a
small product with ones sums the rest. The barriers keep XLA from moving that sum into the decoding loop, which it would
then not vectorize.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eformer._jax.avals import zeros_like_in

from ..formats import Format, entries
from . import panel

# Positions summed side by side in the dot form, and the products one loop adds up for each: with fewer the result of a
# loop is stored more often, and longer loop bodies no longer vectorize.
_LANES, _TERMS = 64, 64
# Rows per step of the axpy form, and how many of them are added up while decoding.
PANEL, _FOLD = 256, 8
# Of `nibble_dot_form`: bytes added up in one loop body, and how many of them one after the other.
_LONGEST, _SHORTEST, _CHAIN = 32, 8, 8


def dot_form(x: jax.Array, codes: jax.Array, planes: panel.Planes, *, row: Format, precision: Any) -> jax.Array:
    """x @ D.T for x (1, C) and codes (R, P), without storing decoded values.

        y[r] = sum_l ( sum_{u, i}  xs[i, u, l] * plane_i(codes[r, u, l]) )       position = u * lanes + l

    The inner sum is written out, so XLA makes one loop over (r, l) that reads bytes and keeps partial sums in vector
    registers. A decoded panel would write and read four bytes per value to use each of them once.
    """
    (rows, count), parts = codes.shape, row.per_code
    xs = lax.optimization_barrier(panel.split_columns(x, parts, count)[:, 0])
    whole, step = count - count % _LANES, _LANES * (_TERMS // parts)
    y = jnp.zeros((rows, 1), x.dtype)
    for begin in range(0, whole, step):
        windows = [slice(u, u + _LANES) for u in range(begin, min(begin + step, whole), _LANES)]
        terms = [
            value * part[None, w] for w in windows for value, part in zip(planes(codes[:, w], None), xs, strict=True)
        ]
        # The barrier keeps XLA from merging the loops into one again.
        y = y + times_ones(lax.optimization_barrier(functools.reduce(operator.add, terms)), 1)
    if whole < count:
        y = y + panel.dot_panel(planes(codes[:, whole:], None), xs[:, None, whole:], precision)
    return y.T


def piece_of(block: int) -> int:
    """Bytes `nibble_dot_form` adds up at a time: a whole block, or an equal part of a long one."""
    return next(length for length in range(_LONGEST, 0, -1) if block // 2 % length == 0)


def fits_nibbles(row: Format, block: int | None) -> bool:
    return row.in_nibbles and block is not None and piece_of(block) >= _SHORTEST


def nibble_dot_form(x: jax.Array, codes: jax.Array, scale: jax.Array, *, row: Format) -> jax.Array:
    """x @ D.T for x (1, C), without storing decoded values.

        y[r] = sum_b scale[r, b] * sum_p ( even[byte] * x[b, p, 0] + odd[byte] * x[b, p, 1] )     byte = codes[r, b, p]

    Two tables give the values of each of the 256 bytes. With a single row of x two loads are quicker than the thirty
    selects of `entries`; they are scalar code, so the sum over p is written out, in chains that run side by side.
    """
    rows, count, length = codes.shape[0], row.units_held(codes), piece_of(2 * codes.shape[-1])
    codes = codes.reshape(rows, -1, length)
    scale = jnp.repeat(scale.astype(x.dtype), codes.shape[1] // scale.shape[1], axis=1)
    xs = lax.optimization_barrier(jnp.pad(x[0], (0, 2 * count - x.shape[1]))).reshape(-1, length, len(panel.NIBBLES))
    # The barrier keeps XLA from moving the selects that make the tables into the loop that reads them.
    tables = lax.optimization_barrier(
        [entries(row.sixteen, jnp.arange(256, dtype=jnp.uint8), x.dtype, shift) for shift in panel.NIBBLES]
    )

    def chain(places: range) -> jax.Array:
        terms = [_pick(table, codes[..., p]) * xs[None, :, p, i] for p in places for i, table in enumerate(tables)]
        return functools.reduce(operator.add, terms)

    chains = [chain(range(first, min(first + _CHAIN, length))) for first in range(0, length, _CHAIN)]
    return times_ones(lax.optimization_barrier(functools.reduce(operator.add, chains) * scale), 1).T


def _pick(table: jax.Array, codes: jax.Array) -> jax.Array:
    """table[codes], without a test for indices outside of it: a byte has none."""
    dimensions = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,))
    indices = codes.astype(jnp.int32)[..., None]
    return lax.gather(table, indices, dimensions, (1,), mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def times_ones(array: jax.Array, axis: int) -> jax.Array:
    """Sum along an axis as a product: XLA vectorizes products, not sums. The highest precision adds whole float32.

    Two rows of ones, one of which is used: XLA compiles a product with one row into the loop around it, and from 0.12
    on then takes that loop for a small one and runs it on one thread (NF4: 3.5 times slower).
    """
    ones = jnp.ones((2, array.shape[axis]), array.dtype)
    if axis == 1:
        return lax.dot_general(array, ones, (((1,), (1,)), ((), ())), precision="highest")[:, :1]
    return lax.dot_general(ones, array, (((1,), (0,)), ((), ())), precision="highest")[:1]


def axpy_form(x: jax.Array, codes: jax.Array, scale: Any, planes: panel.Planes, *, row: Format, cols: int) -> jax.Array:
    """x @ D for x (1, R): rows far apart in the panel are added element by element, then what is left is summed."""
    rows, group = codes.shape[0], PANEL // _FOLD

    def body(start: Any, repeated: Any, ys: list[jax.Array]) -> list[jax.Array]:
        x_panel = panel.take_rows(x[0], start, PANEL)
        if rows % PANEL:
            x_panel = jnp.where(jnp.arange(PANEL) >= repeated, x_panel, 0)
        folded: list[Any] = [0] * row.per_code
        for i in range(_FOLD):
            first = start + i * group
            decoded = planes(panel.take_rows(codes, first, group), panel.take_rows(scale, first, group))
            factor = x_panel[i * group : (i + 1) * group].reshape(group, *[1] * (codes.ndim - 1))
            folded = [total + w * factor for total, w in zip(folded, decoded, strict=True)]
        return [y + times_ones(lax.optimization_barrier(panel.flat(f)), 0) for y, f in zip(ys, folded, strict=True)]

    zeros = zeros_like_in((1, row.units_held(codes)), x.dtype, x)
    return panel.weave_columns(panel.for_panels(rows, PANEL, body, [zeros] * row.per_code), cols)
