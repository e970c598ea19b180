"""Quantization-aware training: a ternary model that has seen its own rounding, against one that has not.

python examples/qat.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

import eformer as ef

SIZE, HIDDEN = 32, 192


def forward(params: Any, x: jax.Array) -> jax.Array:
    h = jax.nn.relu(x @ params["up"]["kernel"] + params["up"]["bias"])
    return h @ params["down"]["kernel"] + params["down"]["bias"]


def init(key: jax.Array) -> Any:
    k1, k2 = jax.random.split(key)
    return {
        "up": {"kernel": jax.random.normal(k1, (SIZE, HIDDEN)) / SIZE**0.5, "bias": jnp.zeros(HIDDEN)},
        "down": {"kernel": jax.random.normal(k2, (HIDDEN, SIZE)) / HIDDEN**0.5, "bias": jnp.zeros(SIZE)},
    }


def task(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """To learn: products of neighbouring inputs."""
    x = jax.random.normal(key, (256, SIZE))
    return x, x * jnp.roll(x, 1, axis=-1)


def train(params: Any, data: tuple[jax.Array, jax.Array], steps: int, strength: Any = None) -> Any:
    """Adam. `strength(step)` says how much of the rounding the loss sees; the gradient passes straight through it."""
    optimizer = optax.adam(1e-2)

    def loss(params: Any, step: Any) -> jax.Array:
        if strength is not None:
            params = ef.fake_quantize_tree(params, default="ternary", strength=strength(step))
        return jnp.mean((forward(params, data[0]) - data[1]) ** 2)

    def update(carry: Any, step: Any) -> Any:
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params, step), state)
        return (optax.apply_updates(params, updates), state), None

    return jax.jit(lambda p: jax.lax.scan(update, (p, optimizer.init(p)), jnp.arange(steps))[0][0])(params)


def main() -> None:
    data, start = task(jax.random.key(0)), init(jax.random.key(1))
    # The second starts dense too, and meets more and more of the rounding from step 50 on.
    models = {
        "dense training": train(start, data, 150),
        "quantization-aware": train(start, data, 150, ef.quant_delay(50, ramp=25)),
    }
    error = jax.jit(ef.implicit(lambda params: jnp.mean((forward(params, data[0]) - data[1]) ** 2)))
    print(f"mean squared error of {'':21} dense   ternary")
    for name, params in models.items():
        quantized = ef.quantize_tree(params, default="ternary", donate=False)
        print(f"{name:40} {error(params):8.3f} {error(quantized):9.3f}")
    print(ef.report(quantized))


if __name__ == "__main__":
    main()
