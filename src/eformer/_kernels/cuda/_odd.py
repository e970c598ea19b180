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
from .tuning import BYTES, PACKED, is_skinny, multiprocessors

OUTS, DEEP = 64, 128  # of a block, of a stage
MOST_BYTES = (1 << 31) - 64  # of one matrix, of the rows of x for it
MOST_SPLITS = 8
MOST = 256  # rows of x, from which on decoding once and multiplying with cuBLAS is as quick


class Cut(NamedTuple):
    """Rows of x per block, and blocks that share a tile and add up their sums."""

    width: int
    splits: int


class Cost(NamedTuple):
    """Microseconds of a block, and of a stage of it; so many blocks share a multiprocessor."""

    block: float
    stage: float
    at_once: int


COSTS: Mapping[int, Cost] = MappingProxyType({16: Cost(1.5, 0.25, 3), 64: Cost(1.8, 0.4, 2), 128: Cost(2.5, 0.7, 2)})
CLUSTER = 0.1  # of every block in a cluster


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
    if problem.form == "dot" and is_skinny(problem.fmt, rows, problem.cols):
        return False
    return rows <= MOST and can_take(problem) and not _wide.can_take(problem)


@functools.lru_cache(maxsize=1024)
def cut(batch: int, m: int, outs: int, deep: int) -> Cut:
    stages, at_once = -(-deep // DEEP), multiprocessors()
    enough = min((width for width in COSTS if width >= m), default=max(COSTS))

    def cost(choice: Cut) -> float:
        width, splits = choice
        block, stage, _ = COSTS[width]
        blocks = batch * -(-outs // OUTS) * -(-m // width) * splits
        return block + -(-blocks // at_once) * -(-stages // splits) * stage + splits * CLUSTER

    return min((Cut(enough, splits) for splits in range(1, min(MOST_SPLITS, stages) + 1)), key=lambda c: (cost(c), c))
