"""The kernel of every product: decode a block of codes, multiply, add up over the contracted axis in VMEM.

What is packed comes apart along the columns of D. In the dot form columns are contracted: x is split like the codes
beforehand, (steps, planes, M, units), and the products of all planes are added. In the axpy form columns are the
result: every plane has its own sums, and the caller weaves y of the same shape together. Nothing moves between lanes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eformer._jax.avals import result_type

from ..formats import FORMATS
from ..group_tiles import cut, joined
from ..native import in_one_batch_axis, offset_in_one_batch_axis
from ..parameters import Problem, out_shape
from ._decode import byte_planes, word_planes
from ._pallas import can_permute, compiler_params, grid_spec, pl, precision, scratch, words
from .tuning import Geometry, geometry

# Grid axes: matrix (or tile of a group), rows of x, result, contraction.
_TILE, _M, _OUT, _CONTRACTED = range(4)
# Rows of a tile: enough to fill the registers of bfloat16, few enough not to waste work on the ends of groups.
_LEAST, _MOST = 16, 256

# -- bringing a product into the shape the kernel takes, and its result back -------------------------------------------


def qmatmul(
    problem: Problem,
    x: jax.Array,
    codes: jax.Array,
    scale: jax.Array | None = None,
    *,
    offset: jax.Array | None = None,
    interpret: Any = False,
    permute: bool | None = None,
) -> jax.Array:
    """The product of one problem, batch axes included. `permute` forces a way of decoding nibbles, for tests."""
    shape = out_shape(problem, x, codes)
    x, codes, scale = in_one_batch_axis(problem, x, codes, scale)
    offset = None if offset is None else offset_in_one_batch_axis(problem, offset)
    return product(problem, x, codes, scale, offset, interpret=interpret, permute=permute).reshape(shape)


def qragged(
    problem: Problem,
    x: jax.Array,
    codes: jax.Array,
    group_sizes: jax.Array,
    scale: jax.Array | None = None,
    *,
    offset: jax.Array | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Groups of rows cut into tiles of one height, each tile times the matrix of its group.

    The matrix of a tile is a scalar the kernel knows before the tile starts, so the codes of the next expert arrive
    while this one is computed; experts without rows are never read.
    """
    tiles = cut(group_sizes, x.shape[0], height_of(x.shape[0], group_sizes.shape[0]))
    parts = x.at[tiles.rows].get(mode="fill", fill_value=0)
    y = product(problem, parts, codes, scale, offset, (tiles.group, tiles.used), interpret=interpret)
    return joined(tiles, y)


