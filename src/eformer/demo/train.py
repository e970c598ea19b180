"""Trains the character model that comes with the package: `python -m eformer.demo.train --out char.safetensors`.

Three minutes on a GPU, hours on two cores.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from . import adam, text
from .char import LENGTH, SHAPE, flat
from .decoder import init
from .judge import loss

_NOISE = 0.02  # characters of the input replaced at random, or the text is learnt by heart
_DECAY = 0.1


@functools.partial(jax.jit, static_argnames=("steps", "batch", "rate", "total"), donate_argnums=0)
def train(state: Any, data: jax.Array, begin: Any, *, steps: int, batch: int, rate: float, total: int) -> Any:
    """`steps` steps with warm-up and cosine decay, on random pieces of the text."""

    def step(state: Any, number: jax.Array) -> tuple[Any, jax.Array]:
        place_key, noise_key = jax.random.split(jax.random.fold_in(jax.random.key(1), number))
        starts = jax.random.randint(place_key, (batch,), 0, data.shape[0] - LENGTH - 1)
        windows = data[starts[:, None] + jnp.arange(LENGTH + 1)]
        wrong = jax.random.bernoulli(noise_key, _NOISE, windows.shape)
        noisy = jnp.where(wrong, jax.random.randint(noise_key, windows.shape, 32, 127), windows)
        value, grads = jax.value_and_grad(lambda params: loss(SHAPE, params, noisy[:, :-1], windows[:, 1:]))(state[0])
        now = rate * jnp.minimum(1.0, (number + 1) / 100) * 0.5 * (1 + jnp.cos(jnp.pi * number / total))
        return adam.step(state, grads, number, now, _DECAY), value

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
    judge = jax.jit(lambda params: loss(SHAPE, params, held_out[:, :-1], held_out[:, 1:]))
    state, chunk = adam.begin(init(SHAPE, jax.random.key(0))), max(options.steps // 16, 1)
    for begin in range(0, options.steps, chunk):
        fixed = {"batch": options.batch, "rate": options.rate, "total": options.steps}
        state, losses = train(state, data, begin, steps=min(chunk, options.steps - begin), **fixed)
        seen, unseen = float(losses[-50:].mean()), float(judge(state[0]))
        print(f"{begin + len(losses):6} steps: {seen:.3f} bits per character, held out {unseen:.3f}", flush=True)
    save_file({k: np.asarray(v).astype(np.float16) for k, v in flat(state[0]).items()}, options.out)


if __name__ == "__main__":
    main()
