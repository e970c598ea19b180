"""QLoRA: a frozen 4-bit model learns a new task through low-rank factors; a safetensors file keeps just those.

python examples/qlora.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import eformer as ef

SIZE, LAYERS = 128, 3


def forward(params: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return x + jax.nn.relu(x @ w["up"]["kernel"]) @ w["down"]["kernel"], None

    return jax.lax.scan(layer, x, params["layers"])[0] @ params["head"]["kernel"]


def pretrained(key: jax.Array) -> Any:
    """Stands for a trained model."""
    k1, k2, k3 = jax.random.split(key, 3)
    up, down = (jax.random.normal(k, (LAYERS, SIZE, SIZE)) / SIZE**0.5 for k in (k1, k2))
    head = jax.random.normal(k3, (SIZE, SIZE)) / SIZE**0.5
    return {"layers": {"up": {"kernel": up}, "down": {"kernel": down / 2}}, "head": {"kernel": head}}


def main() -> None:
    base = ef.quantize_tree(pretrained(jax.random.key(0)))  # NF4; the dense weights are gone
    model = ef.add_lora(base, "*", rank=8, key=jax.random.key(1))
    trainable, frozen = ef.split_trainable(model)
    print(f"{sum(x.size for x in trainable.values()):,} of {3 * 2 * SIZE**2 + SIZE**2:,} values are trained")

    # The task: the answers of the model, with the outputs reversed.
    x = jax.random.normal(jax.random.key(2), (128, SIZE))
    target = ef.implicit(forward)(base, x)[:, ::-1]
    optimizer = optax.adam(3e-3)

    def loss(trainable: Any, frozen: Any) -> jax.Array:
        return jnp.mean((ef.implicit(forward)(ef.merge(trainable, frozen), x) - target) ** 2)

    @jax.jit
    def train(trainable: Any, frozen: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            trainable, state = carry
            value, grads = jax.value_and_grad(loss)(trainable, frozen)
            updates, state = optimizer.update(grads, state)
            return (optax.apply_updates(trainable, updates), state), value

        (trainable, _), losses = jax.lax.scan(step, (trainable, optimizer.init(trainable)), length=150)
        return trainable, losses

    with ef.materialization_policy("error"):  # neither pass may make a weight dense
        trainable, losses = train(trainable, frozen)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")

    with tempfile.TemporaryDirectory() as folder:
        path = ef.save(Path(folder) / "adapter.safetensors", trainable)
        print(f"the adapter takes {path.stat().st_size:,} bytes")
        tuned = ef.merge(ef.load(path), frozen)
    _, costs = ef.merge_lora(tuned)  # rounding the sums to 4 bits again is a choice, and has a price
    print(costs)


if __name__ == "__main__":
    main()
