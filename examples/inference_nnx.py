"""Flax NNX: a module quantized in one call, run by code that knows nothing of it, and a decoding loop.

python examples/inference_nnx.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

import eformer as ef
from eformer.integrations.nnx import Dispatching


class Model(nnx.Module):
    """A gated recurrent language model: small enough to decode token by token in a moment."""

    def __init__(self, words: int, size: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(words, size, rngs=rngs)
        self.gate = nnx.Linear(2 * size, size, rngs=rngs)
        self.update = nnx.Linear(2 * size, size, rngs=rngs)
        self.head = nnx.Linear(size, words, rngs=rngs)

    def __call__(self, state: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = jnp.concatenate([state, self.embed(token)], axis=-1)
        gate = nnx.sigmoid(self.gate(x))
        state = gate * state + (1 - gate) * nnx.tanh(self.update(x))
        return state, self.head(state)


@nnx.jit
def generate(model: nnx.Module, token: jax.Array) -> jax.Array:
    """Twelve tokens, the likeliest each time. Written for dense models."""

    @nnx.scan(in_axes=(None, nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def step(model, carry, _):
        state, token = carry
        state, logits = model(state, token)
        token = jnp.argmax(logits, axis=-1)
        return (state, token), token

    state = jnp.zeros((*token.shape, 256))
    return step(model, (state, token), jnp.arange(12))[1].T


def main() -> None:
    model, start = nnx.jit(lambda: Model(1024, 256, nnx.Rngs(0)))(), jnp.array([1, 2, 3])
    dense = generate(model, start)
    # A new module; the old one keeps its parameters because of donate=False. The head, which decides, gets 8 bits.
    quantized = ef.quantize_tree(model, {"head/*": "int8"}, default="nf4", donate=False)
    print(ef.report(quantized))
    # `Dispatching` turns dispatch on wherever the model is called, so `generate` needs no change.
    with ef.materialization_policy("error"):
        tokens = generate(Dispatching(quantized), start)
    print("float32:", dense[0].tolist())
    print("packed: ", tokens[0].tolist())


if __name__ == "__main__":
    main()
