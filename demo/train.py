"""Trains the character model of this folder: `python -m demo.train --out char.safetensors`.

Three minutes on a GPU, hours on two cores.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import save_file

from eformer.models import init

from . import text
from .char import CONFIG, LENGTH, flat
from .judge import loss
from .qat import adam

_NOISE = 0.02  # characters of the input replaced at random, or the text is learnt by heart
_DECAY = 0.1


@functools.partial(jax.jit, static_argnames=("optimizer", "steps", "batch"), donate_argnums=0)
def train(state: Any, data: jax.Array, begin: Any, *, optimizer: Any, steps: int, batch: int) -> Any:
    """`steps` steps on random pieces of the text."""

    def step(state: Any, number: jax.Array) -> tuple[Any, jax.Array]:
        place_key, noise_key = jax.random.split(jax.random.fold_in(jax.random.key(1), number))
        starts = jax.random.randint(place_key, (batch,), 0, data.shape[0] - LENGTH - 1)
        windows = data[starts[:, None] + jnp.arange(LENGTH + 1)]
        wrong = jax.random.bernoulli(noise_key, _NOISE, windows.shape)
        noisy = jnp.where(wrong, jax.random.randint(noise_key, windows.shape, 32, 127), windows)
        params, moments = state
        value, grads = jax.value_and_grad(lambda params: loss(CONFIG, params, noisy[:, :-1], windows[:, 1:]))(params)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return jax.lax.scan(step, state, begin + jnp.arange(steps))


def main() -> None:
    """Train, print the loss of both parts of the text now and then, save the weights in float16."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=2e-3)
    options = parser.parse_args()
    data = jnp.asarray(text.encode(text.topics(held_out=False) + text.library()))
    held_out = jnp.asarray(text.windows(text.encode(text.topics(held_out=True)), LENGTH, 128))
    judge = jax.jit(lambda params: loss(CONFIG, params, held_out[:, :-1], held_out[:, 1:]))
    # Warm-up and cosine decay, both at once.
    warm_up, cosine = optax.linear_schedule(0.01, 1.0, 99), optax.cosine_decay_schedule(options.rate, options.steps)
    optimizer = adam(lambda number: warm_up(number) * cosine(number), _DECAY)
    params, chunk = init(CONFIG, jax.random.key(0)), max(options.steps // 16, 1)
    state = params, optimizer.init(params)
    for begin in range(0, options.steps, chunk):
        steps = min(chunk, options.steps - begin)
        state, losses = train(state, data, begin, optimizer=optimizer, steps=steps, batch=options.batch)
        seen, unseen = float(losses[-50:].mean()), float(judge(state[0]))
        print(f"{begin + len(losses):6} steps: {seen:.3f} bits per character, held out {unseen:.3f}", flush=True)
    save_file({k: np.asarray(v).astype(np.float16) for k, v in flat(state[0]).items()}, options.out)


if __name__ == "__main__":
    main()
