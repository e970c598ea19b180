"""The demonstration on the character model: every format, files, text, training, one picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from eformer.models import CHUNK, Model, generate

from . import char, formats, judge, picture, qat, text

PROMPT = "The debugger is "
LIMITS = {"int8": 0.005, "nf4": 0.05}  # how much larger than that of the source weights the perplexity may be
Tell = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is done."""

    formats: tuple[str, ...] = tuple(formats.FORMATS)
    windows: int = 32
    tokens: int = 192
    rounds: int = 3
    steps: int = 50
    batch: int = 8
    length: int = 128
    judged: bool = True  # whether enough is done to say something about quality
    cache: str | None = None  # the format of keys and values
    activations: str | None = None  # what products round their inputs to


QUICK = Plan(
    ("f32", "int8", "nf4", "ternary"), windows=8, tokens=16, rounds=1, steps=2, batch=2, length=32, judged=False
)


def run(plan: Plan, folder: Path, tell: Tell) -> dict[str, Any]:
    """Do everything; `tell` hears what is going on."""
    tell("quantizing the character model")
    models = formats.quantized(char.load_params(), plan.formats, plan.activations)
    windows = text.windows(text.encode(text.topics(held_out=True)), char.LENGTH, plan.windows)
    quality, dense = {}, {}
    for name, params in models.items():
        tell(f"reading held-out text: {name}")
        quality[name] = judge.bits_per_token(char.CONFIG, params, windows, cache=plan.cache)
        dense[name] = judge.materializations(char.CONFIG, params, windows[:1])
    exact = judge.bits_per_token(char.CONFIG, models["f32"], windows) if plan.cache else quality["f32"]
    change = {name: judge.perplexity_change(bits, exact) for name, bits in quality.items()}
    tell("generating")
    prompt = text.encode(PROMPT)
    context = 32 + -(-plan.tokens // CHUNK) * CHUNK
    speed = judge.speeds(char.CONFIG, models, context=context, tokens=plan.tokens, rounds=plan.rounds, cache=plan.cache)
    written = {name: write(models[name], prompt, plan.tokens, plan.cache) for name in ("f32", "nf4")}
    tell("saving and loading")
    rows = formats.rows_of(models, quality, change, speed, dense)
    trained = train(plan, windows, quality["ternary"], tell)
    ternary = next(row for row in rows if row.format == "ternary")
    extra = [dataclasses.replace(ternary, format="ternary, trained", quality=trained["after"])]
    tell("drawing")
    title, path = "eformer demo: a character model in every format", folder / "eformer_demo.png"
    return {
        "model": "char",
        "parameters": sum(int(np.prod(leaf.shape)) for leaf in char.flat(models["f32"]).values()),
        "quality": "bits/char",
        "change": "perplexity",
        "speed": "tokens/s",
        "rows": [dataclasses.asdict(row) for row in rows],
        "prompt": PROMPT,
        "text": written,
        "training": trained,
        "picture": picture.draw(path, title, "bits per character", "tokens per second", rows, extra),
        "checks": checks(plan, rows, trained),
    }


def write(params: Any, prompt: np.ndarray, count: int, cache: str | None) -> str:
    """What the model makes of the prompt, with the same dice for every format."""
    pieces = generate(Model(char.CONFIG, params), prompt, count, temperature=0.5, seed=1, cache=cache)
    return text.decode(np.concatenate(list(pieces)))


def train(plan: Plan, windows: np.ndarray, before: float, tell: Tell) -> dict[str, Any]:
    """Quantization-aware training of the ternary model."""
    tokens, params = text.encode(text.topics(held_out=False)), char.load_params()
    fixed = {"steps": plan.steps, "length": plan.length, "batch": plan.batch, "rate": 1e-3}
    for done, bits, now in qat.train(char.CONFIG, params, tokens, "ternary", **fixed):
        tell(f"training ternary weights: step {done} of {plan.steps}, {bits:.2f} bits per character")
        params = now
    ternary = formats.quantized(params, ["ternary"])["ternary"]
    after = judge.bits_per_token(char.CONFIG, ternary, windows, cache=plan.cache)
    return {"format": "ternary", "steps": plan.steps, "before": before, "after": after}


def checks(plan: Plan, rows: Any, trained: dict[str, Any]) -> dict[str, bool]:
    """What has to hold, by name."""
    change = {row.format: row.change for row in rows}
    limits = {f"{name} perplexity within {limit:.1%}": change[name] <= limit for name, limit in LIMITS.items()}
    found = limits if plan.judged else {}
    found |= formats.checks(rows)
    if plan.judged:
        found["training wins ternary back"] = trained["after"] < trained["before"]
    return found
