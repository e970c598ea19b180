"""The readable twin of every fast path: decode the whole matrix, then one plain product.

This is the definition the other implementations are tested against, and the quickest choice for tiny problems.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .problem import PER_CODE, Problem

# The 16 values of NormalFloat-4 (Dettmers et al. 2023, appendix E), in code order. Code 7 is exactly zero.
NF4_CODEBOOK = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    dtype=np.float32,
)


def unpack(codes: jax.Array, fmt: str) -> jax.Array:
    """Separate packed codes along the last axis, which grows by the number of values per byte."""
    count = PER_CODE[fmt]
    bits = 8 // count
    shifts = jnp.arange(count - 1, -1, -1, dtype=jnp.uint8) * bits
    parts = (codes[..., None] >> shifts.reshape((1,) * codes.ndim + (count,))) & jnp.uint8(2**bits - 1)
    return parts.reshape(*codes.shape[:-1], codes.shape[-1] * count)


def decode(codes: jax.Array, scale: jax.Array | None, *, fmt: str, cols: int, dtype: Any = jnp.float32) -> jax.Array:
    """The dense matrix D (..., R, cols) that codes and scale stand for."""
    if fmt == "nf4":
        assert scale is not None  # checked with the storage
        # Built from scalars: custom partitioning takes no array constants.
        table = jnp.stack([jnp.full((), value, dtype) for value in NF4_CODEBOOK.tolist()])
        values = table[unpack(codes, fmt)] * scale[..., None].astype(dtype)
        return values.reshape(*codes.shape[:-2], values.shape[-2] * values.shape[-1])[..., :cols]
    if fmt == "int8":
        values = codes.astype(dtype)
    elif fmt == "ternary":
        values = unpack(codes, fmt)[..., :cols].astype(dtype) - 1
    else:
        values = unpack(codes, fmt)[..., :cols].astype(dtype) * 2 - 1
    return values if scale is None else values * scale.astype(dtype)


def qmatmul(problem: Problem, x: jax.Array, codes: jax.Array, scale: jax.Array | None) -> jax.Array:
    """x @ D.T (dot form) or x @ D (axpy form), accumulated in the compute dtype."""
    spec, dtype = problem.spec, problem.compute_dtype
    dense = decode(codes, scale, fmt=spec.fmt, cols=spec.cols, dtype=dtype)
    batch = tuple(range(len(problem.batch)))
    contracted = x.ndim - 1 if spec.form == "dot" else x.ndim - 2
    dims = (((x.ndim - 1,), (contracted,)), (batch, batch))
    y = lax.dot_general(x.astype(dtype), dense, dims, precision=spec.precision, preferred_element_type=dtype)
    return y.astype(spec.out_dtype)
