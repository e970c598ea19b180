"""Stochastic rounding of gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer._kernels.activations import largest_magnitude, row_scale, wide


def with_rounded_gradient(y: jax.Array, q: Any, outputs: Sequence[int]) -> jax.Array:
    """`y`, rows of whose gradient along `outputs` are rounded to 8 bits, up or down at random, if `q` has a seed."""
    if q.seed is None or q.backward is None:
        return y
    return _passed(y, q.seed, tuple(outputs), q.backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _passed(y: jax.Array, seed: jax.Array, axes: tuple[int, ...], kind: str) -> jax.Array:
    return y


def _forward(y: jax.Array, seed: jax.Array, axes: tuple[int, ...], kind: str) -> tuple[jax.Array, jax.Array]:
    return y, seed


def _backward(axes: tuple[int, ...], kind: str, seed: jax.Array, g: jax.Array) -> tuple[jax.Array, Any]:
    key = functools.reduce(jax.random.fold_in, [seed.max(), seed.min()], jax.random.key(0))
    return rounded_at_random(g, key, axes, kind), np.zeros(seed.shape, jax.dtypes.float0)


_passed.defvjp(_forward, _backward)


def rounded_at_random(g: jax.Array, key: jax.Array, axes: tuple[int, ...], kind: str) -> jax.Array:
    """A neighbouring value on the grid of each row, the expectation of which is `g`.

    >>> g = jnp.array([[0.3, 127.0]])
    >>> keys = jax.random.split(jax.random.key(0), 1000)
    >>> made = jax.vmap(lambda key: rounded_at_random(g, key, (1,), "int8"))(keys)
    >>> sorted(set(made[:, 0, 0].tolist())), bool(abs(made[:, 0, 0].mean() - 0.3) < 0.05)
    ([0.0, 1.0], True)
    """
    values = g.astype(wide(g.dtype))
    scale = jnp.expand_dims(row_scale(largest_magnitude(values, axes), kind), axes)
    codes = values / (scale + 0 * values)
    step = per = jnp.ones_like(codes)
    if kind == "fp8":  # e4m3: eight steps between powers of two, from 2**-6 up
        exponent = jnp.maximum(jnp.frexp(codes)[1] - 4, -9)
        # Not `codes / step`: XLA would divide by `scale * step`, which is zero where the scale is the smallest number.
        step, per = jnp.ldexp(step, exponent), jnp.ldexp(step, -exponent)
    noise = jax.random.uniform(key, g.shape, values.dtype)
    return (jnp.floor(codes * per + noise) * step * scale).astype(g.dtype)