def height_of(m: int, groups: int) -> int:
    average = 1 << (max(m // groups, 1) - 1).bit_length()
    return int(np.clip(average, _LEAST, _MOST))


def product(
    problem: Problem,
    x: jax.Array,
    codes: jax.Array,
    scale: jax.Array | None,
    offset: jax.Array | None = None,
    groups: tuple[jax.Array, jax.Array] | None = None,
    *,
    interpret: Any = False,
    permute: bool | None = None,
) -> jax.Array:
    """(tiles, M, K) times (matrices, ...) -> (tiles, M, N); see `call` for `groups`."""
    g = geometry(problem, x.shape[1])
    before, factors = _factors(problem, g, scale, offset)
    kernel = Kernel(
        geometry=g,
        form=problem.form,
        out_dtype=problem.out_dtype,
        precision=precision(problem.precision),
        permute=can_permute() if permute is None else permute,
        grouped=groups is not None,
        scaled=bool(factors) and not problem.format.blocked,
        zeros=problem.offset == np.uint8,
    )
    if before is not None:
        x = (x * (before if groups is None else before[groups[0]])).astype(x.dtype)
    if problem.form == "dot":
        x = split(x, g)
    y = call(kernel, x, stored(problem.fmt, codes), factors, groups, interpret=interpret)
    return y if problem.form == "dot" else weave(y, g)[..., : problem.cols]


def stored(fmt: str, codes: jax.Array) -> jax.Array:
    """Codes as the kernel reads them. Blocks as (matrices, bytes, rows): no copy, XLA keeps the rows last on a TPU."""
    if not FORMATS[fmt].blocked:
        return codes
    matrices, rows, blocks, size = codes.shape
    return codes.transpose(0, 2, 3, 1).reshape(matrices, blocks * size, rows)


def _factors(
    problem: Problem, g: Geometry, scale: jax.Array | None, offset: jax.Array | None
) -> tuple[jax.Array | None, list[jax.Array]]:
    """What x is multiplied by before, and what the kernel takes: scales and offsets of blocks, or the factors of y."""
    if scale is None:
        return None, []
    if problem.format.blocked:
        numbers = [scale] if offset is None else [scale, offset]
        return None, [number.astype(jnp.float32).swapaxes(1, 2) for number in numbers]
    scale = scale.astype(jnp.float32)
    per_row, per_column = scale.shape[1] != 1, scale.shape[2] != 1
    row = scale.reshape(scale.shape[0], 1, -1)
    if problem.form == "dot":
        return (row, []) if per_column else (None, [jnp.broadcast_to(row, (row.shape[0], 1, g.rows))])
    if per_row:
        return row, []
    return None, [split(jnp.broadcast_to(row, (row.shape[0], 1, problem.cols)), g)]


def split(x: jax.Array, g: Geometry) -> jax.Array:
    """(tiles, M, columns) -> (tiles, steps, planes, M, units), zeros behind the end; unchanged with one plane."""
    if g.planes == 1:
        return x
    tiles, m, columns = x.shape
    x = jnp.pad(x, ((0, 0), (0, 0), (0, g.unit_steps * g.bu * g.planes - columns)))
    return x.reshape(tiles, m, g.unit_steps, g.bu, g.planes).transpose(0, 2, 4, 1, 3)


def weave(y: jax.Array, g: Geometry) -> jax.Array:
    """Inverse of `split`; the padding stays."""
    return y if g.planes == 1 else y.transpose(0, 3, 1, 4, 2).reshape(y.shape[0], g.m, -1)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The static side of one call."""

    geometry: Geometry
    form: str
    out_dtype: np.dtype
    precision: lax.Precision
    permute: bool
    grouped: bool = False
    scaled: bool = False  # y is multiplied by a row of factors at the end
    zeros: bool = False  # offsets, where there are any, are zero points

    @property
    def steps(self) -> tuple[int, int]:
        """Of the result and of the contraction."""
        g = self.geometry
        return (g.row_steps, g.unit_steps) if self.form == "dot" else (g.unit_steps, g.row_steps)

    def y_shape(self, tiles: int) -> tuple[int, ...]:
        g = self.geometry
        if self.form == "dot" or g.planes == 1:
            return tiles, g.m, g.rows if self.form == "dot" else g.units
        return tiles, g.unit_steps, g.planes, g.m, g.bu


def call(
    kernel: Kernel,
    x: jax.Array,
    codes: jax.Array,
    factors: list[jax.Array],
    groups: tuple[jax.Array, jax.Array] | None = None,
    *,
    interpret: Any = False,
) -> jax.Array:
    """x (tiles, ...) times codes (matrices, ...). `factors`: scales and offsets of blocks, or what y is multiplied by.

    `groups` are the matrix of every tile and the number of tiles in use; without it tile t is multiplied by matrix t.
    """
    g, tiles = kernel.geometry, x.shape[0]
    split_and_plain = _split_spec(kernel), _plain_spec(kernel)
    x_spec, y_spec = split_and_plain if kernel.form == "dot" else reversed(split_and_plain)
    specs = [x_spec, _codes_spec(kernel), *(_factor_spec(kernel) for _ in factors)]
    operands = [x, codes, *factors]
    prefetched = [] if groups is None else list(groups)
    y_shape = kernel.y_shape(tiles)
    sums = (g.planes if kernel.form == "axpy" else 1, g.bm, g.bu if kernel.form == "axpy" else g.br)
    return pl.pallas_call(
        lambda *refs: _body(kernel, _step(kernel, refs)),
        grid_spec=grid_spec(
            len(prefetched),
            grid=(tiles, g.m_steps, *kernel.steps),
            in_specs=specs,
            out_specs=y_spec,
            scratch_shapes=[scratch(sums)],
        ),
        out_shape=result_type(y_shape, kernel.out_dtype, x),
        compiler_params=compiler_params("parallel", "parallel", "parallel", "arbitrary"),
        cost_estimate=cost(kernel, tiles, operands, y_shape),
        interpret=interpret,
        name=f"eformer_{g.fmt}_{kernel.form}",
    )(*prefetched, *operands)


def cost(kernel: Kernel, tiles: int, operands: list[Any], y_shape: tuple[int, ...]) -> pl.CostEstimate:
    """For XLA's scheduler: every tile reads its matrix once for every block of its rows."""
    g = kernel.geometry
    passes = g.m_steps * tiles / operands[1].shape[0]
    stored = sum(a.size * a.dtype.itemsize for a in operands[1:])
    x = operands[0].size * operands[0].dtype.itemsize * kernel.steps[0]
    moved = x + passes * stored + math.prod(y_shape) * kernel.out_dtype.itemsize
    flops = 2 * tiles * g.m * g.rows * g.units * g.planes
    return pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=int(moved))


# -- which block a step sees -------------------------------------------------------------------------------------------


def _index(kernel: Kernel, pick: Any) -> Any:
    """An index map from pick(matrix, m, row step, unit step); a tile that is not in use asks for what is there."""

    def index(t: Any, m: Any, out: Any, contracted: Any, *prefetched: Any) -> Any:
        r, u = (out, contracted) if kernel.form == "dot" else (contracted, out)
        matrix = t
        if kernel.grouped:
            which, used = prefetched
            live = t < used[0]
            matrix, r, u = which[t], jnp.where(live, r, 0), jnp.where(live, u, 0)
        return pick(matrix, m, r, u)

    return index


def _split_spec(kernel: Kernel) -> pl.BlockSpec:
    g = kernel.geometry
    unit = _CONTRACTED if kernel.form == "dot" else _OUT
    if g.planes == 1:
        return pl.BlockSpec((None, g.bm, g.bu), lambda *at: (at[_TILE], at[_M], at[unit]))
    return pl.BlockSpec((None, None, g.planes, g.bm, g.bu), lambda *at: (at[_TILE], at[unit], 0, at[_M], 0))


def _plain_spec(kernel: Kernel) -> pl.BlockSpec:
    g = kernel.geometry
    row = _OUT if kernel.form == "dot" else _CONTRACTED
    return pl.BlockSpec((None, g.bm, g.br), lambda *at: (at[_TILE], at[_M], at[row]))


def _codes_spec(kernel: Kernel) -> pl.BlockSpec:
    g = kernel.geometry
    if g.format.blocked:
        return pl.BlockSpec((None, 4 * g.bu, g.br), _index(kernel, lambda i, m, r, u: (i, u, r)))
    return pl.BlockSpec((None, g.br, g.bu), _index(kernel, lambda i, m, r, u: (i, r, u)))


def _factor_spec(kernel: Kernel) -> pl.BlockSpec:
    g = kernel.geometry
    if g.format.blocked:
        tiled = g.scales_in_tiles
        index = _index(kernel, lambda i, m, r, u: (i, u if tiled else 0, r))
        return pl.BlockSpec((None, g.scale_block, g.br), index)
    if kernel.form == "dot":
        return pl.BlockSpec((None, 1, g.br), _index(kernel, lambda i, m, r, u: (i, 0, r)))
    if g.planes == 1:
        return pl.BlockSpec((None, 1, g.bu), _index(kernel, lambda i, m, r, u: (i, 0, u)))
    return pl.BlockSpec((None, None, g.planes, 1, g.bu), _index(kernel, lambda i, m, r, u: (i, u, 0, 0, 0)))


@dataclasses.dataclass(frozen=True)
class _Step:
    """Where in the grid this step is, and its blocks. Positions are read first: interpreted, a condition hides them."""

    tile: Any
    out: Any
    contracted: Any
    used: Any
    x: Any
    codes: Any
    factors: list[Any]
    y: Any
    sums: Any


def _step(kernel: Kernel, refs: tuple[Any, ...]) -> _Step:
    used = refs[1] if kernel.grouped else None
    x, codes, *factors, y, sums = refs[2:] if kernel.grouped else refs
    tile, out, contracted = (pl.program_id(axis) for axis in (_TILE, _OUT, _CONTRACTED))
    return _Step(tile, out, contracted, used, x, codes, factors, y, sums)


def _body(kernel: Kernel, step: _Step) -> None:
    def start() -> None:
        step.sums[...] = jnp.zeros_like(step.sums)

    def finish() -> None:
        y = step.sums[...] if step.y.ndim == 3 else step.sums[0]
        step.y[...] = (y * step.factors[0][...] if kernel.scaled else y).astype(step.y.dtype)

    def work() -> None:
        pl.when(step.contracted == 0)(start)
        _accumulate(kernel, step)
        pl.when(step.contracted == kernel.steps[1] - 1)(finish)

    if step.used is None:
        work()
    else:
        pl.when(step.tile < step.used[0])(work)


def _accumulate(kernel: Kernel, step: _Step) -> None:
    dot = kernel.form == "dot"
    axis = int(dot != kernel.geometry.format.blocked)  # the contracted axis of a plane
    dims = (((1,), (axis,)), ((), ()))
    x = None if step.x.ndim == 3 else _valid_x(kernel, step)
    total = step.sums[0] if dot else None
    row = kernel.geometry.format
    codes = _valid_codes(kernel, step)
    if row.blocked:
        scale, *offset = (_valid_numbers(kernel, step, numbers) for numbers in step.factors)
        named = dict(zip(["zero" if kernel.zeros else "bias"], offset, strict=False))
        planes = word_planes(row, codes, scale, permute=kernel.permute, **named)
    else:
        planes = byte_planes(row, codes)
    for i, plane in enumerate(planes):
        part = lax.dot_general(
            step.x[i] if x is None else x,
            plane.astype(step.x.dtype),
            dims,
            precision=kernel.precision,
            preferred_element_type=jnp.float32,
        )
        if total is None:
            step.sums[i] += part
        else:
            total = total + part
    if total is not None:
        step.sums[0] = total


# -- ragged sizes: what lies behind the end of an array is undefined, and may be NaN -----------------------------------


def _valid_x(kernel: Kernel, step: _Step) -> jax.Array:
    """Zeros behind the end of the contracted axis. (An x that was split has been padded with zeros.)"""
    g = kernel.geometry
    size, block = (g.units, g.bu) if kernel.form == "dot" else (g.rows, g.br)
    return _masked(step.x[...], 1, size, block, step.contracted)


def _valid_codes(kernel: Kernel, step: _Step) -> jax.Array:
    """Words of blocks, else bytes as signed numbers. Of floats, that is of codes that may be NaN, 0 behind the end."""
    g = kernel.geometry
    row, dot = g.format, kernel.form == "dot"
    codes = step.codes[...]
    codes = words(codes) if row.blocked else lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.int32)
    if row.bits_of is None:
        return codes
    size, block = (g.units, g.bu) if dot else (g.rows, g.br)
    return _masked(codes, int(dot != row.blocked), size, block, step.contracted)


def _valid_numbers(kernel: Kernel, step: _Step, numbers: Any) -> jax.Array:
    """The scales or offsets of this step. Codes behind the end decode to something finite as long as these are."""
    g = kernel.geometry
    unit = step.contracted if kernel.form == "dot" else step.out
    if g.scales_in_tiles:
        found = numbers[...]
    else:
        steps_per_row = max(g.units_per_scale // g.bu, 1)
        # lax.div: `//` would look at signs, too, and for that Mosaic wants to know the chip.
        found = numbers[pl.ds(lax.div(unit, steps_per_row) * g.scale_rows, g.scale_rows), :]
    if kernel.form == "axpy":
        return _masked(found, 1, g.rows, g.br, step.contracted)
    if not g.scales_in_tiles:
        return found
    return _masked(found, 0, g.units // g.units_per_scale, g.scale_rows, step.contracted)


def _masked(value: jax.Array, axis: int, size: int, block: int, number: Any) -> jax.Array:
    if size % block == 0:
        return value
    position = lax.broadcasted_iota(jnp.int32, value.shape, axis)
    return jnp.where(position < size - number * block, value, jnp.zeros_like(value))
