"""`python -m demo.compare`: what every format costs in bits and in accuracy, as a table and as one picture.

Three measures against bits per weight: the relative error of a matrix of N(0, 1), how much larger the perplexity of
the character model gets, and how far the sentence embeddings of all-MiniLM-L6-v2 turn (where it is installed).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eformer._quantize.report import relative_error
from eformer.cli._commands import OK, add_json, print_json, print_table, run_command
from eformer.models import Tokenizer
from eformer.models._llama_file import model_file
from eformer.ops.quantization import quantize, quantize_tree
from eformer.serialization import load

from . import bert, char, judge, run_minilm, text

# name in the table -> options of `quantize`
FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"dtype": "int8"},
    "int8, blocks of 64": {"dtype": "int8", "block_size": 64},
    "fp8": {"dtype": "fp8"},
    "mxfp8": {"dtype": "mxfp8"},
    "fp8_e5m2": {"dtype": "fp8_e5m2"},
    "int6": {"dtype": "int6"},
    "int5": {"dtype": "int5"},
    "int4, zero points, 32": {"dtype": "int4", "block_size": 32, "symmetric": False},
    "int4, blocks of 32": {"dtype": "int4", "block_size": 32},
    "int4": {"dtype": "int4"},
    "iq4_nl": {"dtype": "iq4_nl"},
    "nvfp4": {"dtype": "nvfp4"},
    "nf4": {"dtype": "nf4"},
    "nf4, double_quant": {"dtype": "nf4", "double_quant": True},
    "mxfp4": {"dtype": "mxfp4"},
    "int3": {"dtype": "int3"},
    "int2": {"dtype": "int2"},
    "ternary": {"dtype": "ternary"},
    "binary": {"dtype": "binary"},
}
MEASURES = {
    "normal": "relative error, N(0, 1)",
    "char": "perplexity, character model",
    "minilm": "1 - cosine, all-MiniLM-L6-v2",
}
SIZE = 2048
_LEAST = 1e-4  # what is below is drawn there


def main(argv: Sequence[str]) -> int:
    """Run the comparison and return its exit status."""
    return run_command("python -m demo.compare", "Bits and accuracy of every format.", sys.modules[__name__], argv)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="draw the picture into this file (needs matplotlib)")
    parser.add_argument("--formats", help="some of them, separated by semicolons (default: all)")
    parser.add_argument("--windows", type=int, default=32, help="of text for the character model (default: 32)")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, print, draw."""
    names = list(FORMATS) if options.formats is None else options.formats.split(";")
    rows = measured({name: FORMATS[name] for name in names}, options.windows)
    if options.out is not None:
        draw(options.out, rows)
    if options.json:
        print_json({"rows": rows})
    else:
        held = [key for key in MEASURES if key in rows[0]]
        print_table(
            "formats",
            ["format", "bits per weight", *(MEASURES[key] for key in held)],
            [[r["format"], f"{r['bits']:.2f}", *(f"{r[key]:.4g}" for key in held)] for r in rows],
        )
    return OK


def measured(formats: dict[str, dict[str, Any]], windows: int) -> list[dict[str, Any]]:
    """One row for each format."""
    matrix = jax.random.normal(jax.random.key(0), (SIZE, SIZE))
    plain = char.load_params()
    read = text.windows(text.encode(text.topics(held_out=True)), char.LENGTH, windows)
    reference = judge.bits_per_token(char.CONFIG, plain, read)
    embedded = _embedder()
    rows = []
    for name, how in formats.items():
        q = quantize(matrix, axis=-2, **how)
        row = {"format": name, "bits": q.bits_per_weight, "normal": relative_error(q, matrix)}
        bits = judge.bits_per_token(char.CONFIG, quantize_tree(plain, default=how, donate=False), read)
        row["char"] = judge.perplexity_change(bits, reference)
        if embedded is not None:
            row["minilm"] = embedded(how)
        rows.append(row)
    return rows


def _embedder() -> Any:
    """A function of a format: 1 - the mean cosine of its embeddings to those of f32. None without the model."""
    if importlib.util.find_spec(run_minilm.PACKAGE[0]) is None or importlib.util.find_spec("tokenizers") is None:
        return None
    path = model_file(*run_minilm.PACKAGE)
    heads = json.loads((path.parent / "config.json").read_text())["num_attention_heads"]
    tokenizer = Tokenizer.from_file(path.parent / "tokenizer.json", 256)
    tokens, real = bert.padded([tokenizer.encode(sentence) for sentence in run_minilm.sentences(32)])
    params = bert.nested(load(path))
    params.pop("pooler", None)
    exact = np.asarray(bert.embed(heads, params, tokens, real), np.float64)

    def turned(how: dict[str, Any]) -> float:
        small = quantize_tree(params, default=how, donate=False)
        found = np.asarray(bert.embed(heads, small, tokens, real), np.float64)
        return float(1 - np.mean(np.sum(found * exact, axis=-1)))

    return turned


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """One panel for each measure: bits per weight against the loss."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    held = [key for key in MEASURES if key in rows[0]]
    figure = Figure(figsize=(4.6 * len(held) + 2.4, 4.8), layout="constrained")
    for panel, key in zip(figure.subplots(1, len(held), squeeze=False)[0], held, strict=True):
        for number, row in enumerate(rows):
            label, loss = f"{number + 1}  {row['format']}", max(row[key], _LEAST)
            panel.scatter(row["bits"], loss, s=22, color=f"C{number % 10}", label=label, zorder=3)
            panel.annotate(str(number + 1), (row["bits"], loss), xytext=(4, 2), textcoords="offset points", fontsize=8)
        panel.set_yscale("log")
        panel.set_xlabel("bits per weight")
        panel.set_title(MEASURES[key], fontsize=10)
        panel.grid(alpha=0.3)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
