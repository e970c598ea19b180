"""Products that round x to 8 bits: which are taken, and how they are cut up for Hopper's kernel (csrc/cuda/bytes.cuh).

`outs` are the results of one row of x, `deep` is the contracted axis.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from ..parameters import Problem
from .tuning import width_for

OUTS, DEEP = 128, 128  # of a block, of a stage
ROUNDED = MappingProxyType({"int8": "int8", "fp8_e4m3": "fp8"})  # codes of weights, and of x
MOST_DEEP = 1 << 17  # products of integers whose sum int32 holds
# Rows of x, and values of a matrix in the axpy form, up to which XLA's product of int8 is quicker.
MOST_XLA, LARGEST_XLA = 64, 1 << 24


def refuses(problem: Problem) -> str | None:
    """Why no kernel takes a product that rounds x, whatever the GPU; None means that there is one."""
    if problem.format.blocked:
        return f"{problem.fmt} has scales of blocks, and it takes one per result: rounded rows are multiplied as floats"
    if ROUNDED.get(problem.fmt) != problem.activations:
        return f"it multiplies int8 with int8 and e4m3 with e4m3, not {problem.fmt} with {problem.activations}"
    if not problem.scales_results_only:
        return "scales differ along what is summed up"
    if problem.cols % 16:
        return f"rows of {problem.cols} bytes; it takes multiples of 16"
    if problem.fmt == "int8" and (problem.cols if problem.form == "dot" else problem.rows) > MOST_DEEP:
        return f"sums of more than {MOST_DEEP} products do not fit int32"
    return None


def slower(problem: Problem) -> str | None:
    """Why a product that the kernel takes is better left to XLA: of one matrix, which that does not have to copy."""
    small = problem.form == "dot" or (problem.m > 1 and problem.rows * problem.cols <= LARGEST_XLA)
    if problem.fmt != "int8" or problem.batch or problem.m > MOST_XLA or not small:
        return None
    return f"XLA's own product of int8 is quicker with {problem.m} rows of x"


class Cut(NamedTuple):
    """Rows of x per block, and blocks that share a tile and add up their sums."""

    width: int
    splits: int


class Cost(NamedTuple):
    """Microseconds of a tile, and of a stage of it."""

    tile: float
    stage: float


# By rows of x per block, for an H200.
COSTS: Mapping[int, Cost] = MappingProxyType(
    {16: Cost(4.0, 0.25), 64: Cost(4.0, 0.30), 128: Cost(4.5, 0.44), 256: Cost(5.0, 0.70)}
)
CLUSTER = Cost(2.0, 0.03)  # of adding up, and of a row of x in it
# Blocks that run at once, by the size of the cluster.
AT_ONCE = MappingProxyType({1: 132, 2: 132, 3: 120, 4: 112})


@functools.lru_cache(maxsize=1024)
def cut(batch: int, m: int, outs: int, deep: int) -> Cut:
    stages = -(-deep // DEEP)

    def tiles(width: int) -> int:
        return batch * -(-outs // OUTS) * -(-m // width)

    def cost(choice: Cut) -> float:
        width, splits = choice
        added = CLUSTER.tile + width * CLUSTER.stage if splits > 1 else 0.0
        one = COSTS[width].tile + -(-stages // splits) * COSTS[width].stage + added
        return one * -(-tiles(width) * splits // AT_ONCE[splits])

    enough = width_for(m, COSTS)
    cuts = [Cut(width, 1) for width in COSTS if width <= enough]
    # Splits are for matrices that leave multiprocessors idle.
    few = [c.width for c in cuts if tiles(c.width) < AT_ONCE[1]]
    cuts += [Cut(w, s) for w in few for s in AT_ONCE if 1 < s <= stages // 4 and tiles(w) * s <= AT_ONCE[s]]
    return min(cuts, key=lambda choice: (cost(choice), choice))
