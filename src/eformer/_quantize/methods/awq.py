"""AWQ: inputs that carry much are made larger in the weights before rounding, and smaller again in the product.

The factor of a channel is `activity ** alpha` (Lin et al., 2023), activity being the root of its mean square. Of some
alphas the one that leaves the least error of the outputs is taken, for every matrix of a stack. Matrices that share
their inputs, such as those of queries, keys and values, may share factors: then all their outputs count.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..config import QuantizationConfig, quantize_stack
from .matrices import importance, output_error

ALPHAS = tuple(i / 12 for i in range(1, 13))


@functools.partial(jax.jit, static_argnames=("configs",))
def factors(
    diagonal: jax.Array, moment: jax.Array | None, *weights: jax.Array, configs: tuple[QuantizationConfig, ...]
) -> jax.Array:
    """The factors (S, K) to multiply into the rows of all matrices (S, K, N); 1 where nothing is better."""
    activity = jnp.sqrt(importance(diagonal))

    def loss(factor: jax.Array) -> jax.Array:
        return sum(map(functools.partial(error, factor), weights, configs), jnp.zeros(len(factor)))

    def error(factor: jax.Array, w: jax.Array, config: QuantizationConfig) -> jax.Array:
        rounded = quantize_stack(w * factor[..., None], config, 1).materialize()
        off = rounded / factor[..., None] - w
        return jnp.sum(off * off * diagonal[..., None], axis=(-2, -1)) if moment is None else output_error(moment, off)

    def attempt(best: tuple[jax.Array, jax.Array], alpha: jax.Array) -> tuple[Any, None]:
        factor = activity**alpha
        ends = jnp.max(factor, axis=-1, keepdims=True) * jnp.min(factor, axis=-1, keepdims=True)
        factor = factor / jnp.sqrt(ends)
        found = loss(factor)
        better = found < best[0]
        return (jnp.where(better, found, best[0]), jnp.where(better[:, None], factor, best[1])), None

    ones = jnp.ones_like(activity)
    (_, factor), _ = lax.scan(attempt, (loss(ones), ones), jnp.asarray(ALPHAS, jnp.float32))
    return factor
