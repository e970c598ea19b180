"""Consecutive groups of rows cut into tiles of one height, so that every tile belongs to one group."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Tiles:
    """`group` (tiles,) is the group of every tile, `used` (1,) how many tiles have rows, and `rows` (tiles, height) the
    rows of x in each, m where there is none. `position` (m,) is where a row of x went, `valid` (m,) whether a group has
    it at all."""

    group: Any
    used: Any
    rows: Any
    position: Any
    valid: Any


def cut(sizes: jax.Array, m: int, height: int) -> Tiles:
    """As many tiles as groups of any sizes need to hold m rows: m / height, and one more for every group with rows."""
    sizes, groups = sizes.astype(jnp.int32), sizes.shape[0]
    count = -(-m // height) + min(groups, m)
    tiles = -(-sizes // height)
    last_tile, last_row = jnp.cumsum(tiles), jnp.cumsum(sizes)
    first_tile, first_row = last_tile - tiles, last_row - sizes
    used = last_tile[-1:]
    # A tile that is not used has the matrix of the last one that is: nothing new is read for it.
    number = jnp.arange(count, dtype=jnp.int32)
    last = jnp.minimum(number, jnp.maximum(used - 1, 0))
    group = jnp.minimum(jnp.searchsorted(last_tile, last, side="right"), groups - 1).astype(jnp.int32)
    start = first_row[group] + (number - first_tile[group]) * height
    rows = start[:, None] + jnp.arange(height, dtype=jnp.int32)[None]
    inside = (rows < last_row[group][:, None]) & (number < used)[:, None]
    row = jnp.arange(m, dtype=jnp.int32)
    owner = jnp.minimum(jnp.searchsorted(last_row, row, side="right"), groups - 1)
    position = first_tile[owner] * height + row - first_row[owner]
    valid = row < last_row[-1]
    return Tiles(group, used, jnp.where(inside, rows, m), jnp.where(valid, position, 0), valid)


def joined(tiles: Tiles, y: jax.Array) -> jax.Array:
    """The rows of all tiles (tiles, height, N), in the order of x; rows after the last group are zeros."""
    rows = y.reshape(-1, y.shape[-1])[tiles.position]
    return jnp.where(tiles.valid[:, None], rows, jnp.zeros((), y.dtype))
