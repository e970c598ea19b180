"""Which products are for the kernel of csrc/cuda/wide.cuh, and how they are cut up for it.

It multiplies with the matrix unit of Hopper (compute capability 9.0), in both forms. `outs` are the results of one row
of x, `deep` is the contracted axis.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
from jax import lax

from ..limits import F32
from ..parameters import Problem

FEWEST = MappingProxyType({"dot": 17, "axpy": 1})  # rows of x
SMALL, FEWEST_SMALL = 1 << 26, 9  # values of an INT8 matrix up to which it is quicker from 9 rows of x on
MOST = 1024  # from here on, decoding once and multiplying with cuBLAS is as quick


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


@functools.cache
def has_wgmma() -> bool:
    """Asked of the first GPU; without one, a program is being lowered for later."""
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return True
    return getattr(device, "compute_capability", "") == "9.0"


def takes(problem: Problem) -> bool:
    """Can the wide kernel compute this product, and is it the quickest one that can?"""
    doubled = problem.x_dtype == F32  # becomes two numbers of 16 bits
    if doubled and problem.precision not in (None, lax.Precision.DEFAULT):
        return False
    rows = problem.m * (2 if doubled else 1)
    deep = problem.cols if problem.form == "dot" else problem.rows
    small = problem.fmt == "int8" and problem.form == "dot" and problem.rows * problem.cols <= SMALL
    fewest = FEWEST_SMALL if small else FEWEST[problem.form]
    if not fewest <= rows <= MOST or deep % 8 or not has_wgmma():  # x in rows of 16 bytes
        return False
    if problem.fmt == "nf4":
        return (problem.block or 0) % 64 == 0
    return problem.cols % (16 * problem.format.per_code) == 0 and not problem.scaled_both_ways


def costs_of(fmt: str, form: str) -> Mapping[tuple[int, int], Cost]:
    return DOT if form == "dot" else AXPY_NF4 if fmt == "nf4" else AXPY


@functools.lru_cache(maxsize=1024)
def cut(fmt: str, form: str, batch: int, m: int, outs: int, deep: int) -> Cut:
    """The quickest by the table."""
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
