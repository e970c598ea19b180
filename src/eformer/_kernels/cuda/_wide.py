"""Which products are for the kernel of csrc/cuda/wide.cuh, and how they are cut up for it.

It multiplies with the matrix unit of Hopper (compute capability 9.0), in both forms. `outs` are the results of one row
of x, `deep` is the contracted axis.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from jax import lax

from ..formats import FORMATS
from ..native import BF16, F16, F32
from ..parameters import Problem
from .tuning import BYTE_BLOCKS, BYTES, capability, width_for

FEWEST = 17  # rows of x in the dot form
FEWEST_SMALL = 9  # where the kernel of csrc/cuda/skinny.cuh is slower
# Values of such a matrix.
SMALL: Mapping[str, int] = MappingProxyType({"nf4": 1 << 24} | dict.fromkeys(BYTES, 1 << 26))
LONG = MappingProxyType({"nf4": 8192})  # or more columns than these
# Rows of x from which on decoding once and multiplying with cuBLAS is as quick; for NF4 as sums of two bf16, earlier.
MOST, MOST_SUMS = 4096, 256
# The costs decide from 257 rows on for large matrices of so many values, from 1025 on for small ones.
LARGE, LARGE_M, SMALL_M = 1 << 22, 256, 1024
# Microseconds of decoding first: two calls, a million values (bytes with no scales of blocks take longer), a million
# multiplications.
CALLS, DECODING, MULTIPLYING = 3.0, 0.9, 0.00278
DECODING_BYTES = MappingProxyType({"dot": 1.16, "axpy": 2.1})
# What fused products take instead of what the tables below say: bytes with scales of blocks; zero points and biases.
BLOCKS_OF_BYTES, OFFSETS = 1.2, 1.1


class Cut(NamedTuple):
    """Rows of x and outs per block, and blocks that share a tile and add up their sums.

    `rest` tiles that would leave most of the chip idle are launched behind the others, in splits of their own.
    """

    width: int
    outs: int
    splits: int
    rest: int = 0
    rest_splits: int = 1


class Cost(NamedTuple):
    """Microseconds of a block, and of 64 columns in it."""

    block: float
    step: float


# (rows of x, outs) per block, fitted to times on an H200, by what a column costs: a lookup, or arithmetic.
DOT: Mapping[tuple[int, int], Cost] = MappingProxyType(
    {
        (16, 128): Cost(2.5, 0.27), (16, 64): Cost(1.5, 0.185), (32, 128): Cost(4.0, 0.275),
        (32, 64): Cost(2.2, 0.187), (64, 128): Cost(5.0, 0.29), (64, 64): Cost(3.0, 0.195),
        (128, 128): Cost(4.8, 0.43), (128, 64): Cost(3.4, 0.225), (256, 128): Cost(7.0, 0.64),
    }
)  # fmt: skip
DOT_BLOCKS: Mapping[tuple[int, int], Cost] = MappingProxyType(
    {
        (16, 128): Cost(4.0, 0.268), (16, 64): Cost(2.6, 0.165), (32, 128): Cost(4.8, 0.279),
        (32, 64): Cost(3.0, 0.168), (64, 128): Cost(6.1, 0.302), (64, 64): Cost(3.9, 0.183),
        (128, 128): Cost(7.6, 0.516), (128, 64): Cost(6.6, 0.254), (256, 128): Cost(6.4, 0.824),
    }
)  # fmt: skip
AXPY: Mapping[tuple[int, int], Cost] = MappingProxyType(
    {
        (16, 256): Cost(1.0, 0.46), (16, 128): Cost(2.8, 0.22), (32, 256): Cost(1.0, 0.49),
        (32, 128): Cost(2.5, 0.26), (64, 256): Cost(6.6, 0.50), (64, 128): Cost(4.9, 0.28),
        (128, 256): Cost(9.2, 0.665), (128, 128): Cost(7.1, 0.35), (128, 64): Cost(5.5, 0.22),
    }
)  # fmt: skip
AXPY_BYTES: Mapping[tuple[int, int], Cost] = MappingProxyType(
    AXPY
    | {
        (128, 256): Cost(5.1, 0.857), (128, 128): Cost(3.9, 0.451), (128, 64): Cost(5.9, 0.228),
        (256, 128): Cost(6.8, 0.826),
    }
)  # fmt: skip
AXPY_BLOCKS: Mapping[tuple[int, int], Cost] = MappingProxyType(
    {
        (16, 256): Cost(3.4, 0.532), (16, 128): Cost(3.8, 0.295), (32, 256): Cost(5.7, 0.555),
        (32, 128): Cost(5.3, 0.298), (64, 256): Cost(5.5, 0.693), (64, 128): Cost(5.2, 0.358),
        (128, 256): Cost(5.4, 1.177), (128, 128): Cost(6.2, 0.555), (128, 64): Cost(5.5, 0.289),
        (256, 128): Cost(8.6, 0.833),
    }
)  # fmt: skip
CLUSTER_COST = 1.7
# Blocks that run at once, by the size of the cluster: a cluster lies within a part of the chip.
AT_ONCE = MappingProxyType({1: 132, 2: 132, 3: 117, 4: 120})


def has_wgmma() -> bool:
    return capability() == "9.0"


def is_float32(problem: Problem) -> bool:
    """Is the dense product one of float32? Then weights must not be rounded to 16 bits."""
    return F32 in (problem.x_dtype, problem.out_dtype)


def scales_x(problem: Problem) -> bool:
    """Does a scale run along the contracted axis?"""
    if problem.format.blocked or problem.scale_shape is None:
        return False
    return problem.scale_shape[-1 if problem.form == "dot" else -2] != 1


def doubles_rows(problem: Problem) -> bool:
    """Does x become the sum of two bfloat16? One does for a scaled x whose product is bfloat16 anyway.

    NF4 in f16 would lose small and large weights of a float32 product.
    """
    if scales_x(problem) and problem.x_dtype == problem.out_dtype == BF16:
        return False
    half = problem.fmt == "nf4" and problem.x_dtype == F16 and is_float32(problem)
    return problem.x_dtype == F32 or half or scales_x(problem)


def can_take(problem: Problem) -> bool:
    """Can the wide kernel compute this product?"""
    if is_float32(problem) and problem.precision not in (None, lax.Precision.DEFAULT):
        return False
    if problem.deep % 8 or not has_wgmma():  # x in rows of 16 bytes
        return False
    if problem.format.blocked:
        return _takes_blocks(problem)
    return problem.cols % (16 * problem.format.per_code) == 0 and not problem.scaled_both_ways


def _takes_blocks(problem: Problem) -> bool:
    """Values and scales are multiplied in float32, or, where they are exact in it, in bfloat16. So are zero points.

    Bytes in blocks have that of bfloat16 alone, and none for offsets.
    """
    block, kinds = problem.block or 1, (problem.x_dtype, problem.out_dtype)
    if problem.fmt in BYTE_BLOCKS:
        return kinds == (BF16, BF16) and block % 32 == 0 and problem.offset is None
    if not problem.format.in_nibbles:
        return False
    if problem.fmt == "nf4":
        return block % 64 == 0
    if kinds == (BF16, BF16) and (problem.offset is None or problem.offset == np.uint8):
        return block % 32 == 0
    return block % 64 == 0 and kinds not in ((BF16, F16), (F16, F32))


def takes(problem: Problem) -> bool:
    """Can the wide kernel compute this product, and is it by rule the quickest one that can?"""
    rows = problem.m * (2 if doubles_rows(problem) else 1)
    most = MOST_SUMS if problem.format.in_nibbles and is_float32(problem) else MOST
    small = problem.rows * problem.cols <= SMALL.get(problem.fmt, 0)
    small = small or problem.cols > LONG.get(problem.fmt, problem.cols)
    fewest = 1 if problem.form == "axpy" else FEWEST_SMALL if small else FEWEST
    if not fewest <= rows <= most or not can_take(problem):
        return False
    large = problem.rows * problem.cols > LARGE
    return rows <= (LARGE_M if large else SMALL_M) or _beats_decoding(problem, rows)


class Kind(NamedTuple):
    """What decides which tiles there are."""

    fmt: str
    form: str
    shifted: bool = False  # it has offsets
    sums: bool = False  # values of 4 bits become sums of two bfloat16


def kind_of(problem: Problem) -> Kind:
    sums = problem.format.in_nibbles and is_float32(problem)
    return Kind(problem.fmt, problem.form, problem.offset is not None, sums)


@functools.cache
def costs_of(kind: Kind) -> Mapping[tuple[int, int], Cost]:
    """Costs of the tiles there are for it, see csrc/cuda/wide_launch.cuh."""
    if FORMATS[kind.fmt].in_nibbles:
        costs = DOT_BLOCKS if kind.form == "dot" else AXPY_BLOCKS
    elif kind.form == "dot":
        costs = DOT
    else:
        costs = AXPY_BYTES if kind.fmt in (*BYTES, *BYTE_BLOCKS) else AXPY
    no_small = kind.form == "axpy" and (kind.shifted or kind.sums or kind.fmt == "binary")
    missing = {(128, 64)} if no_small else set()
    missing |= {(256, 128)} if kind.sums else set()
    return MappingProxyType({tile: cost for tile, cost in costs.items() if tile not in missing})


def _beats_decoding(problem: Problem, rows: int) -> bool:
    matrices, values = math.prod(problem.batch), problem.rows * problem.cols / 1e6
    fused, _ = planned(kind_of(problem), matrices, rows, problem.outs, problem.deep)
    fused *= BLOCKS_OF_BYTES if problem.fmt in BYTE_BLOCKS else 1.0 if problem.offset is None else OFFSETS
    decoding = DECODING_BYTES[problem.form] if problem.fmt in BYTES else DECODING
    return fused <= matrices * (CALLS + values * (decoding + rows * MULTIPLYING))


def cut(kind: Kind, batch: int, m: int, outs: int, deep: int) -> Cut:
    return planned(kind, batch, m, outs, deep)[1]


@functools.lru_cache(maxsize=1024)
def planned(kind: Kind, batch: int, m: int, outs: int, deep: int) -> tuple[float, Cut]:
    """Microseconds by the table, and the cut that takes them."""
    costs, steps = costs_of(kind), -(-deep // 64)
    enough = width_for(m, (width for width, _ in costs))
    widths = {enough, 128} if enough > 128 else {enough}

    def tiles(choice: Cut) -> int:
        return -(-outs // choice.outs) * -(-m // choice.width) * batch

    def wave(choice: Cut, splits: int) -> float:
        block, step = costs[choice.width, choice.outs]
        return block + -(-steps // splits) * step + (CLUSTER_COST if splits > 1 else 0.0)

    def cost(choice: Cut) -> float:
        waves = -(-(tiles(choice) - choice.rest) * choice.splits // AT_ONCE[choice.splits])
        return waves * wave(choice, choice.splits) + (wave(choice, choice.rest_splits) if choice.rest else 0.0)

    cuts = [Cut(w, o, s) for w, o in costs if w in widths for s in AT_ONCE if s <= max(steps // 8, 1)]
    for whole in [c for c in cuts if c.splits == 1 and batch == 1 and tiles(c) > AT_ONCE[1]]:
        rest = tiles(whole) % AT_ONCE[1]
        cuts += [
            whole._replace(rest=rest, rest_splits=s)
            for s in AT_ONCE
            if 1 < s <= steps // 8 and 0 < rest * s <= AT_ONCE[s]
        ]
    return min((cost(choice), choice) for choice in cuts)
