"""The demonstration on SmolLM2-135M: perplexity, text and tokens per second in every format.

The weights of the package are Q4_1, those of the embedding Q8_0. "f32" are these, decoded; all other formats are made
of the decoded weights, so NF4 is here a second rounding to four bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eformer.models import generate, load
from eformer.models._llama_file import SMOLLM2, model_file
from eformer.ops.quantization import quantize_tree

from . import formats, judge, picture, text

PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
LIMIT = 0.005  # how much larger than that of the file the perplexity of int8 may be
CACHE_LIMIT = 0.001  # the same for keys and values in int8, next to f32 weights
MIXED = {"embedding": "int8", "*down": "int8"}  # the leaves where four bits hurt this model most


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is done."""

    windows: int = 8
    length: int = 256
    tokens: int = 32
    rounds: int = 3
    judged: bool = True  # whether enough is done to say something about quality
    cache: str | None = None  # the format of keys and values
    activations: str | None = None  # what products round their inputs to


QUICK = Plan(windows=2, length=32, tokens=16, rounds=1, judged=False)


def run(plan: Plan, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """Do everything; `tell` hears what is going on."""
    file = model_file(*SMOLLM2)
    tell("decoding the GGUF file")
    model = load(file, dense=True)
    config, params, tokenizer = model.config, model.params, model.tokenizer
    tell("quantizing")
    mixed = quantize_tree(params, MIXED, donate=False)
    models = {
        **formats.quantized(params, activations=plan.activations),
        "nf4 + int8": mixed,
        "Q4_1 as stored": load(file).params,
    }
    windows = text.windows(tokenizer.encode(text.topics(held_out=True)), plan.length, plan.windows)
    quality, dense = {}, {}
    for name, weights in models.items():
        tell(f"reading {windows[:, 1:].size} tokens: {name}")
        quality[name] = judge.bits_per_token(config, weights, windows, batch=2, cache=plan.cache)
        dense[name] = judge.materializations(config, weights, windows[:1])
    exact = judge.bits_per_token(config, params, windows, batch=2) if plan.cache else quality["f32"]
    change = {name: judge.perplexity_change(bits, exact) for name, bits in quality.items()}
    tell("generating")
    prompt = tokenizer.encode(PROMPT)
    speed = judge.speeds(config, models, context=64, tokens=plan.tokens, rounds=plan.rounds, cache=plan.cache)

    def written(name: str) -> str:
        answer = generate(dataclasses.replace(model, params=models[name]), prompt, plan.tokens, cache=plan.cache)
        return tokenizer.decode(np.concatenate(list(answer)))

    rows = formats.rows_of(models, quality, change, speed, dense)
    limits = {
        f"int8 perplexity within {LIMIT:.1%}": change["int8"] <= LIMIT,
        "nf4 with int8 where it hurts is better than nf4": quality["nf4 + int8"] < quality["nf4"],
    }
    if plan.cache == "int8":
        limits[f"int8 cache: perplexity within {CACHE_LIMIT:.1%}"] = change["f32"] <= CACHE_LIMIT
    title, path = "eformer demo: SmolLM2-135M in every format", folder / "eformer_demo_smollm2.png"
    return {
        "model": "SmolLM2-135M-Instruct",
        "parameters": sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params)),
        "quality": "bits/token",
        "change": "perplexity",
        "speed": "tokens/s",
        "rows": [dataclasses.asdict(row) for row in rows],
        "prompt": "",
        "text": {name: written(name) for name in ("f32", "nf4")},
        "picture": picture.draw(path, title, "bits per token", "tokens per second", rows),
        "checks": {**(limits if plan.judged else {}), **formats.checks(rows)},
    }
