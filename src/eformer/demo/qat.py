"""Quantization-aware training of a language model: the loss sees rounded weights, the dense ones are trained."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer.ops.quantization import fake_quantize_tree

from . import adam
from .decoder import Params, Shape
from .judge import loss

_CHUNK = 10


@functools.partial(jax.jit, static_argnums=(0, 1))
def _steps(shape: Shape, fmt: str, state: adam.State, windows: jax.Array, begin: jax.Array, rate: jax.Array) -> Any:
    def step(state: Any, given: Any) -> tuple[Any, jax.Array]:
        batch, number = given

        def seen(params: Params) -> jax.Array:
            return loss(shape, fake_quantize_tree(params, default=fmt), batch[:, :-1], batch[:, 1:])

        value, grads = jax.value_and_grad(seen)(state[0])
        return adam.step(state, grads, number, rate * jnp.minimum(1.0, (number + 1) / 5)), value

    return jax.lax.scan(step, state, (windows, begin + jnp.arange(windows.shape[0])))


def train(
    shape: Shape, params: Params, tokens: np.ndarray, fmt: str, *, steps: int, length: int, batch: int, rate: float
) -> Iterator[tuple[int, float, Params]]:
    """After every ten steps: how many were done, the last loss in bits, and the parameters (dense)."""
    state, random = adam.begin(params), np.random.default_rng(0)
    for begin in range(0, steps, _CHUNK):
        count = min(_CHUNK, steps - begin)
        starts = random.integers(0, len(tokens) - length - 1, (count, batch))
        windows = tokens[starts[..., None] + np.arange(length + 1)]
        state, losses = _steps(shape, fmt, state, jnp.asarray(windows), jnp.asarray(begin), jnp.float32(rate))
        yield begin + count, float(losses[-1]), state[0]
