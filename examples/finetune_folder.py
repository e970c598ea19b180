"""QLoRA on a folder as Hugging Face has them: quantize it, train adapters on a text, save them for `peft`, merge.

    python examples/finetune_folder.py MODEL_FOLDER --text notes.txt --out tuned/

`tuned/base` is the quantized model, `tuned/adapter` what `peft.PeftModel.from_pretrained` takes, and `tuned/merged` a
folder for `eformer generate` and `eformer chat`. Without a folder it trains a tiny random model on its own source.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import eformer as ef
from eformer import models

TINY = {"model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}


def tiny_folder(folder: Path) -> Path:
    """A model of random weights; its tokens are bytes."""
    model = models.Config(vocabulary=256, width=64, layers=2, heads=4, kv_heads=2, hidden=128, rope_halves=True)
    params = models.init(model, jax.random.key(0))
    layers = [jax.tree.map(lambda w, i=i: w[i], params["layers"]) for i in range(model.layers)]
    (folder / "from").mkdir(parents=True)
    (folder / "from" / "config.json").write_text(json.dumps(TINY))
    made = models.Model(model, {**params, "layers": layers}, folder=folder / "from")
    return models.save_folder(folder / "source", made)


def loss_of(config: models.Config, params: Any, windows: jax.Array) -> jax.Array:
    """Mean negative log likelihood per token, in bits."""
    logits = models.forward(config, params, windows[:, :-1]).astype(jnp.float32)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), windows[:, 1:, None], axis=-1)
    return -jnp.mean(chosen) / jnp.log(2.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="a folder with config.json, weights and tokenizer")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="what to learn (default: this program)")
    parser.add_argument("--out", type=Path, help="where the results go (default: a folder that is removed)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--length", type=int, default=64, help="tokens per text")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rate", type=float, default=5e-3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = options.out or Path(temporary) / "out"
        tune(options, options.folder or tiny_folder(Path(temporary)), out)


def tune(options: argparse.Namespace, source: Path, out: Path) -> None:
    if not (out / "base" / "config.json").exists():  # the embedding is often the head, too
        ef.quantize_folder(source, out / "base", {"*embed_tokens*": "int8"})
    model = models.load(out / "base")
    params = ef.add_lora(model.params, "layers/*/[qkvo]", options.rank, jax.random.key(0), alpha=2 * options.rank)
    trainable, frozen = ef.split_trainable(params)
    optimizer = optax.adam(options.rate)

    @jax.jit
    def step(trainable: Any, state: Any, windows: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(lambda t: loss_of(model.config, ef.merge(t, frozen), windows))(trainable)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(trainable, updates), state, value

    text = options.text.read_text()
    tokens = np.frombuffer(text.encode(), np.uint8) if model.tokenizer is None else model.tokenizer.encode(text)
    starts = np.random.default_rng(0).integers(0, len(tokens) - options.length - 1, (options.steps, 4))
    state, losses = optimizer.init(trainable), []
    with ef.materialization_policy("error"):  # a weight that went dense, forward or backward, would be an error
        for number, row in enumerate(starts, 1):
            windows = jnp.asarray(tokens[row[:, None] + np.arange(options.length + 1)], jnp.int32)
            trainable, state, value = step(trainable, state, windows)
            losses.append(float(value))
            if number % 10 == 0:
                print(f"step {number:3}: {losses[-1]:.3f} bits per token", flush=True)
    tuned = dataclasses.replace(model, params=ef.merge(trainable, frozen))
    models.save_adapter(out / "adapter", tuned)
    merged, cost = ef.merge_lora(tuned.params)
    models.save_folder(out / "merged", dataclasses.replace(tuned, params=merged))
    again = models.load_adapter(models.load(out / "base"), out / "adapter")
    probe = jnp.asarray(tokens[: options.length], jnp.int32)[None]
    want = models.forward(model.config, tuned.params, probe)
    same = float(jnp.abs(models.forward(model.config, again.params, probe) - want).max())
    first, last = np.mean(losses[:3]), np.mean(losses[-3:])
    print(f"{first:.3f} bits per token at first, {last:.3f} at the end; the adapter read again differs by {same:.1e}")
    print(f"merging rounds the weights again: relative error {cost.relative_error:.3f} at most")
    if not (last < first and same < 1e-3):
        raise SystemExit("the loss did not fall, or the adapter on disk is not the one that was trained")


if __name__ == "__main__":
    main()
