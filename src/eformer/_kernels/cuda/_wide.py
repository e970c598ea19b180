"""Which products are for the kernel of csrc/cuda/wide.cuh, and how they are cut up for it.

It multiplies with the matrix unit of Hopper (compute capability 9.0), in both forms. `outs` are the results of one row
of x, `deep` is the contracted axis.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from jax import lax

from ..native import BF16, F16, F32
from ..parameters import Problem
from .tuning import capability

FEWEST = 17  # rows of x in the dot form
FEWEST_SMALL = 9  # where the kernel of csrc/cuda/skinny.cuh is slower
SMALL = MappingProxyType({"int8": 1 << 26, "nf4": 1 << 24})  # values of such a matrix
LONG = MappingProxyType({"nf4": 8192})  # or more columns than these
# Rows of x from which on decoding once and multiplying with cuBLAS is as quick; for NF4 as sums of two bf16, earlier.
MOST, MOST_SUMS = 1024, 256


class Cut(NamedTuple):
    """Rows of x and outs per block, and blocks that share a tile and add up their sums."""

    width: int
    outs: int
    splits: int


class Cost(NamedTuple):
    """Microseconds of a block, and of 64 columns in it."""

    block: float
    step: float


# (rows of x, outs) per block, fitted to times on an H200. In the dot form all formats are within 15 % of NF4.
DOT: Mapping[tuple[int, int], Cost] = MappingProxyType(
    {
        (16, 128): Cost(5.2, 0.21), (16, 64): Cost(3.0, 0.15), (32, 128): Cost(5.5, 0.233), (32, 64): Cost(3.1, 0.155),
        (64, 128): Cost(6.2, 0.267), (64, 64): Cost(3.5, 0.175), (128, 128): Cost(5.4, 0.424),
        (128, 64): Cost(4.3, 0.219), (256, 128): Cost(7.0, 0.669),
    }
)  # fmt: skip
AXPY: Mapping[tuple[int, int], Cost] = MappingProxyType(
    {
        (16, 256): Cost(1.0, 0.46), (16, 128): Cost(2.8, 0.22), (32, 256): Cost(1.0, 0.49), (32, 128): Cost(2.5, 0.26),
        (64, 256): Cost(2.8, 0.533), (64, 128): Cost(5.5, 0.265), (128, 256): Cost(7.6, 0.675),
        (128, 128): Cost(6.9, 0.35),
    }
)  # fmt: skip
AXPY_NF4: Mapping[tuple[int, int], Cost] = MappingProxyType(
    {
        (16, 256): Cost(4.2, 0.55), (16, 128): Cost(1.9, 0.37), (32, 256): Cost(4.2, 0.586), (32, 128): Cost(1.9, 0.39),
        (64, 256): Cost(5.9, 0.65), (64, 128): Cost(5.3, 0.387), (128, 256): Cost(10.0, 0.845),
        (128, 128): Cost(7.1, 0.44),
    }
)  # fmt: skip
CLUSTER_COST = 1.5
# Blocks that run at once, by the size of the cluster: a cluster lies within a part of the chip.
AT_ONCE = MappingProxyType({1: 132, 2: 132, 3: 120, 4: 112})


def has_wgmma() -> bool:
    return capability() == "9.0"


def is_float32(problem: Problem) -> bool:
    """Is the dense product one of float32? Then weights must not be rounded to 16 bits."""
    return F32 in (problem.x_dtype, problem.out_dtype)


def scales_x(problem: Problem) -> bool:
    """Does a scale run along the contracted axis?"""
    if problem.fmt == "nf4" or problem.scale_shape is None:
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


def takes(problem: Problem) -> bool:
    """Can the wide kernel compute this product, and is it the quickest one that can?"""
    if is_float32(problem) and problem.precision not in (None, lax.Precision.DEFAULT):
        return False
    rows = problem.m * (2 if doubles_rows(problem) else 1)
    most = MOST_SUMS if problem.fmt == "nf4" and is_float32(problem) else MOST
    deep, fmt = problem.cols if problem.form == "dot" else problem.rows, problem.fmt
    small = problem.rows * problem.cols <= SMALL.get(fmt, 0) or problem.cols > LONG.get(fmt, problem.cols)
    fewest = 1 if problem.form == "axpy" else FEWEST_SMALL if small else FEWEST
    if not fewest <= rows <= most or deep % 8 or not has_wgmma():  # x in rows of 16 bytes
        return False
    if problem.fmt == "nf4":
        return (problem.block or 0) % 64 == 0
    return problem.cols % (16 * problem.format.per_code) == 0 and not problem.scaled_both_ways


def costs_of(fmt: str, form: str) -> Mapping[tuple[int, int], Cost]:
    return DOT if form == "dot" else AXPY_NF4 if fmt == "nf4" else AXPY


@functools.lru_cache(maxsize=1024)
def cut(fmt: str, form: str, batch: int, m: int, outs: int, deep: int) -> Cut:
    costs, steps = costs_of(fmt, form), -(-deep // 64)
    enough = min((width for width, _ in costs if width >= m), default=max(width for width, _ in costs))
    widths = {enough, 128} if enough > 128 else {enough}

    def cost(choice: Cut) -> float:
        block, step = costs[choice.width, choice.outs]
        blocks = -(-outs // choice.outs) * -(-m // choice.width) * batch * choice.splits
        waves = -(-blocks // AT_ONCE[choice.splits])
        return waves * (block + -(-steps // choice.splits) * step + (CLUSTER_COST if choice.splits > 1 else 0.0))

    choices = [Cut(w, o, s) for w, o in costs if w in widths for s in AT_ONCE if s <= max(steps // 8, 1)]
    return min(choices, key=lambda choice: (cost(choice), choice))
