"""Adam, written out: the demonstration needs no library for optimizers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

State = tuple[Any, Any, Any]  # parameters and the two moments
_FIRST, _SECOND = 0.9, 0.98


def begin(params: Any) -> State:
    """Parameters with moments of zero."""
    return params, jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)


def step(state: State, grads: Any, number: jax.Array, rate: Any, decay: float = 0.0) -> State:
    """One step; gradients longer than 1 are shortened, matrices decay.

    >>> params, *_ = step(begin(jnp.ones(2)), jnp.array([0.5, -0.5]), jnp.asarray(0), rate=0.25)
    >>> [round(float(p), 3) for p in params]
    [0.75, 1.25]
    """
    params, first, second = state
    length = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / (length + 1e-6)), grads)
    first = jax.tree.map(lambda m, g: _FIRST * m + (1 - _FIRST) * g, first, grads)
    second = jax.tree.map(lambda v, g: _SECOND * v + (1 - _SECOND) * g * g, second, grads)
    count = number + 1.0

    def moved(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        towards = (m / (1 - _FIRST**count)) / (jnp.sqrt(v / (1 - _SECOND**count)) + 1e-8)
        return p - rate * (towards + (decay * p if p.ndim > 2 else 0.0))

    return jax.tree.map(moved, params, first, second), first, second
