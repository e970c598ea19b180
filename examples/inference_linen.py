"""Flax Linen: an unchanged model runs on quantized variables.

python examples/inference_linen.py
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

import eformer as ef
from eformer.integrations import linen


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(512, 128)
        x = embed(tokens)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.RMSNorm()(x))
        x = x + nn.Dense(128)(nn.gelu(nn.Dense(512)(nn.RMSNorm()(x))))
        return embed.attend(x)  # the head is tied to the embedding


def main() -> None:
    model, tokens = Model(), jnp.arange(32).reshape(2, 16)
    variables = jax.jit(model.init)(jax.random.key(0), tokens)
    exact = jax.jit(model.apply)(variables, tokens)

    # The "params" collection is quantized, leaf by leaf; each dense array is freed as soon as its packed form exists.
    variables = linen.quantize(variables, {"Embed_0/*": "int8"}, default="nf4")
    print(ef.report(variables["params"]))

    run = linen.apply_fn(model)  # `model.apply` with dispatch on
    with ef.materialization_policy("error"):  # raises if a weight would become dense
        logits = jax.jit(run)(variables, tokens)
    print(f"\nerror of the logits: {jnp.linalg.norm(logits - exact) / jnp.linalg.norm(exact):.3f}")

    # What happens to the arrays is decided while tracing, so it can be asked without computing anything.
    found = ef.explain(lambda: jax.eval_shape(run, variables, tokens))()
    print(f"{len(found.kernels)} packed products, {len(found.materializations)} weights became dense")


if __name__ == "__main__":
    main()
