"""Block sizes of the TPU kernels: a small table, and the count of VMEM that decides which of its rows fits."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from ..formats import FORMATS, Format
from ..parameters import Problem

# Bytes of VMEM one kernel may fill. Mosaic gives a kernel 16 MiB on every generation unless told otherwise; the rest is
# left for what it allocates itself (spilled registers, relayouts).
VMEM_BUDGET = 12 << 20

# (rows of x, rows of D, values along the packed axis) per block, best first: large blocks hide the start of a transfer
# (about 0.35 us), many rows of x use a decoded value often. The last row fits whatever the format.
TABLE = ((512, 512, 2048), (256, 512, 2048), (256, 256, 2048), (128, 256, 2048), (128, 128, 1024), (64, 128, 1024))

# Bytes of a row of D in a block, at least: fewer would make transfers of short pieces. A multiple of 128 lanes.
LEAST_BYTES = 512

# Rows one lookup reads to get one: a whole tile, because a transfer cannot start inside one.
TILE_ROWS, TILE_LANES = 32, 128


@dataclasses.dataclass(frozen=True)
class Geometry:
    """How a stored matrix is cut.

    A *unit* is what comes apart into `planes` values: a byte, or of blocks a word, four bytes of one row of D.
    `bm`, `br` and `bu` are block sizes: rows of x, rows of D, units of columns.
    """

    fmt: str
    m: int
    rows: int
    units: int
    bm: int
    br: int
    bu: int
    block: int | None = None  # values per scale
    numbers: int = 1  # of a block: its scale, and its offset if there is one

    @property
    def format(self) -> Format:
        return FORMATS[self.fmt]

    @property
    def planes(self) -> int:
        return planes_of(self.fmt)

    @property
    def row_steps(self) -> int:
        return -(-self.rows // self.br)

    @property
    def unit_steps(self) -> int:
        return -(-self.units // self.bu)

    @property
    def m_steps(self) -> int:
        return -(-self.m // self.bm)

    @property
    def units_per_scale(self) -> int:
        assert self.block is not None
        return self.block // self.planes

    @property
    def scale_rows(self) -> int:
        """Of blocks: rows of the transposed scales one block of codes needs (a part of a row counts as one)."""
        return max(self.bu // self.units_per_scale, 1)

    @property
    def scale_block(self) -> int:
        """Of blocks: rows of the transposed scales in VMEM at a time."""
        return self.scale_rows if self.scales_in_tiles else self.units // self.units_per_scale

    @property
    def scales_in_tiles(self) -> bool:
        """Are scales of blocks cut like the codes? Otherwise a step has all of them, and the kernel takes its rows."""
        return self.unit_steps == 1 or self.scale_rows % 8 == 0


def planes_of(fmt: str) -> int:
    return 32 // FORMATS[fmt].bits if FORMATS[fmt].blocked else FORMATS[fmt].per_code


def refuses_block(fmt: str, block: int) -> str | None:
    """Registers of eight words hold whole blocks, or blocks whole registers."""
    planes = planes_of(fmt)
    if block % (8 * planes) == 0 or block in (planes, 2 * planes, 4 * planes):
        return None
    sizes = f"{planes}, {2 * planes}, {4 * planes} and multiples of {8 * planes}"
    return f"blocks of {block} values; of {fmt} it takes {sizes}"


def units_of(fmt: str, cols: int, block: int | None) -> int:
    """Units of the storage, padding included."""
    return math.prod(FORMATS[fmt].stored_shape(1, cols, block)) // (4 if FORMATS[fmt].blocked else 1)


def geometry(problem: Problem, m: int) -> Geometry:
    """The first row of the table whose blocks fit into VMEM, for `m` rows of x at a time."""
    for row in TABLE:
        found = cut(problem, m, *row)
        if vmem_bytes(found, problem.form, problem.x_dtype, problem.out_dtype) <= VMEM_BUDGET:
            return found
    return cut(problem, m, *TABLE[-1])


def cut(problem: Problem, m: int, bm: int, br: int, values: int) -> Geometry:
    """The table's sizes made to fit the problem: an axis that is not longer than its block is taken whole."""
    fmt, block = problem.fmt, problem.block
    units = units_of(fmt, problem.cols, block)
    wanted = values // planes_of(fmt)
    per_scale = block // planes_of(fmt) if block else 0
    bu = _block_units(units, wanted, per_scale) if block else min(units, max(wanted, LEAST_BYTES))
    numbers = 1 + len(problem.extras)
    return Geometry(fmt, m, problem.rows, units, min(m, bm), min(problem.rows, br), bu, block, numbers)


def _block_units(units: int, wanted: int, per_scale: int) -> int:
    """Units whose scales are whole rows, a multiple of eight of them, a divisor of all, or part of a single one.

    Whole registers, too: where the last one is not full, the block reaches behind the end.
    """
    if units <= wanted:
        return units if units % 8 == 0 else -(-units // (8 * per_scale)) * 8 * per_scale
    if 8 * per_scale <= wanted:
        return wanted // (8 * per_scale) * 8 * per_scale
    scales = units // per_scale
    whole = [n for n in range(wanted // per_scale, 0, -1) if scales % n == 0]
    if whole:
        return whole[0] * per_scale
    return next(n for n in range(wanted, 7, -8) if per_scale % n == 0)


def vmem_bytes(g: Geometry, form: str, x_dtype: np.dtype, out_dtype: np.dtype) -> int:
    """VMEM a product takes: every block twice (one is computed on while the next arrives), the sums, decoded planes."""
    stored = (g.bu * 4, g.br) if g.format.blocked else (g.br, g.bu)
    split, plain = (g.planes, g.bm, g.bu), (g.bm, g.br)
    x, y = (split, plain) if form == "dot" else (plain, split)
    scale = (g.scale_block, g.br) if g.format.blocked else (*y[:-2], 1, y[-1])
    numbers = g.numbers * padded(scale, np.float32)
    blocks = padded(x, x_dtype) + padded(stored, np.int8) + numbers + padded(y, out_dtype)
    # Temporaries: the codes as 32-bit words, a plane in float32 and in the dtype of x, two scaled tables, or a scale
    # and an offset for every word.
    plane, words = ((g.bu, g.br), 4) if g.format.blocked else ((g.br, g.bu), 2)
    return 2 * blocks + padded(y, np.float32) + words * padded(plane, np.float32) + padded(plane, x_dtype)


def padded(shape: tuple[int, ...], dtype: Any) -> int:
    """Bytes of a block in VMEM, whose last two axes are padded to tiles of 8 x 128 words of 32 bits."""
    size = np.dtype(dtype).itemsize
    *lead, rows, lanes = shape
    tile = 8 * 4 // size
    return math.prod(lead) * (-(-rows // tile) * tile) * (-(-lanes // 128) * 128) * size


def lookup_pays(problem: Problem) -> bool:
    """Where rows lie along lanes XLA turns the whole table around to gather from it, and one tile per row asked for is
    less as long as there are few of them. Other tables XLA gathers from in place."""
    return _rows_lie_last(problem) and problem.m <= problem.rows // (TILE_LANES // 2)


def _rows_lie_last(problem: Problem) -> bool:
    """Does XLA keep codes as the kernels read them? It puts the axis last that fills tiles of 128 lanes best."""
    row = problem.format
    if not row.blocked:
        return False
    rows, *others = (-n % TILE_LANES / n for n in row.stored_shape(problem.rows, problem.cols, problem.block))
    return rows < min(others)
