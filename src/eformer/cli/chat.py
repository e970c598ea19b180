"""`eformer chat`: a conversation with a language model, which remembers what was said."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from eformer.models import Memory, stream

from ._commands import OK
from .generate import PIECE, add_model, add_sampling, in_words, open_model, warn_of_length

_HELP = "An empty line is skipped; /reset clears the conversation; /exit or end of input quits."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_sampling(parser)
    parser.set_defaults(tokens=512)
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")


def run(options: argparse.Namespace) -> int:
    """Read a line, answer it, until there are no more."""
    model, how = open_model(options)
    asked = sys.stdin.isatty()
    if asked:
        print(_HELP, file=sys.stderr)
    start = [{"role": "system", "content": options.system}] if options.system else []
    said, memory = list(start), Memory(options.cache)
    for line in _lines("> " if asked else ""):
        if line == "/exit":
            break
        if line == "/reset":
            said, memory = list(start), Memory(options.cache)
        if line in ("", "/reset"):
            continue
        said.append({"role": "user", "content": line})
        prompt, answer = model.tokenizer.encode(in_words(model, said), bare=True), ""
        warn_of_length(model, len(prompt), options.tokens)
        for text, _ in stream(
            model, prompt, options.tokens, stop=options.stop, sampling=how, chunk=PIECE, memory=memory
        ):
            answer += text
            print(text, end="", flush=True)
        print()
        said.append({"role": "assistant", "content": answer})
    return OK


def _lines(prompt: str) -> Iterator[str]:
    while True:
        try:
            yield input(prompt).strip()
        except EOFError:
            return
