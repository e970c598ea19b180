"""CUDA C++ kernels (csrc/cuda), called through XLA's foreign function interface.

Few rows of x, and on Hopper up to a few thousand: a kernel decodes while it multiplies. More: the matrix is decoded
once, at the speed of a copy, and XLA multiplies with cuBLAS.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..formats import FORMATS
from ..native import (
    BF16,
    F16,
    F32,
    Limits,
    Loaded,
    call,
    in_one_batch_axis,
    library_of,
    load,
    offset_in_one_batch_axis,
    storage_attributes,
)
from ..parameters import Problem
from . import _attention, _axpy, _bytes, _odd, _tiles, _wide, tuning, ways
from .tuning import cut, is_skinny

LIBRARY = library_of(
    "cuda",
    compiler="CUDA compiler",
    package=__name__,
    abi=9,
    targets={
        "qmatmul": "EformerCudaQmatmul",
        "wide": "EformerCudaWide",
        "odd": "EformerCudaOdd",
        "bytes": "EformerCudaBytes",
        "ragged": "EformerCudaRagged",
        "gather": "EformerCudaQgather",
        "dequant": "EformerCudaDequant",
        "attention": "EformerCudaAttention",
        "tiles": "EformerCudaTiles",
    },
)


def loaded() -> Loaded:
    return load(LIBRARY)


# -- why a problem cannot be given to the kernels; None means it can ---------------------------------------------------

LIMITS = Limits(
    ways.FUSED,
    block=ways.BLOCK,
    arithmetic="its own: 16-bit products, sums in float32",
    rows_decide="its kernels are chosen by it",
)
# Where the matrix is decoded first.
DECODED = dataclasses.replace(LIMITS, formats=tuple(FORMATS), block=16)
FEW = 16
MOST_MATRICES = (1 << 16) - 2  # of a batch, a layer of blocks each; groups have one layer more


def refuses_product(problem: Problem) -> str | None:
    few = problem.has_at_most(FEW)
    limits = LIMITS if few and problem.fmt in ways.FUSED else DECODED
    why = limits.refuses_product(problem) or _refuses_batch(problem) or (_refuses_few(problem) if few else None)
    return why or _refuses_one_row(problem) or refuses_machine(problem.platform)


def _refuses_few(problem: Problem) -> str | None:
    """Where the matrix would be decoded first, XLA is quicker."""
    if problem.fmt in ways.FUSED or ways.chosen(problem) != "decode":
        return None
    return f"it has no kernel for {problem.fmt} with {FEW} rows or fewer, where decoding first is slower than XLA"


def refuses_rounded(problem: Problem) -> str | None:
    why = refuses_rounded_in_stack(problem)
    asked = problem.preference == "native"
    return why or (None if asked or not _wide.has_wgmma() else _bytes.slower(problem))


def refuses_rounded_in_stack(problem: Problem) -> str | None:
    why = _bytes.refuses(problem) or LIMITS.refuses_product(problem)
    if not why and not _wide.has_wgmma():
        why = _tiles.refuses(problem)
    return why or refuses_machine(problem.platform)


def refuses_ragged(problem: Problem) -> str | None:
    why = LIMITS.refuses_product(problem) or _refuses_batch(problem) or _refuses_groups(problem)
    return why or refuses_machine(problem.platform)


def refuses_gather(problem: Problem) -> str | None:
    return DECODED.refuses_lookup(problem) or refuses_machine(problem.platform)


def refuses_attention(problem: Any) -> str | None:
    return _attention.refuses(problem) or refuses_machine(problem.platform)


def refuses_machine(platform: str) -> str | None:
    """Asked last: it loads the library."""
    if platform != "cuda":
        return f"its kernels run on NVIDIA GPUs, not on {platform}"
    if tuning.version() < tuning.OLDEST:
        return f"compute capability {tuning.capability()}; it has kernels from {'.'.join(map(str, tuning.OLDEST))} on"
    return loaded().reason


def _refuses_batch(problem: Problem) -> str | None:
    count = math.prod(problem.batch)
    many = isinstance(count, int) and count > MOST_MATRICES  # not a symbol
    return f"{count} matrices at once; it takes up to {MOST_MATRICES}" if many else None


def _refuses_one_row(problem: Problem) -> str | None:
    """XLA multiplies one row of float32 without TF32, more accurately than 16-bit products can."""
    if problem.m == 1 and not problem.batch and F32 in (problem.x_dtype, problem.out_dtype):
        return "one row in float32 is summed up in float32, as in the dense product"
    return None


def _refuses_groups(problem: Problem) -> str | None:
    """Groups are multiplied where they lie, which leaves no place to prepare x."""
    if problem.form == "axpy":
        return "groups in the axpy form are multiplied one tile at a time"
    if problem.x_dtype == F32:
        return "groups of a float32 x are multiplied one tile at a time"
    if not problem.format.blocked and problem.scale_shape is not None and problem.scale_shape[-1] != 1:
        return "groups with scales along the columns are multiplied one tile at a time"
    if problem.m > 64 * problem.batch[0]:
        return f"with {problem.m} rows for {problem.batch[0]} matrices, decoding each matrix once is quicker"
    if not tuning.fits(problem.fmt, problem.m, -(-problem.m // problem.batch[0]), problem.offset is not None):
        return f"{problem.m} rows of x need more shared memory than the {tuning.shared_bytes()} bytes a block has here"
    return None


# -- the custom calls: sizes and dtypes have been checked, what arrives here is what the handlers take -----------------

F64 = jnp.dtype("float64")
# Rows of x up to which scales are kept out of the decoded matrix.
FOLD_M = 256


def qmatmul(
    problem: Problem,
    x: jax.Array,
    codes: jax.Array,
    scale: jax.Array | None = None,
    *,
    offset: jax.Array | None = None,
    index: Any = None,
    way: str | None = None,
) -> jax.Array:
    """The product of one problem, batch axes included; with an index, of that entry of stacks of what is stored."""
    rows, codes, scale = in_one_batch_axis(problem, x, codes, scale, stacked=index is not None)
    given = _offset(offset_in_one_batch_axis(problem, offset, stacked=index is not None))
    way = way or ways.chosen(problem)
    if way == "decode":
        run = _decode_first
    else:
        run = _fused if way == "few" and problem.form == "dot" else functools.partial(_in_both_forms, way)
    return run(problem, rows, codes, scale, given, index).reshape(*x.shape[:-1], problem.outs)


def _fused(
    problem: Problem, x: jax.Array, codes: jax.Array, scale: jax.Array | None, offset: jax.Array, index: Any
) -> jax.Array:
    x, scale, merge = prepare(problem, x, _given(problem, x, scale, index))
    batch, m, _ = x.shape
    if is_skinny(problem.fmt, m, problem.cols):
        tiles, splits = 0, 1  # the library chooses
    else:
        tiles, splits = cut(problem.fmt, batch, m, problem.rows, problem.cols)
    shape = (batch, m, problem.rows)
    sums = (splits * math.prod(shape) if splits > 1 else 0,)
    results = [(shape, problem.out_dtype if merge is None else F32), (sums, F32)]
    operands = (x, codes, scale, offset, _number(index))
    y, _ = call(LIBRARY, "qmatmul", results, operands, **storage_attributes(problem), tiles=tiles, splits=splits)
    return y if merge is None else merge(y).astype(problem.out_dtype)


def _offset(offset: jax.Array | None) -> jax.Array:
    """Zero points or biases as kernels take them: without elements where there are none."""
    return jnp.zeros((0,), jnp.uint8) if offset is None else offset.astype(F32) if offset.dtype == F64 else offset


def _number(index: Any) -> jax.Array:
    """The index as kernels take it: without elements where the codes are no stack."""
    return jnp.zeros((0,), jnp.int32) if index is None else index


def _given(problem: Problem, x: jax.Array, scale: Any, index: Any, *, outside: bool = False) -> Any:
    """The scale: of the entry alone where it is applied outside of the kernel, or becomes part of x."""
    if index is None or scale is None or not (outside or _wide.scales_x(problem)):
        return scale
    return lax.dynamic_slice_in_dim(scale, index * x.shape[0], x.shape[0])


def _in_both_forms(
    way: str, problem: Problem, x: jax.Array, codes: jax.Array, scale: Any, offset: jax.Array, index: Any
) -> jax.Array:
    """By the kernels that take either form; few rows in the axpy form are a cut of the wide one's target."""
    x, scale, merge = prepare(problem, x, _given(problem, x, scale, index))
    batch, m, deep = x.shape
    sizes = batch, m, problem.outs, deep
    if way == "few":
        cut = _axpy.CUT
    else:
        cut = _odd.cut(*sizes) if way == "odd" else _wide.cut(_wide.kind_of(problem), *sizes)
    operands = (x, codes, scale, offset, _number(index))
    result = ((batch, m, problem.outs), problem.out_dtype if merge is None else F32)
    how = {"axpy": int(problem.form == "axpy"), **cut._asdict()}
    (y,) = call(LIBRARY, "odd" if way == "odd" else "wide", [result], operands, **storage_attributes(problem), **how)
    return y if merge is None else merge(y).astype(problem.out_dtype)


