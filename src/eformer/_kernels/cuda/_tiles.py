"""Products that round x to 8 bits, on other GPUs than Hopper: csrc/cuda/tiles.cuh, and how they are cut up for it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

from ..parameters import Problem
from ._bytes import DEEP, OUTS, Cost, Cut
from .tuning import capability, multiprocessors, width_for

MOST_CONVERTED = 128  # rows of x up to which codes of e4m3 are converted to float16
# By rows of x per block: microseconds of a tile, and of a stage of it. Counted for an A100, not measured.
COSTS: Mapping[int, Cost] = MappingProxyType({16: Cost(3.0, 1.3), 64: Cost(3.0, 1.4), 128: Cost(3.0, 1.8)})
MOST_SPLITS = 8
SUMMING, RESULT = 3.0, 5e-6  # of the second kernel, and of one result of one split


def refuses(problem: Problem) -> str | None:
    """Why, of products that `_bytes.refuses` does not refuse; None means that the kernel takes it."""
    major, _, minor = capability().partition(".")
    here = int(major or 0), int(minor or 0)
    multiplies_float8 = here == (8, 9) or here >= (12, 0)  # others by instructions that the kernel does not have
    if problem.fmt != "int8" and not multiplies_float8 and problem.m > MOST_CONVERTED:
        return (
            f"with compute capability {capability()} it converts e4m3 to float16, and more than {MOST_CONVERTED} rows "
            "of x are left to XLA"
        )
    return None


@functools.lru_cache(maxsize=1024)
def cut(batch: int, m: int, outs: int, deep: int) -> Cut:
    """Rows of x per block, and blocks that share a tile, whose sums a second kernel adds up."""
    stages, at_once = -(-deep // DEEP), multiprocessors()

    def tiles(width: int) -> int:
        return batch * -(-outs // OUTS) * -(-m // width)

    def cost(choice: Cut) -> float:
        width, splits = choice
        added = SUMMING + splits * batch * m * outs * RESULT if splits > 1 else 0.0
        one = COSTS[width].tile + -(-stages // splits) * COSTS[width].stage
        return one * -(-tiles(width) * splits // at_once) + added

    enough = width_for(m, COSTS)
    most = min(MOST_SPLITS, max(stages // 4, 1))
    cuts = [Cut(w, s) for w in COSTS if w <= enough for s in range(1, most + 1) if s == 1 or tiles(w) < 2 * at_once]
    return min(cuts, key=lambda choice: (cost(choice), choice))
