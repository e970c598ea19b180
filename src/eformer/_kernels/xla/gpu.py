"""Products on a GPU without the library of kernels: XLA's compiler decides there what is one kernel, so no loops.

    few rows of x      decode while summing (see below): one kernel, one read of the codes, nothing stored
    int8, more rows    the conversion to the type of x is part of XLA's matrix product; scaled first where that is less
    other formats      decode in one kernel, then one matrix product

The decoded matrix is short-lived: four bits a value for ternary and binary up to M = 256, otherwise the type of x, or
float32 where scales are in it and the result is float32.
With up to 16 rows of x a large matrix in blocks is decoded a quarter at a time: it is never there as a whole.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eformer._jax.avals import zeros_like_in

from ..formats import FORMATS, Format
from ..parameters import Problem
from .panel import scaled, weave_columns

PLATFORMS = ("cuda", "rocm", "gpu")
# Rows of x up to which sums are quicker than the matrix product that would be used (H200, 4096 x 14336).
MOST_DOT, MOST_DOT_BLOCKED = MappingProxyType({"int8": 1, "ternary": 2, "binary": 2}), 8
MOST_AXPY = 1
# Up to here the product is as long as reading its operands: integers, converted on the way, are the shorter ones.
MOST_INTEGERS = 256
# Rows of x up to which no matrix in blocks of so many values is decoded as a whole, and the parts it then has.
FEW, LARGE, PARTS = 16, 1 << 22, 4
# Rows of codes one thread adds up in the axpy form (measured on an H200: more or fewer are slower).
FOLD, FOLD_BINARY = 16, 32
# Factors for x, for decoded values (or for their blocks) and for y, each None where there is none.
Factors = tuple[Any, Any, Any]


def qmatmul(problem: Problem, x: jax.Array, codes: jax.Array, factors: Factors) -> jax.Array:
    """The product of one problem without batch axes."""
    wide = problem.compute_dtype
    before, inside, after = (None if factor is None else factor.astype(wide) for factor in factors)
    if after is not None and _scales_values(problem):
        inside, after = (after.T if problem.form == "dot" else after), None
    x = x.astype(wide) if before is None else x.astype(wide) * before
    if problem.is_empty:
        return jnp.zeros((problem.m, problem.outs), problem.out_dtype)
    few = MOST_DOT_BLOCKED if problem.format.blocked else MOST_DOT.get(problem.fmt, 1)
    if problem.form == "dot" and problem.has_at_most(few):
        return rows_of_codes(x, codes, inside, after, fmt=problem.fmt).astype(problem.out_dtype)
    if problem.form == "axpy" and problem.has_at_most(MOST_AXPY) and folds(problem.rows, problem.fmt):
        y = columns_of_codes(x, codes, inside, fmt=problem.fmt, cols=problem.cols)
    else:
        y = _decode_first(problem, x, codes, inside)
    return (y if after is None else y * after).astype(problem.out_dtype)


def _scales_values(problem: Problem) -> bool:
    """Is the matrix smaller than the result, as keys are than the scores of a whole prompt? Then it is what is scaled.

    A result that is scaled goes through memory in float32, and back.
    """
    smaller = isinstance(problem.m, int) and problem.m > problem.deep
    return problem.fmt == "int8" and smaller and _is_of_one_half(problem)


def _is_of_one_half(problem: Problem) -> bool:
    return problem.x_dtype == problem.out_dtype and problem.out_dtype.itemsize == 2


def _decode_first(problem: Problem, x: jax.Array, codes: jax.Array, scale: Any) -> jax.Array:
    large = problem.has_at_most(FEW) and problem.rows * problem.cols >= LARGE
    if not problem.format.blocked or not large:
        # What is scaled already is rounded once, at the end of the product, as of dense matrices.
        once = scale is not None and _is_of_one_half(problem)
        return _decode_and_multiply(problem, x, codes, scale, problem.out_dtype if once else problem.compute_dtype)
    edges = sorted({problem.rows * part // PARTS for part in range(PARTS + 1)})
    dot, ys = problem.form == "dot", []
    for begin, end in itertools.pairwise(edges):
        if ys:  # the next part is not decoded before this one is used
            x, ys[-1] = lax.optimization_barrier((x, ys[-1]))
        rows = x if dot else x[:, begin:end]
        ys.append(_decode_and_multiply(problem, rows, codes[begin:end], scale[begin:end], problem.compute_dtype))
    return jnp.concatenate(ys, axis=1) if dot else functools.reduce(operator.add, ys)


def _decode_and_multiply(problem: Problem, x: jax.Array, codes: jax.Array, scale: Any, into: np.dtype) -> jax.Array:
    operand = _multiplied_as(problem)
    # Tied to x: matrices of later products are not decoded before their turn, so that one exists at a time.
    x, codes, scale = lax.optimization_barrier((x.astype(operand), codes, scale))
    if problem.form == "dot":
        x = _ordered(x, problem.format.units_held(codes), problem.format)
    dense = _decoded(codes, scale, problem.format, _kept_as(problem, scale, operand), problem.compute_dtype)
    dims = (((1,), (1 if problem.form == "dot" else 0,)), ((), ()))
    y = lax.dot_general(x, dense.astype(operand), dims, precision=problem.precision, preferred_element_type=into)
    return y if problem.form == "dot" else _natural(y, problem.format, problem.cols)


def _multiplied_as(problem: Problem) -> np.dtype:
    """The type of x, or a wider one: values of float32 products are not rounded to 16 bits. Codes alone are exact."""
    exact = problem.scales_results_only or problem.out_dtype.itemsize == 2
    return problem.x_dtype if problem.x_dtype.itemsize == 2 and exact else problem.compute_dtype


def _kept_as(problem: Problem, scale: Any, operand: Any) -> Any:
    """The type decoded values are kept in until they are multiplied."""
    integers = problem.format.table is None and problem.format.bits_of is None
    if not integers or scale is not None or not problem.has_at_most(MOST_INTEGERS):
        return operand
    # Triton reads four bits only along the contracted axis, and only on NVIDIA GPUs was that measured. With float32 and
    # the highest precision XLA 0.11 multiplies them wrongly where that axis is short.
    packed = problem.format.per_code > 1 and problem.form == "dot" and problem.platform != "rocm"
    return jnp.int4 if packed and operand.itemsize == 2 else jnp.int8


def _groups(row: Format) -> tuple[int, int]:
    """A unit is decoded as so many halves of so many values."""
    return (2, 4) if row.bits == 1 else (1, row.per_code)


def _decoded(codes: jax.Array, scale: Any, row: Format, dtype: Any, wide: Any) -> jax.Array:
    """D (rows, columns), its columns in the order of `_ordered`, padding included."""
    if row.name == "int8":
        values = codes if scale is None else codes.astype(wide) * scale
        return values if dtype == codes.dtype else lax.optimization_barrier(values.astype(dtype))
    halves, _ = _groups(row)
    if halves > 1:
        shifts = 4 - 4 * lax.broadcasted_iota(jnp.uint8, (1, halves, 1), 1)
        codes = codes[:, None] >> shifts
    wide = jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else wide
    planes = plane_values(codes, row, wide, bits=8 // halves)
    if row.blocked:
        planes = [plane * scale[..., None] for plane in planes]
    # Of a concatenation of up to four operands XLA makes one kernel that reads the codes once.
    dense = jnp.concatenate([plane.astype(dtype).reshape(plane.shape[0], -1) for plane in planes], axis=1)
    if not row.blocked and scale is not None:
        dense = (dense.astype(wide) * _ordered(scale, codes.shape[-1], row)).astype(dtype)
    return lax.optimization_barrier(dense)


def _ordered(x: jax.Array, positions: int, row: Format) -> jax.Array:
    """(M, C) -> (M, padded): first all first values of a unit, then all second ones, as decoding leaves them."""
    halves, fields = _groups(row)
    x = jnp.pad(x, ((0, 0), (0, positions * halves * fields - x.shape[1])))
    if row.per_code == 1:
        return x
    ordered = x.reshape(-1, positions, halves, fields).transpose(0, 3, 2, 1).reshape(x.shape[0], -1)
    return lax.optimization_barrier(ordered)  # or XLA would put D in order instead, in another pass over it


def _natural(y: jax.Array, row: Format, cols: int) -> jax.Array:
    """Inverse of `_ordered`."""
    halves, fields = _groups(row)
    return y.reshape(y.shape[0], fields, halves, -1).transpose(0, 3, 2, 1).reshape(y.shape[0], -1)[:, :cols]


# Sums XLA computes while it decodes, so that every code is read once and no value is stored.
#
# XLA fuses elementwise work into the sum that uses it. Bytes stay whole: value i of every byte is a plane, and planes
# are added up before anything is summed, so that no array is larger than the codes.
#
#     dot form:   y[r]    = sum_b  sum_i D_i[r, b] * x_i[b]         one sum along the rows of codes
#     axpy form:  y_i[b]  = sum_s (sum_u D_i[s, u, b] * x[s, u])    the inner sum written out, the outer one small


def plane_values(codes: jax.Array, row: Format, dtype: Any, *, bits: int = 8) -> list[jax.Array]:
    """The planes of the lowest `bits` of codes, each of the shape of the units of codes, without scales."""
    fields = row.fields(codes, bits)
    if row.name == "binary":
        one = jnp.ones((), dtype)
        return [jnp.where(field != 0, one, -one) for field in fields]
    # A table stays in the cache next to the cores, selects take twice as long.
    return [row.values(field, dtype) for field in fields]


def rows_of_codes(x: jax.Array, codes: jax.Array, scale: Any, after: Any, *, fmt: str) -> jax.Array:
    """x @ D.T, (M, C) -> (M, R); `after` (R, 1) multiplies the sums (inside them, which saves a kernel)."""
    row = FORMATS[fmt]
    m, count = x.shape[0], row.per_code
    positions = (*codes.shape[1:-1], codes.shape[-1] // row.unit)
    if m > 2:  # every value is read by all rows of codes: convert x once, not each time
        x = lax.optimization_barrier(x)
    padding = count * int(np.prod(positions)) - x.shape[1]
    parts = jnp.pad(x, ((0, 0), (0, padding))).reshape(m, *positions, count)
    decoded = scaled(plane_values(codes, row, x.dtype), scale, codes)
    after = None if after is None else after.reshape(-1, *[1] * len(positions))

    def terms(of: int) -> jax.Array:
        total = functools.reduce(operator.add, [value * parts[of, ..., i][None] for i, value in enumerate(decoded)])
        return total if after is None else total * after

    return jnp.stack(_sums([terms(of) for of in range(m)], tuple(range(1, codes.ndim))))


def folds(rows: int, fmt: str) -> bool:
    """Can the axpy form be computed by `columns_of_codes`?"""
    return rows % _fold(FORMATS[fmt]) == 0


def _fold(row: Format) -> int:
    return FOLD_BINARY if row.bits == 1 else FOLD


def columns_of_codes(x: jax.Array, codes: jax.Array, scale: Any, *, fmt: str, cols: int) -> jax.Array:
    """x @ D for one row, (1, R) -> (1, C), in two steps: a part of the rows each, then the parts."""
    row = FORMATS[fmt]
    fold = _fold(row)
    steps = codes.shape[0] // fold
    stored = codes.reshape(steps, fold, *codes.shape[1:])
    factors = x.reshape(steps, fold, *[1] * (codes.ndim - 1))
    scales = None if scale is None else scale.reshape(steps, fold, *scale.shape[1:])

    def totals(begin: int, count: int) -> list[jax.Array]:
        """In pairs, and pairs of pairs: a chain of additions would lose more bits than the dense product does."""
        if count > 1:
            halves = totals(begin, count // 2), totals(begin + count // 2, count // 2)
            return [first + second for first, second in zip(*halves, strict=True)]
        part = stored[:, begin]
        decoded = scaled(plane_values(part, row, x.dtype), None if scales is None else scales[:, begin], part)
        return [value * factors[:, begin] for value in decoded]

    # Without the barrier XLA would make one sum of it again, and store all products for it.
    parts = lax.optimization_barrier([total.reshape(steps, -1) for total in totals(0, fold)])
    return weave_columns([y[None] for y in _sums(parts, (0,))], cols)


def _sums(operands: Sequence[jax.Array], axes: tuple[int, ...]) -> list[jax.Array]:
    """Sums that share a kernel, four at most: each takes shared memory, of which small GPUs have little."""
    found: list[jax.Array] = []
    for first in range(0, len(operands), 4):
        some = tuple(operands[first : first + 4])
        zeros = tuple(zeros_like_in((), operand.dtype, operand) for operand in some)
        found += lax.reduce(some, zeros, lambda left, right: [a + b for a, b in zip(left, right, strict=True)], axes)
    return found
