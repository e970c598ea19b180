"""Products on a GPU without the library of kernels: XLA's compiler decides there what is one kernel, so no loops.

    few rows of x      decode while summing (`gpu_sums`): one kernel, one read of the codes, nothing stored
    int8, more rows    the conversion to the type of x is part of XLA's matrix product
    other formats      decode in one kernel, then one matrix product

The decoded matrix is short-lived: four bits a value for ternary and binary up to M = 256, otherwise the type of x.
With up to 16 rows of x a large NF4 matrix is decoded a quarter at a time: it is never there as a whole.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..parameters import Problem
from . import gpu_sums

PLATFORMS = ("cuda", "rocm", "gpu")
# Rows of x up to which sums are quicker than the matrix product that would be used (H200, 4096 x 14336).
MOST_DOT = MappingProxyType({"nf4": 8, "int8": 1, "ternary": 2, "binary": 2})
MOST_AXPY = 1
# Up to here the product is as long as reading its operands: integers, converted on the way, are the shorter ones.
MOST_INTEGERS = 256
# Rows of x up to which no NF4 matrix of so many values is decoded as a whole, and the parts it then has.
FEW, LARGE, PARTS = 16, 1 << 22, 4
# A byte is decoded as so many halves of so many values.
GROUPS = MappingProxyType({"int8": (1, 1), "nf4": (1, 2), "ternary": (1, 4), "binary": (2, 4)})
# Factors for x, for decoded values (or for the blocks of NF4) and for y, each None where there is none.
Factors = tuple[Any, Any, Any]


def qmatmul(problem: Problem, x: jax.Array, codes: jax.Array, factors: Factors) -> jax.Array:
    """The product of one problem without batch axes."""
    wide = problem.compute_dtype
    before, inside, after = (None if factor is None else factor.astype(wide) for factor in factors)
    x = x.astype(wide) if before is None else x.astype(wide) * before
    if problem.is_empty:
        return jnp.zeros((problem.m, problem.rows if problem.form == "dot" else problem.cols), problem.out_dtype)
    if problem.form == "dot" and problem.has_at_most(MOST_DOT[problem.fmt]):
        return gpu_sums.rows_of_codes(x, codes, inside, after, fmt=problem.fmt).astype(problem.out_dtype)
    if problem.form == "axpy" and problem.has_at_most(MOST_AXPY) and gpu_sums.folds(problem.rows, problem.fmt):
        y = gpu_sums.columns_of_codes(x, codes, inside, fmt=problem.fmt, cols=problem.cols)
    else:
        y = _decode_first(problem, x, codes, inside)
    return (y if after is None else y * after).astype(problem.out_dtype)


def _decode_first(problem: Problem, x: jax.Array, codes: jax.Array, scale: Any) -> jax.Array:
    large = problem.has_at_most(FEW) and problem.rows * problem.cols >= LARGE
    if problem.fmt != "nf4" or not large:
        return _decode_and_multiply(problem, x, codes, scale)
    edges = sorted({problem.rows * part // PARTS for part in range(PARTS + 1)})
    dot, ys = problem.form == "dot", []
    for begin, end in itertools.pairwise(edges):
        if ys:  # the next part is not decoded before this one is used
            x, ys[-1] = lax.optimization_barrier((x, ys[-1]))
        rows = x if dot else x[:, begin:end]
        ys.append(_decode_and_multiply(problem, rows, codes[begin:end], scale[begin:end]))
    return jnp.concatenate(ys, axis=1) if dot else functools.reduce(operator.add, ys)


def _decode_and_multiply(problem: Problem, x: jax.Array, codes: jax.Array, scale: Any) -> jax.Array:
    wide = problem.compute_dtype
    operand = problem.x_dtype if problem.x_dtype.itemsize == 2 else wide
    # Tied to x: matrices of later products are not decoded before their turn, so that one exists at a time.
    x, codes, scale = lax.optimization_barrier((x.astype(operand), codes, scale))
    if problem.form == "dot":
        x = _ordered(x, math.prod(codes.shape[1:]), problem.fmt)
    dense = _decoded(codes, scale, problem.fmt, _kept_as(problem, scale, operand), wide)
    dims = (((1,), (1 if problem.form == "dot" else 0,)), ((), ()))
    y = lax.dot_general(x, dense.astype(operand), dims, precision=problem.precision, preferred_element_type=wide)
    return y if problem.form == "dot" else _natural(y, problem.fmt, problem.cols)


def _kept_as(problem: Problem, scale: Any, operand: Any) -> Any:
    """The type decoded values are kept in until they are multiplied."""
    if problem.fmt == "nf4" or scale is not None or not problem.has_at_most(MOST_INTEGERS):
        return operand
    # Triton reads four bits only along the contracted axis, and only on NVIDIA GPUs was that measured. With float32 and
    # the highest precision XLA 0.11 multiplies them wrongly where that axis is short.
    packed = problem.fmt != "int8" and problem.form == "dot" and problem.platform != "rocm"
    return jnp.int4 if packed and operand.itemsize == 2 else jnp.int8


def _decoded(codes: jax.Array, scale: Any, fmt: str, dtype: Any, wide: Any) -> jax.Array:
    """D (rows, columns), its columns in the order of `_ordered`, padding included."""
    if fmt == "int8":
        values = codes if scale is None else codes.astype(wide) * scale
        return values if dtype == codes.dtype else lax.optimization_barrier(values.astype(dtype))
    halves, _ = GROUPS[fmt]
    if halves > 1:
        shifts = 4 - 4 * lax.broadcasted_iota(jnp.uint8, (1, halves, 1), 1)
        codes = codes[:, None] >> shifts
    wide = jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else wide
    planes = gpu_sums.values(codes, fmt, wide, bits=8 // halves)
    if fmt == "nf4":
        planes = [plane * scale[..., None] for plane in planes]
    # Of a concatenation of up to four operands XLA makes one kernel that reads the codes once.
    dense = jnp.concatenate([plane.astype(dtype).reshape(plane.shape[0], -1) for plane in planes], axis=1)
    if fmt != "nf4" and scale is not None:
        dense = (dense.astype(wide) * _ordered(scale, codes.shape[-1], fmt)).astype(dtype)
    return lax.optimization_barrier(dense)


def _ordered(x: jax.Array, positions: int, fmt: str) -> jax.Array:
    """(M, C) -> (M, padded): first all first values of a byte, then all second ones, as decoding leaves them."""
    if fmt == "int8":
        return x
    halves, fields = GROUPS[fmt]
    x = jnp.pad(x, ((0, 0), (0, positions * halves * fields - x.shape[1])))
    ordered = x.reshape(-1, positions, halves, fields).transpose(0, 3, 2, 1).reshape(x.shape[0], -1)
    return lax.optimization_barrier(ordered)  # or XLA would put D in order instead, in another pass over it


def _natural(y: jax.Array, fmt: str, cols: int) -> jax.Array:
    """Inverse of `_ordered`."""
    halves, fields = GROUPS[fmt]
    return y.reshape(y.shape[0], fields, halves, -1).transpose(0, 3, 2, 1).reshape(y.shape[0], -1)[:, :cols]
