"""Embedding rows: the numbers of the rows are known before the kernel starts, so only their tiles are read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eformer._jax.avals import result_type

from ..formats import FORMATS
from ._matmul import stored
from ._pallas import byte_planes, can_permute, compiler_params, grid_spec, nibble_planes, pl, words
from .tuning import TILE_LANES, TILE_ROWS, planes_of, units_of

# Index arithmetic is written with lax: `//` and `%` of JAX also look at signs, for which Mosaic wants to know the chip.

# Units one step decodes at most; a longer row takes several.
_UNITS, _UNITS_OF_NIBBLES = {"int8": 8192, "ternary": 4096, "binary": 2048}, 1024


def qgather(
    problem: Any,
    codes: jax.Array,
    indices: jax.Array,
    scale: jax.Array | None = None,
    *,
    interpret: Any = False,
    permute: bool | None = None,
) -> jax.Array:
    """Decoded rows for indices (n,) inside the table. Scales other than those of blocks are left to XLA."""
    fmt, planes, blocked = problem.fmt, planes_of(problem.fmt), FORMATS[problem.fmt].blocked
    operands = [stored(fmt, codes[None])[0]]
    if blocked:
        assert scale is not None
        operands.append(scale.T.astype(jnp.float32))
    permute = can_permute() if permute is None else permute
    units = units_of(fmt, problem.cols, problem.block)
    size = _units_per_step(fmt, units, problem.block)
    specs = _specs(problem, size)
    rows = pl.pallas_call(
        lambda numbers, *refs: _body(problem, permute, numbers, *refs),
        grid_spec=grid_spec(
            1,
            grid=(indices.shape[0], -(-units // size)),
            in_specs=specs,
            out_specs=pl.BlockSpec((None, planes, size), lambda i, u, numbers: (i, 0, u)),
        ),
        out_shape=result_type((indices.shape[0], planes, units), jnp.float32, codes),
        compiler_params=compiler_params("parallel", "parallel"),
        cost_estimate=_cost(problem, indices.shape[0], units),
        interpret=interpret,
        name=f"eformer_{fmt}_lookup",
    )(indices.astype(jnp.int32), *operands)
    rows = rows.swapaxes(1, 2).reshape(indices.shape[0], -1)[:, : problem.cols]
    if scale is not None and not blocked:
        factor = scale[indices] if scale.shape[0] == codes.shape[0] else scale
        rows = rows * factor.astype(jnp.float32)
    return rows.astype(problem.out_dtype)


def _units_per_step(fmt: str, units: int, block: int | None) -> int:
    most = _UNITS_OF_NIBBLES if block else _UNITS[fmt]
    if units <= most:
        return units
    # Of blocks, whole groups of eight scales, or a row that is taken whole whatever its length.
    step = block or most
    return step * (most // step) if step <= most else units


def _specs(problem: Any, size: int) -> list[pl.BlockSpec]:
    if not FORMATS[problem.fmt].blocked:
        at_row = lambda i, u, numbers: (lax.div(numbers[i], TILE_ROWS), u)  # noqa: E731
        return [pl.BlockSpec((min(problem.rows, TILE_ROWS), size), at_row)]
    scales = size // (problem.block // 8)
    lanes = min(problem.rows, TILE_LANES)

    def at(i: Any, u: Any, numbers: Any) -> Any:
        return u, lax.div(numbers[i], TILE_LANES)

    return [pl.BlockSpec((4 * size, lanes), at), pl.BlockSpec((scales, lanes), at)]


def _body(problem: Any, permute: bool, numbers: Any, codes: Any, *rest: Any) -> None:
    out = rest[-1]
    number = numbers[pl.program_id(0)]
    if not FORMATS[problem.fmt].blocked:
        row = lax.broadcasted_iota(jnp.int32, codes.shape, 0) == lax.rem(number, TILE_ROWS)
        for i, plane in enumerate(byte_planes(codes[...], problem.fmt)):
            out[i : i + 1, :] = jnp.where(row, plane, 0.0).sum(0, keepdims=True)
        return
    # The row lies along sublanes. A product with one 1 in the right lane takes it out and lays it along lanes; in full
    # precision it is exact. Lanes after the end of the table, and scales after the last block, may be NaN.
    scale = rest[0][...]
    lane = lax.broadcasted_iota(jnp.int32, scale.shape, 1) == lax.rem(number, TILE_LANES)
    planes = nibble_planes(FORMATS[problem.fmt], words(codes[...]), jnp.where(lane, scale, 0.0), permute=permute)
    ones = jnp.ones((8, scale.shape[1]), jnp.float32)
    for i, plane in enumerate(planes):
        dims = (((1,), (1,)), ((), ()))
        picked = lax.dot_general(ones, plane, dims, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
        out[i : i + 1, :] = picked[:1]


def _cost(problem: Any, count: int, units: int) -> pl.CostEstimate:
    per_row = 4 * units * TILE_LANES if FORMATS[problem.fmt].blocked else units * TILE_ROWS
    values = units * planes_of(problem.fmt)
    return pl.CostEstimate(flops=2 * count * values, transcendentals=0, bytes_accessed=count * (per_row + 4 * values))
