"""How good a language model is, and whether any of its weights went dense on the way."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from eformer._core import explain, materialization_policy

from .decoder import Params, Shape, forward


def loss(shape: Shape, params: Params, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean negative log likelihood per token, in bits."""
    logits = forward(shape, params, inputs).astype(jnp.float32)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -jnp.mean(chosen) / jnp.log(2.0)


_loss = jax.jit(loss, static_argnums=0)


def bits_per_token(shape: Shape, params: Params, windows: np.ndarray, batch: int = 8) -> float:
    """The loss over windows (count, length + 1), a few at a time."""
    pieces = [windows[i : i + batch] for i in range(0, len(windows) - len(windows) % batch, batch)]
    losses = [_loss(shape, params, jnp.asarray(piece[:, :-1]), jnp.asarray(piece[:, 1:])) for piece in pieces]
    return float(np.mean([float(value) for value in losses]))


def materializations(shape: Shape, params: Params, tokens: np.ndarray) -> int:
    """How often a forward pass turns a quantized weight into a dense array. Only traces; nothing is computed."""
    abstract = functools.partial(jax.eval_shape, functools.partial(forward, shape))
    with materialization_policy("allow"):
        return len(explain(abstract)(params, jnp.asarray(tokens)).materializations)


def perplexity_change(bits: float, reference: float) -> float:
    """How much larger the perplexity is, as a fraction.

    >>> perplexity_change(3.0, 2.0)
    1.0
    """
    return 2.0 ** (bits - reference) - 1.0
