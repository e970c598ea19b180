"""`eformer evaluate`: how well a language model predicts a text, and how far it is from another model."""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np

from eformer._calibrate.evaluate import WINDOW, Evaluation
from eformer._calibrate.evaluate import evaluate as evaluate_tokens
from eformer.models import Model, forward
from eformer.ops.quantization import report as report_of

from ._commands import OK, Failure, WrongUse, add_json, print_json, print_table
from .generate import FORMATS, STORED, add_model, loaded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--text", required=True, metavar="FILE", help="the text to read; - is standard input")
    parser.add_argument("--against", metavar="MODEL", help="compare with this model, of the same vocabulary")
    parser.add_argument(
        "--against-format",
        choices=(STORED, *FORMATS),
        default=STORED,
        help="quantize the other model to this first (default: leave it as it is stored)",
    )
    parser.add_argument("--window", type=int, help=f"the most tokens a prediction sees (default: {WINDOW})")
    parser.add_argument("--stride", type=int, help="tokens from one window to the next (default: the window)")
    parser.add_argument("--tokens", type=int, metavar="N", help="read only this many tokens from the start")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Read the text with one model, or with two, and print the measures."""
    if options.tokens is not None and options.tokens < 2:
        raise WrongUse(f"--tokens {options.tokens} must be 2 or more: the first one is not predicted.")
    window = WINDOW if options.window is None else options.window
    if window < 1:
        raise WrongUse(f"--window {window} must be 1 or more.")
    if options.stride is not None and not 1 <= options.stride <= window:
        raise WrongUse(f"--stride {options.stride} must be from 1 to {window}, the window, or tokens are left out.")
    text = sys.stdin.read() if options.text == "-" else Path(options.text).read_text("utf-8", "replace")
    model = loaded(options.model, options)
    tokens = model.tokenizer.encode(text)[: options.tokens]
    if len(tokens) < 2:
        raise Failure(f"--text {options.text} holds {len(tokens)} tokens; give a text that is longer.")
    against = None
    if options.against is not None:
        other = loaded(options.against, options, options.against_format)
        _check_same_tokens(model, other, text, options)
        against = (functools.partial(forward, other.config), other.params)
    try:
        found = evaluate_tokens(
            functools.partial(forward, model.config),
            model.params,
            tokens,
            against=against,
            window=options.window,
            stride=options.stride,
        )
    except ValueError as err:  # windows that do not fit, tokens that the model does not know
        raise Failure(str(err)) from err
    _show(options, model, found)
    return OK


def _check_same_tokens(model: Model, other: Model, text: str, options: argparse.Namespace) -> None:
    start = text[:4096]
    if not np.array_equal(model.tokenizer.encode(start), other.tokenizer.encode(start)):
        raise Failure(
            f"{options.against} tokenizes the text differently from {options.model}; they cannot be compared."
        )


def _show(options: argparse.Namespace, model: Model, found: Evaluation) -> None:
    sizes = report_of(model.params)
    facts: dict[str, Any] = {"model": options.model, "format": options.format, "text": options.text}
    facts |= {"nbytes": sizes.nbytes, "bits_per_weight": sizes.bits_per_weight}
    if options.json:
        print_json(facts | {"against": options.against} | found.to_dict())
        return
    title = f"{options.model}, {sizes.bits_per_weight:.2f} bits per weight: {found.reading}"
    print_table(title, ["measure", "value ± standard error"], found.rows())
