"""Mixture of experts: groups of rows cut into tiles of one height, each tile times the matrix of its group.

The kernel is that of every product. The matrix of a tile is a scalar it knows before the tile starts, so the codes of
the next expert arrive while this one is computed; experts without rows are never read.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ..group_tiles import cut, joined
from ..parameters import Problem
from ._products import product

# Rows of a tile: enough to fill the registers of bfloat16, few enough not to waste work on the ends of groups.
_LEAST, _MOST = 16, 256


def qragged(
    problem: Problem,
    x: jax.Array,
    codes: jax.Array,
    group_sizes: jax.Array,
    scale: jax.Array | None,
    *,
    interpret: Any = False,
) -> jax.Array:
    tiles = cut(group_sizes, x.shape[0], height_of(x.shape[0], group_sizes.shape[0]))
    parts = x.at[tiles.rows].get(mode="fill", fill_value=0)
    y = product(problem, parts, codes, scale, (tiles.group, tiles.used), interpret=interpret)
    return joined(tiles, y)


def height_of(m: int, groups: int) -> int:
    average = 1 << (max(m // groups, 1) - 1).bit_length()
    return int(np.clip(average, _LEAST, _MOST))
