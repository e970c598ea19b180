"""The models of `quality.py`: what each is calibrated with, and how it is judged."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eformer as ef
from demo import bert, char, run_minilm, text
from eformer import models
from eformer.models._llama_file import SMOLLM2, model_file


@dataclasses.dataclass
class Subject:
    """A model, what it is calibrated with, and how it is judged: measures by name, against its own dense weights."""

    params: Any
    forward: Callable[[Any, Any], Any]
    batches: list[Any]
    judge: Callable[[Any], dict[str, Any]]
    quick: Callable[[Any], Any] | None = None  # an Evaluation on some of the text, for sensitivities
    training: list[Any] | None = None  # batches to distill with, where there are more than for calibration
    loss: Callable[[Any, Any], Any] | None = None  # of distillation; by default the divergence of logits
    made: dict[str, Any] = dataclasses.field(default_factory=dict)  # the last quantized model, by how it was made


def language_model(config: Any, params: Any, calibration: np.ndarray, judged: np.ndarray, batch: int) -> Subject:
    """Windows (count, length + 1) of two texts."""
    forward = functools.partial(models.forward, config)
    known: dict[bytes, Any] = {}
    dense = jax.jit(forward)
    on_cpu = jax.default_backend() == "cpu"

    def reference(tokens: jax.Array) -> Any:
        key = np.asarray(tokens).tobytes()
        if key not in known:
            found = dense(params, tokens)
            known[key] = np.asarray(found) if on_cpu else found
        return known[key]

    def evaluated(packed: Any, tokens: np.ndarray) -> Any:
        # Where compiling takes longer than computing, one dense program judges all formats.
        read = packed if on_cpu else ef.dequantize_tree(packed)
        return ef.evaluate(forward, read, tokens, against=reference, batch=batch)

    def judge(packed: Any) -> dict[str, Any]:
        found = evaluated(packed, judged)
        return {name: value for name, value in found.to_dict().items() if name not in ("windows", "stride")}

    def quick(packed: Any) -> Any:
        return evaluated(packed, calibration[:batch])

    pieces = [jnp.asarray(calibration[i : i + batch, :-1]) for i in range(0, len(calibration), batch)]
    return Subject(params, forward, pieces, judge, quick)


def char_model(small: bool) -> Subject:
    known, held_out = (text.encode(text.topics(held_out=held)) for held in (False, True))
    count, judged, batch = (8, 8, 8) if small else (64, 32, 8) if jax.default_backend() == "cpu" else (64, 240, 16)
    windows = text.windows(known, char.LENGTH, count), text.windows(held_out, char.LENGTH, judged)
    subject = language_model(char.CONFIG, char.load_params(), *windows, batch=batch)
    more = text.windows(known, char.LENGTH, 24 * count)[:, :-1].reshape(8, 3 * count, char.LENGTH)
    subject.training = list(jnp.asarray(more.swapaxes(0, 1)))
    return subject


def smollm2(small: bool) -> Subject:
    """With its layers in a stack: one program for all of them. The larger part of the text is for distillation."""
    model = models.load(model_file(*SMOLLM2), dense=True)
    layers = jax.tree.map(lambda *parts: jnp.stack(parts), *model.params["layers"])
    params = jax.tree.map(jnp.asarray, {**model.params, "layers": layers})
    length, batch = (32, 2) if small else (256, 2 if jax.default_backend() == "cpu" else 20)
    known, held_out = (model.tokenizer.encode(text.topics(held_out=held)) for held in (False, True))
    counts = (2, 2) if small else (24, 8) if batch == 2 else (160, 60)
    windows = [text.windows(t, length, count) for t, count in zip((known, held_out), counts, strict=True)]
    subject = language_model(model.config, params, *windows, batch=batch)
    count = 2 if small else 48
    more = text.windows(known, length, 8 * count)[:, :-1].reshape(8, count, length)
    subject.training = list(jnp.asarray(more.swapaxes(0, 1)))
    return subject


def minilm(small: bool) -> Subject:
    path = model_file(*run_minilm.PACKAGE)
    heads = json.loads((path.parent / "config.json").read_text())["num_attention_heads"]
    tokenizer = models.Tokenizer.from_file(path.parent / "tokenizer.json", 128)
    params = bert.nested(ef.load(path))
    params.pop("pooler", None)
    params = jax.tree.map(jnp.asarray, params)
    forward = lambda params, batch: bert.embed(heads, params, *batch)  # noqa: E731
    pairs = labelled(32 if small else 8192)
    texts = sentences(16 if small else 512), [sentence for sentence, _ in pairs]
    calibration, judged = (list(_padded(tokenizer, some)) for some in texts)
    labels = np.array([label for _, label in pairs])

    def vectors(packed: Any) -> np.ndarray:
        read = packed if jax.default_backend() == "cpu" else ef.dequantize_tree(packed)
        return np.concatenate([np.asarray(forward(read, batch), np.float64) for batch in judged])

    exact = vectors(params)

    def judge(packed: Any) -> dict[str, Any]:
        found = vectors(packed)
        right, before = (labels[_nearest(v)] == labels for v in (found, exact))
        count = len(labels)
        difference = right.astype(float) - before
        return {
            "sentences": count,
            "cosine": float(np.mean(np.sum(found * exact, axis=-1))),
            "accuracy": {"value": float(right.mean()), "error": float(right.std() / np.sqrt(count))},
            "accuracy_change": {"value": float(difference.mean()), "error": float(difference.std() / np.sqrt(count))},
            "same_neighbour": float(np.mean(_nearest(found) == _nearest(exact))),
        }

    subject = Subject(params, forward, calibration, judge, loss=lambda x, y: jnp.mean(jnp.sum(jnp.square(x - y), -1)))
    subject.training = list(_padded(tokenizer, sentences(16 if small else 2048), batch=32))
    return subject


def sentences(limit: int) -> list[str]:
    """Of the topics that are not held out, to calibrate with."""
    return _spread(_split(text.topics(held_out=False)), limit)


def labelled(limit: int) -> list[tuple[str, str]]:
    """Sentences of the standard library's documentation, each with its module: its nearest neighbour should be from
    the same one."""
    found: dict[str, str] = {}
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        nodes = ast.walk(ast.parse(file.read_text("utf-8", "replace")))
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        for node in nodes:
            if isinstance(node, kinds) and (said := ast.get_docstring(node)):
                found |= dict.fromkeys(_split(said), file.stem)
    counts = Counter(found.values())
    return _spread([(s, name) for s, name in found.items() if counts[name] >= 8], limit)


def _split(plain: str) -> list[str]:
    return [s.strip() for s in re.split(r"(?<=[.:])\s", re.sub(r"\s+", " ", plain)) if 40 < len(s) < 200]


def _spread(found: list[Any], limit: int) -> list[Any]:
    return [found[i] for i in np.linspace(0, len(found) - 1, min(limit, len(found))).astype(int)]


def _padded(tokenizer: Any, sentences: list[str], batch: int = 64) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    tokens, real = bert.padded([tokenizer.encode(sentence) for sentence in sentences])
    for i in range(0, len(tokens), batch):
        yield tokens[i : i + batch], real[i : i + batch]


def _nearest(vectors: np.ndarray) -> np.ndarray:
    return np.argmax(vectors @ vectors.T - 2 * np.eye(len(vectors)), axis=-1)
