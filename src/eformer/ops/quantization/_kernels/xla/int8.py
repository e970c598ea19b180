"""INT8 panels: one value per byte."""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .one_row import times_ones

# Columns summed side by side, and how many groups of them one loop adds up: longer loop bodies no longer vectorize.
_LANES, _STEPS = 64, 64


def planes(codes: jax.Array, dtype: Any) -> list[jax.Array]:
    return [codes.astype(dtype)]


def one_row(x: jax.Array, codes: jax.Array, precision: Any) -> jax.Array:
    """x @ D.T for x (1, C), without storing decoded values.

        y[r] = sum_l ( sum_u  x[u, l] * D[r, u, l] )       column = u * lanes + l

    The inner sum is written out, so XLA makes one loop over (r, l) that reads bytes and keeps partial sums in vector
    registers. A decoded panel would write and read four bytes per value to use each of them once.
    """
    rows, cols = codes.shape
    whole = cols - cols % _LANES
    y = jnp.zeros((rows,), x.dtype)
    for begin in range(0, whole, _LANES * _STEPS):
        windows = [slice(u, u + _LANES) for u in range(begin, min(begin + _LANES * _STEPS, whole), _LANES)]
        terms = [codes[:, w].astype(x.dtype) * x[:, w] for w in windows]
        # The barrier keeps XLA from merging the loops into one again.
        y = y + times_ones(lax.optimization_barrier(functools.reduce(operator.add, terms)), 1)[:, 0]
    if whole < cols:
        rest = codes[:, whole:].astype(x.dtype)
        y = y + lax.dot_general(rest, x[0, whole:], (((1,), (0,)), ((), ())), precision=precision)
    return y[None]
