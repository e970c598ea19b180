"""The custom calls. Sizes and dtypes have been checked (`_refusals`); what arrives here is what the handlers take.

Few rows of x, and on Hopper up to a thousand: a kernel decodes while it multiplies. More: the matrix is decoded once,
at the speed of a copy, and XLA multiplies with cuBLAS.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eformer._jax.avals import result_type

from ..problem import FORMATS, Problem, Spec, out_shape
from . import _wide
from ._library import DEQUANT, GATHER, QMATMUL, RAGGED, WIDE
from .tuning import cut, generation, is_skinny

Result = tuple[tuple[int, ...], np.dtype]
# Rows of x up to which scales are kept out of the decoded matrix.
FOLD_M = 256
F32, BF16, F16 = (np.dtype(t) for t in (jnp.float32, jnp.bfloat16, jnp.float16))


def decodes_while_multiplying(problem: Problem) -> bool:
    """Is this a product for the fused kernel? Otherwise the matrix is decoded first."""
    exact = problem.x_dtype == F32 and problem.spec.precision not in (None, lax.Precision.DEFAULT)
    both_ways = problem.fmt != "nf4" and problem.scale_shape is not None and 1 not in problem.scale_shape
    return problem.spec.form == "dot" and problem.m <= generation().largest_m and not exact and not both_ways


def qmatmul(problem: Problem, x: jax.Array, codes: jax.Array, scale: jax.Array | None) -> jax.Array:
    """The product of one problem, batch axes included."""
    axes, count = len(problem.batch), math.prod(problem.batch)

    def flat(array: jax.Array) -> jax.Array:
        return array.reshape(count, *array.shape[axes:])

    operands = (flat(x), flat(codes), None if scale is None else flat(scale))
    if _wide.takes(problem):
        run = _fused_wide
    else:
        run = _fused if decodes_while_multiplying(problem) else _decode_first
    return run(problem, *operands).reshape(out_shape(problem.spec, x, codes))


def _fused(problem: Problem, x: jax.Array, codes: jax.Array, scale: jax.Array | None) -> jax.Array:
    spec = problem.spec
    x, scale, merge = prepare(problem, x, scale)
    batch, m, _ = x.shape
    if is_skinny(spec.fmt, m, spec.cols):
        tiles, splits = 0, 1  # the library chooses
    else:
        tiles, splits = cut(spec.fmt, batch, m, problem.rows, spec.cols)
    shape = (batch, m, problem.rows)
    results: list[Result] = [(shape, spec.out_dtype if merge is None else F32)]
    results.append(((splits * math.prod(shape) if splits > 1 else 0,), F32))
    operands = (x, codes, _empty() if scale is None else scale)
    y, _ = _call(QMATMUL, results, operands, **_attributes(spec), tiles=tiles, splits=splits)
    return y if merge is None else merge(y).astype(spec.out_dtype)


def _fused_wide(problem: Problem, x: jax.Array, codes: jax.Array, scale: jax.Array | None) -> jax.Array:
    spec = problem.spec
    x, scale, merge = prepare(problem, x, scale)
    batch, m, deep = x.shape
    outs = problem.rows if spec.form == "dot" else spec.cols
    width, block_outs, splits = _wide.cut(spec.fmt, spec.form, batch, m, outs, deep)
    operands = (x, codes, _empty() if scale is None else scale)
    result: Result = ((batch, m, outs), spec.out_dtype if merge is None else F32)
    shape = {"axpy": int(spec.form == "axpy"), "width": width, "outs": block_outs, "splits": splits}
    (y,) = _call(WIDE, [result], operands, **_attributes(spec), **shape)
    return y if merge is None else merge(y).astype(spec.out_dtype)


def prepare(problem: Problem, x: jax.Array, scale: jax.Array | None) -> tuple[jax.Array, jax.Array | None, Any]:
    """x in 16 bits, a scale the kernel takes, and what makes y of its result (None: nothing).

    A scale along the contracted axis goes into x. A float32 x becomes two bfloat16 that add up to it, as more rows.
    """
    if problem.fmt == "nf4":
        assert scale is not None  # checked with the storage
        scale = scale.astype(F32) if scale.dtype == F16 else scale
    elif scale is not None and scale.shape[-1 if problem.spec.form == "dot" else -2] != 1:
        x = x.astype(F32) * scale.astype(F32).reshape(scale.shape[0], 1, -1)
        scale = None
        x = x if problem.x_dtype == F32 else x.astype(BF16)
    if x.dtype != F32:
        return x, scale, None
    rounded = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)  # XLA would undo a conversion there and back
    high, low = rounded.astype(BF16), (x - rounded).astype(BF16)

    def merge(y: jax.Array) -> jax.Array:
        top, bottom = jnp.split(y, 2, axis=-2)
        return top + bottom

    return jnp.concatenate([high, low], axis=-2), scale, merge


def _decode_first(problem: Problem, x: jax.Array, codes: jax.Array, scale: jax.Array | None) -> jax.Array:
    """One matrix at a time, so that only one decoded matrix exists."""
    spec = problem.spec
    x, scale, after = fold(problem, x, scale)

    def one(operands: tuple[Any, ...]) -> jax.Array:
        rows, stored, factors = operands
        dense = _decoded(problem, stored, factors)
        dims = (((1,), (1 if spec.form == "dot" else 0,)), ((), ()))
        wide = spec.out_dtype if spec.out_dtype == rows.dtype else F32
        wide = wide if after is None else F32
        return lax.dot_general(rows, dense, dims, precision=spec.precision, preferred_element_type=wide)

    if x.shape[0] == 1:
        y = one((x[0], codes[0], None if scale is None else scale[0]))[None]
    else:
        y = lax.map(one, (x, codes, scale))
    return (y if after is None else y * after).astype(spec.out_dtype)


def fold(problem: Problem, x: jax.Array, scale: jax.Array | None) -> tuple[jax.Array, jax.Array | None, Any]:
    """x, scale, and a factor for y. Integer codes are exact in 16 bits: a scale that can stay outside is not rounded.

    With many rows, passes over x and y would cost more than that is worth.
    """
    if scale is None or problem.fmt == "nf4" or problem.m > FOLD_M or 1 not in scale.shape[-2:]:
        return x, scale, None
    per_column = scale.shape[-1] != 1
    factor = scale.astype(F32).reshape(scale.shape[0], 1, -1)
    if per_column == (problem.spec.form == "axpy"):
        return x, None, factor
    return (x.astype(F32) * factor).astype(x.dtype), None, None


def _decoded(problem: Problem, codes: jax.Array, scale: jax.Array | None) -> jax.Array:
    operands = (codes[None], _empty() if scale is None else scale[None])
    result: Result = ((1, problem.rows, problem.cols), problem.x_dtype)
    (dense,) = _call(DEQUANT, [result], operands, **_attributes(problem.spec))
    return dense[0]


def qragged(
    problem: Problem, x: jax.Array, codes: jax.Array, scale: jax.Array | None, group_sizes: jax.Array
) -> jax.Array:
    """Groups of rows of x (M, K), each times its own matrix; rows behind the last group give zeros."""
    spec = problem.spec
    each = -(-problem.m // codes.shape[0])
    tiles, _ = cut(spec.fmt, codes.shape[0], each, problem.rows, spec.cols)
    if problem.fmt == "nf4" and scale is not None and scale.dtype == F16:
        scale = scale.astype(F32)
    operands = (x, codes, _empty() if scale is None else scale, group_sizes.astype(jnp.int32))
    result: Result = ((problem.m, problem.rows), spec.out_dtype)
    (y,) = _call(RAGGED, [result], operands, **_attributes(spec), tiles=tiles)
    return y


def qgather(problem: Any, codes: jax.Array, scale: jax.Array | None, indices: jax.Array) -> jax.Array:
    """Decoded rows for indices (n,) inside the table."""
    operands = (codes[None], _empty() if scale is None else scale[None], indices.astype(jnp.int32))
    attributes = {"fmt": FORMATS.index(problem.fmt), "cols": problem.cols, "block": problem.block or 0}
    (rows,) = _call(GATHER, [((indices.shape[0], problem.cols), problem.out_dtype)], operands, **attributes)
    return rows


def _attributes(spec: Spec) -> dict[str, int]:
    return {"fmt": FORMATS.index(spec.fmt), "cols": spec.cols, "block": spec.block or 0}


def _empty() -> jax.Array:
    """Stands for a scale that is not there."""
    return jnp.zeros((0,), jnp.float32)


def _call(target: str, results: list[Result], operands: tuple[jax.Array, ...], **attributes: int) -> Any:
    avals = [result_type(shape, dtype, operands[0]) for shape, dtype in results]
    return jax.ffi.ffi_call(target, avals)(*operands, **{name: np.int64(value) for name, value in attributes.items()})
