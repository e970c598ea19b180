"""NF4 panels: two values per byte, one scale per block."""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..formats import NF4_CODEBOOK
from .one_row import times_ones
from .panel import positions

_SHIFTS = (4, 0)  # of the first and the second value in a byte
# Of `one_row`: bytes added up in one loop body, and how many of them one after the other.
_LONGEST, _SHORTEST, _CHAIN = 32, 8, 8


def lookup(codes: jax.Array, shift: int, dtype: Any) -> jax.Array:
    """Codebook values of the four bits above `shift`.

    Four levels of selects: XLA vectorizes them, while an indexed load per value becomes scalar code.
    """
    values: list[jax.Array] = [jnp.asarray(value, dtype) for value in NF4_CODEBOOK]
    for bit in range(4):
        is_set = (codes & jnp.uint8(1 << (bit + shift))) != 0
        values = [jnp.where(is_set, high, low) for low, high in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def planes(codes: jax.Array, dtype: Any) -> list[jax.Array]:
    """Even and odd columns, each of the shape of the codes, without scales."""
    return [lookup(codes, shift, dtype) for shift in _SHIFTS]


def piece(block: int) -> int:
    """Bytes `one_row` adds up at a time: a whole block, or an equal part of a long one."""
    return next(length for length in range(_LONGEST, 0, -1) if block // 2 % length == 0)


def fits_one_row(block: int | None) -> bool:
    return block is not None and piece(block) >= _SHORTEST


def one_row(x: jax.Array, codes: jax.Array, absmax: jax.Array) -> jax.Array:
    """x @ D.T for x (1, C), without storing decoded values.

        y[r] = sum_b absmax[r, b] * sum_p ( even[byte] * x[b, p, 0] + odd[byte] * x[b, p, 1] )     byte = codes[r, b, p]

    Two tables give the values of each of the 256 bytes. With a single row of x two loads are quicker than the thirty
    selects of `planes`; they are scalar code, so the sum over p is written out, in chains that can run side by side.
    """
    rows, count, length = codes.shape[0], positions(codes), piece(2 * codes.shape[-1])
    codes = codes.reshape(rows, -1, length)
    absmax = jnp.repeat(absmax.astype(x.dtype), codes.shape[1] // absmax.shape[1], axis=1)
    xs = lax.optimization_barrier(jnp.pad(x[0], (0, 2 * count - x.shape[1]))).reshape(-1, length, len(_SHIFTS))
    # The barrier keeps XLA from moving the selects that make the tables into the loop that reads them.
    tables = lax.optimization_barrier([lookup(jnp.arange(256, dtype=jnp.uint8), s, x.dtype) for s in _SHIFTS])

    def chain(places: range) -> jax.Array:
        terms = [_pick(table, codes[..., p]) * xs[None, :, p, i] for p in places for i, table in enumerate(tables)]
        return functools.reduce(operator.add, terms)

    chains = [chain(range(first, min(first + _CHAIN, length))) for first in range(0, length, _CHAIN)]
    return times_ones(lax.optimization_barrier(functools.reduce(operator.add, chains) * absmax), 1).T


def _pick(table: jax.Array, codes: jax.Array) -> jax.Array:
    """table[codes], without a test for indices outside of it: a byte has none."""
    dimensions = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,))
    indices = codes.astype(jnp.int32)[..., None]
    return lax.gather(table, indices, dimensions, (1,), mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)
