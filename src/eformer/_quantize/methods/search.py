"""The scale of every block: of some candidates, the one with the least weighted error."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .grids import Grid, Zero

REFITS = 2
REFITS_OF_TWO = 4  # where zero points are fitted as well


def search(grid: Grid, x: jax.Array, weights: jax.Array, axis: int, power: float) -> tuple[jax.Array, Zero]:
    """Scales, and zero points where the grid has some, for blocks along `axis`, which the result lacks.

    Minimizes the sum of `weights * |error| ** power` over the candidates of the grid; the best one is then moved to the
    least squares for the codes it gives, as long as that helps.
    """

    def error(scale: jax.Array, zero: Zero) -> tuple[jax.Array, jax.Array]:
        wide, from_zero = jnp.expand_dims(scale, axis), None if zero is None else jnp.expand_dims(zero, axis)
        codes = grid.codes(x, wide, from_zero)
        off = jnp.abs(x - grid.values(codes, wide, from_zero))
        return jnp.sum(weights * (jnp.square(off) if power == 2 else off**power), axis=axis), codes

    def better(best: Any, scale: jax.Array, zero: Zero) -> Any:
        loss = error(scale, zero)[0]
        return jax.tree.map(functools.partial(jnp.where, loss < best[0]), (loss, scale, zero), best)

    def attempt(best: Any, ratio: jax.Array) -> tuple[Any, None]:
        scale, zero = grid.propose(begun, ratio)
        return better(best, grid.snap(scale), zero), None

    def refit(best: Any, _: Any) -> tuple[Any, None]:
        _, scale, zero = best
        units = grid.units(error(scale, zero)[1], None if zero is None else jnp.expand_dims(zero, axis))
        unit, value = map(mean, (units, x))
        units, values = (a - jnp.expand_dims(m, axis) for a, m in ((units, unit), (x, value)))
        squares = jnp.sum(weights * units * units, axis=axis)
        fitted = jnp.sum(weights * units * values, axis=axis) / jnp.where(squares == 0, 1, squares)
        fitted = grid.snap(jnp.where(squares == 0, scale, fitted))
        if zero is not None:
            zero = grid.snap_zero(fitted, zero + unit - value / jnp.where(fitted == 0, 1, fitted))
        return better(best, fitted, zero), None

    def mean(a: jax.Array) -> jax.Array:
        """Where a line is fitted through; 0 where it has to go through 0."""
        total = jnp.sum(jnp.broadcast_to(weights, x.shape), axis=axis)
        return jnp.sum(weights * a, axis=axis) / total if grid.fits_zero else jnp.zeros_like(total)

    begun = grid.begin(x, weights, axis)
    scale, zero = grid.propose(begun, 1.0)
    scale = grid.snap(scale)
    best = (error(scale, zero)[0], scale, zero)
    if len(grid.ratios) > 1:
        best, _ = lax.scan(attempt, best, jnp.asarray(grid.ratios, jnp.float32))
    best, _ = lax.scan(refit, best, None, length=REFITS_OF_TWO if grid.fits_zero else REFITS)
    return best[1], best[2]
