"""Which products are for the kernel of csrc/cuda/odd.cuh, and how they are cut up for it.

It multiplies matrices of any size, in both forms, with the matrix unit of Hopper. `outs` are the results of one row of
x, `deep` is the contracted axis.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from jax import lax

from ..native import BF16, F16
from ..parameters import Problem
from . import _wide
from .tuning import BYTES, PACKED, is_skinny, multiprocessors, width_for

OUTS, DEEP = 64, 128  # of a block, of a stage
MOST_BYTES = (1 << 31) - 64  # of one matrix, of the rows of x for it
MOST_SPLITS = 8
# Rows of x up to which decoding once and multiplying with cuBLAS is not as quick; of larger matrices, where decoding
# takes less than the matrix unit loses here.
MOST: Mapping[str, int] = MappingProxyType({"dot": 128, "axpy": 256})
MOST_LARGE, LARGE = 128, 1 << 23
FEW_IN_BLOCKS = 16  # rows, for which dot_kernel is as quick with values of 4 bits in the dot form


class Cut(NamedTuple):
    """Rows of x per block, and blocks that share a tile and add up their sums."""

    width: int
    splits: int


class Cost(NamedTuple):
    """Microseconds. So many blocks share a multiprocessor: some of the time of a stage they have together."""

    together: float
    stage: float
    block: float
    cluster: float  # for every block in it
    at_once: int


# By rows of x per block, fitted to an H200: the cut takes at most 1.15 of what the best takes, 1.01 in the mean.
COSTS: Mapping[int, Cost] = MappingProxyType(
    {16: Cost(0.62, 0.3, 0.0, 0.44, 3), 64: Cost(0.98, 0.16, 3.4, 0.086, 2), 128: Cost(1.4, 0.012, 5.3, 0.038, 2)}
)


def can_take(problem: Problem) -> bool:
    """Can the kernel compute this product?"""
    if problem.fmt not in (*PACKED, *BYTES) or problem.offset is not None or not _wide.has_wgmma():
        return False
    if _wide.is_float32(problem) and problem.precision not in (None, lax.Precision.DEFAULT):
        return False
    stored = math.prod(problem.format.stored_shape(problem.rows, problem.cols, problem.block))
    if max(stored, problem.m * problem.deep * 4) > MOST_BYTES:
        return False
    if problem.format.blocked:  # values times scales are rounded once, to the type of x
        return (problem.block or 1) % 32 == 0 and problem.x_dtype == problem.out_dtype in (BF16, F16)
    return not problem.scaled_both_ways


def takes(problem: Problem) -> bool:
    """Can the kernel compute this product, and is it by rule the quickest one that can? Others need certain sizes."""
    rows = problem.m * (2 if _wide.doubles_rows(problem) else 1)
    most = MOST[problem.form] if problem.rows * problem.cols <= LARGE else MOST_LARGE
    if rows > most:
        return False
    if problem.form == "dot":
        few = rows <= FEW_IN_BLOCKS if problem.format.blocked else is_skinny(problem.fmt, rows, problem.cols)
        if few:
            return False
    return can_take(problem) and not _wide.can_take(problem)


@functools.lru_cache(maxsize=1024)
def cut(batch: int, m: int, outs: int, deep: int) -> Cut:
    """What the costs say is the quickest; blocks that have no stage are not counted."""
    stages, processors = -(-deep // DEEP), multiprocessors()
    width = width_for(m, COSTS)
    tiles = batch * -(-outs // OUTS) * -(-m // width)
    together, stage, block, cluster, at_once = COSTS[width]

    def cost(splits: int) -> float:
        each = -(-stages // splits)
        full, rest = divmod(tiles * splits, processors * at_once)
        blocks = full * at_once + -(-rest // processors)  # of one multiprocessor
        waves = full + (rest > 0)
        return each * (waves * together + blocks * stage) + blocks * block + splits * cluster * (splits > 1)

    splits = {-(-stages // -(-stages // count)) for count in range(1, min(MOST_SPLITS, stages) + 1)}
    return Cut(width, min(splits, key=lambda count: (cost(count), count)))
