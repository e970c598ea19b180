"""Embedding rows: the numbers of the rows are known before the kernel starts, so only their tiles are read.

The kernel moves bytes, whatever they stand for. A product with a single 1 takes a row out of its tile; numbers up to
255 are exact in it, and a row that lay along sublanes lies along lanes afterwards. XLA decodes the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eformer._jax.avals import result_type

from ..formats import FORMATS, decode, float_scale
from ._matmul import stored
from ._pallas import compiler_params, grid_spec, pl
from .tuning import TILE_LANES, TILE_ROWS

# Bytes of a row of codes one step reads at most; a longer row takes several.
MOST = 4096
_LEAST_ROWS = 16  # of a matrix of bfloat16: they fill a register


def qgather(
    problem: Any,
    codes: jax.Array,
    indices: jax.Array,
    scale: jax.Array | None = None,
    *,
    offset: jax.Array | None = None,
    factor: jax.Array | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Decoded rows for indices (n,) inside the table. Scales other than those of blocks are left to XLA."""
    row = FORMATS[problem.fmt]
    numbers = [array for array in (scale, offset) if array is not None and row.blocked]
    tables = [stored(problem.fmt, codes[None])[0], *(_readable(array).T for array in numbers)]
    found = _picked(f"eformer_{problem.fmt}_lookup", tables, int(row.blocked), indices.astype(jnp.int32), interpret)
    rows, *numbers = (_stored_as(array.dtype, part) for array, part in zip((codes, *numbers), found, strict=True))
    if row.blocked:
        scale, offset = (*numbers, None)[:2]
    elif scale is not None and scale.shape[0] == problem.rows:
        scale = scale[indices]
    rows = rows.reshape(indices.shape[0], *codes.shape[1:])
    scale = None if scale is None else float_scale(scale, factor)
    return decode(rows, scale, offset, fmt=problem.fmt, cols=problem.cols).astype(problem.out_dtype)


def _readable(numbers: jax.Array) -> jax.Array:
    """Scales or offsets in a type the kernel reads: bytes, bfloat16 or float32."""
    if numbers.dtype.itemsize == 1:
        return lax.bitcast_convert_type(numbers, jnp.uint8)
    return numbers if numbers.dtype == jnp.bfloat16 else numbers.astype(jnp.float32)


def _stored_as(dtype: Any, found: jax.Array) -> jax.Array:
    """What was found, in its own type; floats as float32."""
    if dtype.itemsize == 1:
        return lax.bitcast_convert_type(found.astype(jnp.uint8), dtype)
    return lax.bitcast_convert_type(found, jnp.float32)


def _picked(name: str, tables: list[jax.Array], axis: int, indices: jax.Array, interpret: Any) -> list[jax.Array]:
    """What the tables hold at the indices of an axis, each (n, length of the other axis): bytes, or bits of float32."""
    steps = -(-tables[0].shape[1 - axis] // MOST)
    pairs = [_specs(table.shape, axis, steps) for table in tables]
    count, lengths = indices.shape[0], [table.shape[1 - axis] for table in tables]
    moved = count * (TILE_ROWS, TILE_LANES)[axis] * sum(lengths)
    found = pl.pallas_call(
        lambda numbers, *refs: _body(axis, numbers[pl.program_id(0)], refs),
        grid_spec=grid_spec(
            1, grid=(count, steps), in_specs=[spec for spec, _ in pairs], out_specs=[spec for _, spec in pairs]
        ),
        out_shape=[result_type((count, 1, length), jnp.int32, tables[0]) for length in lengths],
        compiler_params=compiler_params("parallel", "arbitrary"),
        cost_estimate=pl.CostEstimate(flops=2 * moved, transcendentals=0, bytes_accessed=moved),
        interpret=interpret,
        name=name,
    )(indices, *tables)
    return [part[:, 0] for part in found]


def _specs(shape: tuple[int, ...], axis: int, steps: int) -> tuple[pl.BlockSpec, pl.BlockSpec]:
    """What a step reads of a table and writes. Shorter tables have fewer blocks than steps: the last one stays."""
    length, tile = shape[1 - axis], (TILE_ROWS, TILE_LANES)[axis]
    size = length if steps == 1 else min(length, -(-length // (steps * TILE_LANES)) * TILE_LANES)
    last = -(-length // size) - 1
    # lax.div: `//` would look at signs, too, and for that Mosaic wants to know the chip.
    at = lambda i, u, numbers: (lax.div(numbers[i], tile), lax.min(u, last))  # noqa: E731
    tile = min(tile, shape[axis])
    if axis == 0:
        read = pl.BlockSpec((tile, size), at)
    else:
        read = pl.BlockSpec((size, tile), lambda *step: at(*step)[::-1])
    return read, pl.BlockSpec((None, 1, size), lambda i, u, numbers: (i, 0, lax.min(u, last)))


def _body(axis: int, number: Any, refs: tuple[Any, ...]) -> None:
    half = len(refs) // 2
    for table, out in zip(refs[:half], refs[half:], strict=True):
        block = table[...]
        position = lax.rem(number, (TILE_ROWS, TILE_LANES)[axis])
        ones = lax.broadcasted_iota(jnp.int32, (_LEAST_ROWS, block.shape[axis]), 1) == position
        dims = (((1,), (axis,)), ((), ()))
        found = jnp.zeros(out.shape, jnp.int32)
        for shift, plane in _bytes(block):
            picked = lax.dot_general(
                ones.astype(jnp.bfloat16), plane.astype(jnp.bfloat16), dims, preferred_element_type=jnp.float32
            )
            found = found | (picked[:1].astype(jnp.int32) << shift)
        out[...] = found


def _bytes(block: jax.Array) -> Iterator[tuple[int, jax.Array]]:
    """The bytes of every element, as numbers, and which bits of it they are."""
    if block.dtype.itemsize == 1:
        yield 0, block.astype(jnp.int32) & 255
        return
    bits = lax.bitcast_convert_type(block.astype(jnp.float32), jnp.int32)
    for shift in (0, 8, 16, 24):
        yield shift, (bits >> shift) & 255
