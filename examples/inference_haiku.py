"""Haiku: parameters are a dict of dicts, so `quantize_tree` and `implicit` are all there is to it.

python examples/inference_haiku.py
"""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp

import eformer as ef


@hk.without_apply_rng
@hk.transform
def network(tokens: jax.Array) -> jax.Array:
    """A language model over a window of words, its middle layers stacked and scanned."""

    def layer(x: jax.Array) -> jax.Array:
        h = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        return x + hk.Linear(256)(jax.nn.relu(hk.Linear(512)(h)))

    x = hk.Embed(512, 64)(tokens).reshape(*tokens.shape[:-1], -1)
    x = hk.Linear(256, name="inside")(x)
    x = hk.experimental.layer_stack(4)(layer)(x)
    return hk.Linear(512, name="head")(x)


def main() -> None:
    windows = jax.random.randint(jax.random.key(1), (16, 8), 0, 512)
    params = jax.jit(network.init)(jax.random.key(0), windows)
    exact = jax.jit(network.apply)(params, windows)

    # The head, which decides, gets 8 bits; blocks of 32 make the rest a little finer.
    rules = {"head/*": "int8", "*": {"dtype": "nf4", "block_size": 32}}
    quantized = ef.quantize_tree(params, rules, donate=False)
    print(ef.report(quantized, params))

    with ef.materialization_policy("error"):
        logits = jax.jit(ef.implicit(network.apply))(quantized, windows)
    error = jnp.linalg.norm(logits - exact) / jnp.linalg.norm(exact)
    print(f"\nerror of the logits: {error:.3f}")


if __name__ == "__main__":
    main()
