"""Few rows of x on a GPU: sums XLA computes while it decodes, so that every code is read once and no value is stored.

XLA fuses elementwise work into the sum that uses it. Bytes stay whole: value i of every byte is a plane, and planes are
added up before anything is summed, so that no array is larger than the codes.

    dot form:   y[r]    = sum_b  sum_i D_i[r, b] * x_i[b]         one sum along the rows of codes
    axpy form:  y_i[b]  = sum_s (sum_u D_i[s, u, b] * x[s, u])    the inner sum written out, the outer one small
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eformer._jax.avals import zeros_like_in

from ..formats import FORMATS, nf4_values
from .panel import weave_columns
from .planes import scaled

# Rows of codes one thread adds up in the axpy form (measured on an H200: more or fewer are slower).
FOLD = MappingProxyType({"nf4": 16, "int8": 16, "ternary": 16, "binary": 32})


def values(codes: jax.Array, fmt: str, dtype: Any, *, bits: int = 8) -> list[jax.Array]:
    """The planes of the lowest `bits` of codes, each of the shape of the codes, without scales."""
    if fmt == "int8":
        return [codes.astype(dtype)]
    size = 8 // FORMATS[fmt].per_code
    fields = [(codes >> np.uint8(shift)) & np.uint8(2**size - 1) for shift in range(bits - size, -1, -size)]
    if fmt == "nf4":  # a table stays in the cache next to the cores, selects take twice as long
        return [nf4_values(field, dtype) for field in fields]
    if fmt == "ternary":
        return [field.astype(jnp.int32).astype(dtype) - 1 for field in fields]
    one = jnp.ones((), dtype)
    return [jnp.where(field != 0, one, -one) for field in fields]


def rows_of_codes(x: jax.Array, codes: jax.Array, scale: Any, after: Any, *, fmt: str) -> jax.Array:
    """x @ D.T, (M, C) -> (M, R); `after` (R, 1) multiplies the sums (inside them, which saves a kernel)."""
    m, count = x.shape[0], FORMATS[fmt].per_code
    positions = codes.shape[1:]
    if m > 2:  # every value is read by all rows of codes: convert x once, not each time
        x = lax.optimization_barrier(x)
    padding = count * int(np.prod(positions)) - x.shape[1]
    parts = jnp.pad(x, ((0, 0), (0, padding))).reshape(m, *positions, count)
    decoded = scaled(values(codes, fmt, x.dtype), scale, codes)
    after = None if after is None else after.reshape(-1, *[1] * len(positions))

    def terms(row: int) -> jax.Array:
        total = functools.reduce(operator.add, [value * parts[row, ..., i][None] for i, value in enumerate(decoded)])
        return total if after is None else total * after

    return jnp.stack(_sums([terms(row) for row in range(m)], tuple(range(1, codes.ndim))))


def folds(rows: int, fmt: str) -> bool:
    """Can the axpy form be computed by `columns_of_codes`?"""
    return rows % FOLD[fmt] == 0


def columns_of_codes(x: jax.Array, codes: jax.Array, scale: Any, *, fmt: str, cols: int) -> jax.Array:
    """x @ D for one row, (1, R) -> (1, C), in two steps: a part of the rows each, then the parts."""
    fold = FOLD[fmt]
    steps = codes.shape[0] // fold
    stored = codes.reshape(steps, fold, *codes.shape[1:])
    factors = x.reshape(steps, fold, *[1] * (codes.ndim - 1))
    scales = None if scale is None else scale.reshape(steps, fold, *scale.shape[1:])
    totals: list[Any] = [0] * FORMATS[fmt].per_code
    for u in range(fold):
        part = stored[:, u]
        decoded = scaled(values(part, fmt, x.dtype), None if scales is None else scales[:, u], part)
        totals = [total + value * factors[:, u] for total, value in zip(totals, decoded, strict=True)]
    # Without the barrier XLA would make one sum of it again, and store all products for it.
    parts = lax.optimization_barrier([total.reshape(steps, -1) for total in totals])
    return weave_columns([y[None] for y in _sums(parts, (0,))], cols)


def _sums(operands: Sequence[jax.Array], axes: tuple[int, ...]) -> list[jax.Array]:
    """Sums that share a kernel, four at most: each takes shared memory, of which small GPUs have little."""
    found: list[jax.Array] = []
    for first in range(0, len(operands), 4):
        some = tuple(operands[first : first + 4])
        zeros = tuple(zeros_like_in((), operand.dtype, operand) for operand in some)
        found += lax.reduce(some, zeros, _add_all, axes)
    return found


def _add_all(left: Sequence[jax.Array], right: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    return tuple(a + b for a, b in zip(left, right, strict=True))
