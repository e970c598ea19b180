"""How products are cut up for the GPU, one row per generation, found by measurement.

A block takes some tiles of 16 rows of D and walks along their columns; the columns may be split over several blocks,
whose sums a second kernel adds up.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from ..formats import FORMATS


class Skinny(NamedTuple):
    """Rows of x up to which it is the quickest, and of how many columns it takes a multiple."""

    rows: int
    columns: int


@dataclasses.dataclass(frozen=True)
class Generation:
    """Costs are in units of one tile for one stage of columns.

    `stage_cost` is what a stage costs besides its tiles, by columns of eight rows of x; `block_cost` what starting and
    ending a block costs, `sum_cost` adding up splits. `largest_m` is the number of rows of x up to which decoding
    inside the product beats decoding first. `skinny` is about the kernel of csrc/cuda/skinny.cuh: by format, what it
    takes faster than others do.
    """

    multiprocessors: int
    largest_m: int
    stage_cost: Mapping[int, float]
    block_cost: float
    sum_cost: float
    skinny: Mapping[str, Skinny]


STAGE_COST = MappingProxyType({1: 1.0, 2: 2.5, 4: 4.0, 8: 6.0})
BYTES = ("int8", "fp8_e4m3", "fp8_e5m2")
PACKED = ("nf4", "int4", "iq4_nl", "fp4", "ternary", "binary")
BYTE_BLOCKS = ("int8_block", "fp8_e4m3_block")
SKINNY: Mapping[str, Skinny] = MappingProxyType(
    {fmt: Skinny(16, 256) for fmt in PACKED} | {fmt: Skinny(16, 128) for fmt in (*BYTES, *BYTE_BLOCKS)}
)
NOT_SKINNY: Mapping[str, Skinny] = MappingProxyType({})
TABLE: Mapping[str, Generation] = MappingProxyType(
    {
        "9.0": Generation(132, 64, STAGE_COST, 28.0, 28.0, SKINNY),
        "8.0": Generation(108, 64, STAGE_COST, 28.0, 28.0, NOT_SKINNY),  # like 9.0, not measured
        "8.9": Generation(128, 64, STAGE_COST, 28.0, 28.0, NOT_SKINNY),  # likewise
    }
)
DEFAULT = "9.0"
MOST_TILES = 8


def _first_gpu() -> Any:
    """None where there is none: a program is being lowered for later."""
    try:
        return jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return None


@functools.cache
def capability() -> str:
    """Of the first GPU; that of the newest measured one when there is none."""
    device = _first_gpu()
    return DEFAULT if device is None else getattr(device, "compute_capability", "")


@functools.cache
def multiprocessors() -> int:
    """Of the first GPU; those of its generation where it does not say, or where there is none."""
    return getattr(_first_gpu(), "core_count", 0) or generation().multiprocessors


def generation() -> Generation:
    return TABLE.get(capability(), TABLE[DEFAULT])


def columns_of(fmt: str, m: int) -> int:
    """Columns of eight rows of x a kernel takes at a time (csrc/cuda/dot_launch.cuh)."""
    return 1 if m <= 8 else 2 if m <= 16 else 4 if m <= 32 or fmt == "binary" else 8


def segment_bytes(fmt: str, columns: int) -> int:
    """Bytes of a stored row per stage."""
    return 256 if columns == 1 or (columns == 2 and fmt != "binary") else 128


@functools.lru_cache(maxsize=1024)
def cut(fmt: str, batch: int, m: int, rows: int, cols: int) -> tuple[int, int]:
    """Tiles per block and splits of the columns, for the kernel of csrc/cuda/dot.cuh."""
    here, columns = generation(), columns_of(fmt, m)
    stages = -(-cols // (segment_bytes(fmt, columns) * FORMATS[fmt].per_code))
    chunks = batch * -(-m // (8 * columns))

    def cost(tiles: int, splits: int) -> float:
        blocks = -(-rows // (16 * tiles)) * splits * chunks
        waves = -(-blocks // here.multiprocessors)
        work = -(-stages // splits) * (tiles + here.stage_cost[columns])
        return waves * (work + here.block_cost) + (here.sum_cost if splits > 1 else 0.0)

    choices = [(t, s) for s in (1, 2, 4, 8) if s <= max(stages // 2, 1) for t in range(1, MOST_TILES + 1)]
    return min(choices, key=lambda choice: (cost(*choice), choice[1]))


def width_for(m: int, widths: Iterable[int]) -> int:
    """The fewest rows of x per block that are enough for m of them, or the most there are."""
    ordered = sorted(widths)
    return next((width for width in ordered if width >= m), ordered[-1])


def is_skinny(fmt: str, m: int, cols: int) -> bool:
    """Is this product for the kernel of csrc/cuda/skinny.cuh? The library still checks blocks and alignment."""
    limits = generation().skinny.get(fmt)
    return limits is not None and m <= limits.rows and cols % limits.columns == 0
