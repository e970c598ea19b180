"""Mixture of experts: groups of rows cut into tiles of one height, each tile times the matrix of its group.

The kernel is that of every product. The matrix of a tile is a scalar it knows before the tile starts, so the codes of
the next expert arrive while this one is computed; experts without rows are never read.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..parameters import Problem
from ._products import product

# Rows of a tile: enough to fill the registers of bfloat16, few enough not to waste work on the ends of groups.
_LEAST, _MOST = 16, 256


@dataclasses.dataclass(frozen=True)
class Tiles:
    """`group` (tiles,) and `used` (1,) are for the kernel; `rows` (tiles, height) are the rows of x in each tile, m
    where there is none; `position` (m,) is where a row of x went, `valid` (m,) whether a group has it at all."""

    group: Any
    used: Any
    rows: Any
    position: Any
    valid: Any


def qragged(
    problem: Problem,
    x: jax.Array,
    codes: jax.Array,
    group_sizes: jax.Array,
    scale: jax.Array | None,
    *,
    interpret: Any = False,
) -> jax.Array:
    tiles = cut(group_sizes.astype(jnp.int32), x.shape[0])
    parts = x.at[tiles.rows].get(mode="fill", fill_value=0)
    y = product(problem, parts, codes, scale, (tiles.group, tiles.used), interpret=interpret)
    y = y.reshape(-1, y.shape[-1])[tiles.position]
    return jnp.where(tiles.valid[:, None], y, jnp.zeros((), y.dtype))


def height_of(m: int, groups: int) -> int:
    average = 1 << (max(m // groups, 1) - 1).bit_length()
    return int(np.clip(average, _LEAST, _MOST))


def cut(sizes: jax.Array, m: int) -> Tiles:
    """A static number of tiles: groups of unknown sizes need at most m / height + (groups that can have rows)."""
    groups = sizes.shape[0]
    height = height_of(m, groups)
    count = -(-m // height) + min(groups, m)
    tiles = -(-sizes // height)
    last_tile, last_row = jnp.cumsum(tiles), jnp.cumsum(sizes)
    first_tile, first_row = last_tile - tiles, last_row - sizes
    used = last_tile[-1:]
    # A tile that is not used has the matrix of the last one that is: nothing new is read for it.
    number = jnp.minimum(jnp.arange(count, dtype=jnp.int32), jnp.maximum(used - 1, 0))
    group = jnp.minimum(jnp.searchsorted(last_tile, number, side="right"), groups - 1).astype(jnp.int32)
    start = first_row[group] + (jnp.arange(count, dtype=jnp.int32) - first_tile[group]) * height
    rows = start[:, None] + jnp.arange(height, dtype=jnp.int32)
    inside = (rows < last_row[group][:, None]) & (jnp.arange(count) < used)[:, None]
    row = jnp.arange(m, dtype=jnp.int32)
    owner = jnp.minimum(jnp.searchsorted(last_row, row, side="right"), groups - 1)
    position = first_tile[owner] * height + row - first_row[owner]
    valid = row < last_row[-1]
    return Tiles(group, used, jnp.where(inside, rows, m), jnp.where(valid, position, 0), valid)
