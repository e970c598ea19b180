"""How products are cut up for the GPU, found by measurement.

A block takes some tiles of 16 rows of D and walks along their columns; the columns may be split over several blocks,
whose sums a second kernel adds up.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

import jax

from ..formats import FORMATS

# Found on an H200, taken for alike elsewhere. Costs are in units of one tile for one stage of columns: of a stage
# besides its tiles, by columns of eight rows of x; of starting and ending a block; of adding up splits.
STAGE_COST = MappingProxyType({1: 1.0, 2: 2.5, 4: 4.0, 8: 6.0})
BLOCK_COST = SUM_COST = 28.0
LARGEST_M = 64  # rows of x up to which decoding inside the product beats decoding first
MOST_TILES = 8
MULTIPROCESSORS = MappingProxyType({"9.0": 132, "8.0": 108, "8.9": 128})
DEFAULT = "9.0"
BYTES = ("int8", "fp8_e4m3", "fp8_e5m2")
PACKED = ("nf4", "int4", "iq4_nl", "fp4", "ternary", "binary")
BYTE_BLOCKS = ("int8_block", "fp8_e4m3_block")
# For the kernel of csrc/cuda/skinny.cuh: of how many columns it takes a multiple, and up to how many rows of x.
_COLUMNS: dict[str, int] = {**dict.fromkeys(PACKED, 256), **dict.fromkeys((*BYTES, *BYTE_BLOCKS), 128)}
SKINNY = MappingProxyType(_COLUMNS)
SKINNY_M = 16


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
    return getattr(_first_gpu(), "core_count", 0) or MULTIPROCESSORS.get(capability(), MULTIPROCESSORS[DEFAULT])


def version() -> tuple[int, int]:
    """The compute capability as numbers; zeros where it is not known."""
    major, _, minor = capability().partition(".")
    return int(major or 0), int(minor or 0)


def columns_of(fmt: str, m: int) -> int:
    """Columns of eight rows of x a kernel takes at a time (csrc/cuda/dot_launch.cuh)."""
    return 1 if m <= 8 else 2 if m <= 16 else 4 if m <= 32 or fmt == "binary" else 8


def segment_bytes(fmt: str, columns: int) -> int:
    """Bytes of a stored row per stage."""
    return 256 if columns == 1 or (columns == 2 and fmt != "binary") else 128


@functools.lru_cache(maxsize=1024)
def cut(fmt: str, batch: int, m: int, rows: int, cols: int) -> tuple[int, int]:
    """Tiles per block and splits of the columns, for the kernel of csrc/cuda/dot.cuh."""
    columns, at_once = columns_of(fmt, m), multiprocessors()
    stages = -(-cols // (segment_bytes(fmt, columns) * FORMATS[fmt].per_code))
    chunks = batch * -(-m // (8 * columns))

    def cost(tiles: int, splits: int) -> float:
        blocks = -(-rows // (16 * tiles)) * splits * chunks
        waves = -(-blocks // at_once)
        work = -(-stages // splits) * (tiles + STAGE_COST[columns])
        return waves * (work + BLOCK_COST) + (SUM_COST if splits > 1 else 0.0)

    choices = [(t, s) for s in (1, 2, 4, 8) if s <= max(stages // 2, 1) for t in range(1, MOST_TILES + 1)]
    return min(choices, key=lambda choice: (cost(*choice), choice[1]))


def width_for(m: int, widths: Iterable[int]) -> int:
    """The fewest rows of x per block that are enough for m of them, or the most there are."""
    ordered = sorted(widths)
    return next((width for width in ordered if width >= m), ordered[-1])


def is_skinny(fmt: str, m: int, cols: int) -> bool:
    """Is this product for the kernel of csrc/cuda/skinny.cuh, which is for Hopper and what came after?

    The library still checks blocks and alignment.
    """
    return version() >= (9, 0) and m <= SKINNY_M and fmt in SKINNY and cols % SKINNY[fmt] == 0
