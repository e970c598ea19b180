"""Equinox: a quantized module is a module, under `eqx.filter_jit` and `jax.vmap` as before.

python examples/inference_equinox.py
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp

import eformer as ef


class Mixer(eqx.Module):
    """An image classifier: patches, then layers that mix patches and channels in turn."""

    patches: eqx.nn.Conv2d
    tokens: list[eqx.nn.MLP]
    channels: list[eqx.nn.MLP]
    norms: list[eqx.nn.LayerNorm]
    head: eqx.nn.Linear

    def __init__(self, depth: int, key: jax.Array):
        keys = iter(jax.random.split(key, 2 * depth + 2))
        self.patches = eqx.nn.Conv2d(3, 128, 4, stride=4, key=next(keys))
        self.tokens = [eqx.nn.MLP(64, 64, 128, 1, jax.nn.gelu, key=next(keys)) for _ in range(depth)]
        self.channels = [eqx.nn.MLP(128, 128, 256, 1, jax.nn.gelu, key=next(keys)) for _ in range(depth)]
        self.norms = [eqx.nn.LayerNorm(128) for _ in range(2 * depth)]
        self.head = eqx.nn.Linear(128, 10, key=next(keys))

    def __call__(self, image: jax.Array) -> jax.Array:
        x = self.patches(image).reshape(128, 64).T  # (patches, channels)
        for tokens, channels, first, second in zip(
            self.tokens, self.channels, self.norms[::2], self.norms[1::2], strict=True
        ):
            x = x + jax.vmap(tokens, in_axes=1, out_axes=1)(jax.vmap(first)(x))
            x = x + jax.vmap(channels)(jax.vmap(second)(x))
        return self.head(x.mean(0))


@eqx.filter_jit
def classify(model: Mixer, images: jax.Array) -> jax.Array:
    return ef.implicit(lambda model, images: jax.vmap(model)(images))(model, images)


def main() -> None:
    model = eqx.filter_jit(Mixer)(1, jax.random.key(0))
    images = jax.random.normal(jax.random.key(1), (8, 3, 32, 32))
    exact = classify(model, images)
    # Linear weights are (out, in) here; the axis to pack along is found by the layer that holds them. Convolutions have
    # no packed kernel, so they stay dense.
    quantized = ef.quantize_tree(model, "nf4", skip=("norms", "biases", "convolutions"), donate=False)
    print(ef.report(quantized))
    with ef.materialization_policy("error"):
        logits = classify(quantized, images)
    print(f"\nerror of the logits: {jnp.linalg.norm(logits - exact) / jnp.linalg.norm(exact):.4f}")
    found = ef.explain(lambda: eqx.filter_eval_shape(classify, quantized, images))()
    print(f"{len(found.kernels)} packed products, {len(found.materializations)} weights became dense")


if __name__ == "__main__":
    main()
