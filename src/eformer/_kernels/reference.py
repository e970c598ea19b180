"""The readable twin of every fast path: decode the whole matrix, then one plain product.

This is the definition the other implementations are tested against, and the quickest choice for tiny problems.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .formats import FORMATS
from .parameters import Problem


def unpack(codes: jax.Array, fmt: str) -> jax.Array:
    """Separate packed codes along the last axis, which grows by the number of values per stored element."""
    row = FORMATS[fmt]
    if row.per_code == 1:
        return codes
    shifts = jnp.arange(row.per_code - 1, -1, -1, dtype=jnp.uint8) * row.bits
    parts = (codes[..., None] >> shifts.reshape((1,) * codes.ndim + (-1,))) & jnp.uint8(2**row.bits - 1)
    return parts.reshape(*codes.shape[:-1], codes.shape[-1] * row.per_code)


def decode(codes: jax.Array, scale: jax.Array | None, *, fmt: str, cols: int, dtype: Any = jnp.float32) -> jax.Array:
    """The dense matrix D (..., R, cols) that codes and scale stand for."""
    row = FORMATS[fmt]
    values = row.values(unpack(codes, fmt), dtype)
    if row.blocked:
        assert scale is not None  # checked with the storage
        values = values * scale[..., None].astype(dtype)
        return values.reshape(*codes.shape[:-2], values.shape[-2] * values.shape[-1])[..., :cols]
    values = values if values.shape[-1] == cols else values[..., :cols]
    return values if scale is None else values * scale.astype(dtype)


def qmatmul(problem: Problem, x: jax.Array, codes: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """x @ D.T (dot form) or x @ D (axpy form), accumulated in the compute dtype."""
    dtype = problem.compute_dtype
    dense = decode(codes, scale, fmt=problem.fmt, cols=problem.cols, dtype=dtype)
    batch = tuple(range(len(problem.batch)))
    contracted = x.ndim - 1 if problem.form == "dot" else x.ndim - 2
    dims = (((x.ndim - 1,), (contracted,)), (batch, batch))
    y = lax.dot_general(x.astype(dtype), dense, dims, precision=problem.precision, preferred_element_type=dtype)
    return y.astype(problem.out_dtype)