def byte_matmul(
    problem: Problem,
    x: jax.Array,
    codes: jax.Array,
    scale: jax.Array,
    x_scale: jax.Array | None = None,
    *,
    index: Any = None,
) -> jax.Array:
    """The product of x, rounded to 8 bits row by row, and codes of 8 bits."""
    x, codes, scale, given = in_one_batch_axis(problem, x, codes, scale, x_scale, stacked=index is not None)
    batch, m, deep = x.shape
    rounded = ((batch, m, -(-deep // 16) * 16), jnp.uint8)
    results = [((batch, m, problem.outs), problem.out_dtype), rounded, ((batch, m), F32)]
    hopper = _wide.has_wgmma()
    cut = (_bytes if hopper else _tiles).cut(batch, m, problem.outs, deep)
    if not hopper:
        results.append(((cut.splits * batch * m * problem.outs if cut.splits > 1 else 0,), jnp.uint32))
    how = {"axpy": int(problem.form == "axpy"), **cut._asdict()}
    operands = (x, codes, scale, given, _number(index))
    y, *_ = call(LIBRARY, "bytes" if hopper else "tiles", results, operands, **storage_attributes(problem), **how)
    return y.reshape(*problem.batch, m, problem.outs)


def prepare(problem: Problem, x: jax.Array, scale: jax.Array | None) -> tuple[jax.Array, jax.Array | None, Any]:
    """x in 16 bits, a scale the kernel takes, and what makes y of its result (None: nothing).

    A scale along the contracted axis goes into x. What 16 bits do not hold becomes two bfloat16 that add up to it, as
    more rows.
    """
    if problem.format.blocked:
        assert scale is not None  # checked with the storage
        scale = scale.astype(F32) if scale.dtype == F16 else scale
    elif _wide.scales_x(problem):
        assert scale is not None
        x = x.astype(F32) * scale.astype(F32).reshape(scale.shape[0], 1, -1)
        scale = None
        x = x if _wide.doubles_rows(problem) else x.astype(BF16)
    if not _wide.doubles_rows(problem):
        return x, scale, None
    x = x.astype(F32)
    rounded = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)  # XLA would undo a conversion there and back
    high = jnp.clip(rounded, float(jnp.finfo(BF16).min), float(jnp.finfo(BF16).max))
    low = x - high  # an infinity stays one

    def merge(y: jax.Array) -> jax.Array:
        top, bottom = jnp.split(y, 2, axis=-2)
        return top + bottom

    return jnp.concatenate([high.astype(BF16), low.astype(BF16)], axis=-2), scale, merge


def _decode_first(
    problem: Problem, x: jax.Array, codes: jax.Array, scale: jax.Array | None, offset: jax.Array, index: Any
) -> jax.Array:
    """One matrix at a time, so that only one decoded matrix exists."""
    outside = scale_stays_outside(problem, scale)
    after = _given(problem, x, scale, index, outside=True).astype(F32).reshape(x.shape[0], 1, -1) if outside else None
    factors = None if outside else scale
    dtype = F32 if factors is not None and _wide.is_float32(problem) else problem.x_dtype  # integers are exact

    def one(number: Any, rows: jax.Array) -> jax.Array:
        dense = _decoded(problem, codes, factors, offset, dtype, number)
        dims = (((1,), (1 if problem.form == "dot" else 0,)), ((), ()))
        wide = problem.out_dtype if problem.out_dtype == dtype and after is None else F32
        return lax.dot_general(
            rows.astype(dtype), dense, dims, precision=problem.precision, preferred_element_type=wide
        )

    if x.shape[0] == 1:
        y = one(index, x[0])[None]
    else:
        first = 0 if index is None else index * x.shape[0]
        y = lax.map(lambda given: one(*given), (first + jnp.arange(x.shape[0], dtype=jnp.int32), x))
    return (y if after is None else y * after).astype(problem.out_dtype)


def scale_stays_outside(problem: Problem, scale: jax.Array | None) -> bool:
    """Is y multiplied by the scale? Integer codes are exact in 16 bits: a scale that can stay outside is not rounded.

    With many rows, a pass over y would cost more than that is worth.
    """
    return not (scale is None or problem.format.blocked or problem.m > FOLD_M or _wide.scales_x(problem))


def _decoded(problem: Problem, codes: Any, scale: Any, offset: jax.Array, dtype: Any, number: Any) -> jax.Array:
    """One matrix: the only one, or the one with this number."""
    result = ((1, problem.rows, problem.cols), dtype)
    operands = (codes, scale, offset, _number(number))
    (dense,) = call(LIBRARY, "dequant", [result], operands, **storage_attributes(problem))
    return dense[0]


def qragged(
    problem: Problem,
    x: jax.Array,
    codes: jax.Array,
    group_sizes: jax.Array,
    scale: jax.Array | None = None,
    *,
    offset: jax.Array | None = None,
) -> jax.Array:
    """Groups of rows of x (M, K), each times its own matrix; rows after the last group are zeros."""
    each = -(-problem.m // codes.shape[0])
    tiles, _ = cut(problem.fmt, codes.shape[0], each, problem.rows, problem.cols)
    if problem.format.blocked and scale is not None and scale.dtype == F16:
        scale = scale.astype(F32)
    operands = (x, codes, scale, _offset(offset), group_sizes.astype(jnp.int32))
    result = ((problem.m, problem.rows), problem.out_dtype)
    (y,) = call(LIBRARY, "ragged", [result], operands, **storage_attributes(problem), tiles=tiles)
    return y


def qgather(
    problem: Problem, codes: jax.Array, indices: jax.Array, scale: jax.Array | None = None, *, offset: Any = None
) -> jax.Array:
    """Decoded rows for indices (n,) inside the table."""
    scale, offset = (None if array is None else array[None] for array in (scale, offset))
    operands = (codes[None], scale, _offset(offset), indices.astype(jnp.int32))
    result = ((indices.shape[0], problem.cols), problem.out_dtype)
    (rows,) = call(LIBRARY, "gather", [result], operands, **storage_attributes(problem))
    return rows


def pads_heads(problem: Any) -> bool:
    return _attention.padded_size(problem) != problem.cols


def attention(problem: Any, *operands: jax.Array) -> list[jax.Array]:
    """One token over a quantized cache, into which its own rows are written; with an index, that entry of stacks."""
    q, new, place, index, turns, cache = problem.parts(operands)
    flat = (math.prod(problem.batch), problem.m, problem.cols)
    rows = new or (jnp.zeros((0,), q.dtype),) * 2
    angles = jnp.zeros((0,), jnp.float32) if turns is None else turns.astype(jnp.float32)
    given = (q if problem.joined else q.reshape(flat), *rows, *cache, place.reshape(1), _number(index), angles)
    results = [(flat, problem.out_dtype), *((part.shape, part.dtype) for part in cache if problem.written)]
    how = {"window": problem.window or 0, "factor": problem.factor, "cap": problem.cap or 0.0}
    how |= {"joined": problem.batch[1] if problem.joined else 0, "halves": int(problem.halves)}
    in_place = {3 + i: 1 + i for i in range(len(cache))} if problem.written else None
    y, *written = call(LIBRARY, "attention", results, given, in_place, **how)
    return [y.reshape(*problem.batch, *flat[1:]), *written]
