"""The error of a quantized leaf in the products it takes part in."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from eformer._quantize.statistics import LeafStatistics
from eformer.errors import CalibrationError


def error_of(w: jax.Array, stats: LeafStatistics | None, path: str) -> Callable[[jax.Array], float]:
    """A function of quantized values: their error in products, relative to these; the largest of several uses."""
    if stats is None:
        return lambda q: float(_plain(q, w))
    if tuple(stats.shape) != tuple(w.shape):
        raise CalibrationError(
            f"{path!r} has shape {tuple(w.shape)}, but the statistics are of one of shape {tuple(stats.shape)}: they "
            "are of another model."
        )
    uses = stats.uses
    moments = [jnp.asarray(np.asarray(use.diagonal if use.moment is None else use.moment, np.float32)) for use in uses]

    def error(q: jax.Array) -> float:
        found = [
            float(_weighted(q, w, moment, use.axes, use.stack, use.moment is None))
            for use, moment in zip(uses, moments, strict=True)
        ]
        return max([*found, float(_plain(q, w))] if len(found) > 1 else found)

    return error


@jax.jit
def _plain(q: jax.Array, w: jax.Array) -> jax.Array:
    w = w.astype(jnp.float32)
    return _quotient(jnp.sum(jnp.square(q.astype(jnp.float32) - w)), jnp.sum(jnp.square(w)))


def _quotient(noise: jax.Array, signal: jax.Array) -> jax.Array:
    return jnp.where(noise == 0, 0.0, noise / jnp.where(signal == 0, 1.0, signal))


@functools.partial(jax.jit, static_argnames=("axes", "stack", "diagonal"))
def _weighted(
    q: jax.Array, w: jax.Array, moment: jax.Array, axes: tuple[int, ...], stack: tuple[int, ...], diagonal: bool
) -> jax.Array:
    def matrices(a: jax.Array) -> jax.Array:
        """(stack, K, N)."""
        kept = [i for i in range(a.ndim) if i not in (*axes, *stack)]
        moved = jnp.transpose(a.astype(jnp.float32), (*stack, *axes, *kept))
        sizes = [math.prod(a.shape[i] for i in some) for some in (stack, axes, kept)]
        return moved.reshape(sizes)

    def energy(a: jax.Array) -> jax.Array:
        if diagonal:
            return jnp.sum(jnp.square(a) * moment.reshape(*a.shape[:2], 1))
        h = moment.reshape(*a.shape[:2], a.shape[1])
        return jnp.sum(a * jnp.einsum("skj,sjn->skn", h, a, precision="highest"))

    w = matrices(w)
    return _quotient(energy(matrices(q) - w), energy(w))
