"""Quantization-aware training of a language model: the loss sees rounded weights, the dense ones are trained."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eformer.models import Config, Params
from eformer.ops.quantization import fake_quantize_tree

from .judge import loss

_CHUNK = 10


def adam(rate: optax.ScalarOrSchedule, decay: float = 0.0) -> optax.GradientTransformation:
    """Adam; gradients longer than 1 are shortened, stacks of matrices decay."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b2=0.98),
        optax.add_decayed_weights(decay, mask=lambda params: jax.tree.map(lambda p: p.ndim > 2, params)),
        optax.scale_by_learning_rate(rate),
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _steps(config: Config, fmt: str, optimizer: Any, state: tuple[Params, Any], windows: jax.Array) -> Any:
    def step(state: tuple[Params, Any], batch: jax.Array) -> tuple[Any, jax.Array]:
        def seen(params: Params) -> jax.Array:
            return loss(config, fake_quantize_tree(params, default=fmt), batch[:, :-1], batch[:, 1:])

        params, moments = state
        value, grads = jax.value_and_grad(seen)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return jax.lax.scan(step, state, windows)


def train(
    config: Config, params: Params, tokens: np.ndarray, fmt: str, *, steps: int, length: int, batch: int, rate: float
) -> Iterator[tuple[int, float, Params]]:
    """After every ten steps: how many were done, the last loss in bits, and the parameters (dense)."""
    optimizer, random = adam(optax.linear_schedule(rate / 5, rate, 4)), np.random.default_rng(0)
    state = params, optimizer.init(params)
    for begin in range(0, steps, _CHUNK):
        count = min(_CHUNK, steps - begin)
        starts = random.integers(0, len(tokens) - length - 1, (count, batch))
        windows = tokens[starts[..., None] + np.arange(length + 1)]
        state, losses = _steps(config, fmt, optimizer, state, jnp.asarray(windows))
        yield begin + count, float(losses[-1]), state[0]
