"""Finds the command and runs it, and what commands share. A command is a row of `COMMANDS` and a module.

The module has two functions: `add_arguments(parser)` and `run(options)`, which returns the exit status. It is imported
only when it is used, so one command may need packages that others do not. Tables are drawn with rich where it is
installed (the extra `cli`), in plain text without it.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from eformer._table import are_numbers, lines, printable
from eformer.errors import CheckpointError
from eformer.errors import CommandError as Failure
from eformer.errors import CommandUsageError as WrongUse

# name -> (module, one line of help)
COMMANDS: dict[str, tuple[str, str]] = {
    "quantize": ("eformer.cli.quantize", "quantize a checkpoint, one tensor at a time"),
    "inspect": ("eformer.cli.inspect", "list what is in a safetensors or GGUF file"),
    "export": ("eformer.cli.export", "write a quantized checkpoint in the format of another program"),
    "report": ("eformer.cli.report", "bits per weight, sizes and errors of a checkpoint"),
    "evaluate": ("eformer.cli.evaluate", "perplexity of a language model, and its distance from another"),
    "generate": ("eformer.cli.generate", "continue a text with a language model"),
    "chat": ("eformer.cli.chat", "talk with a language model"),
    "bench": ("eformer.cli.bench", "time products with quantized matrices against dense ones"),
    "tune": ("eformer.cli.tune", "measure which GPU kernels are the quickest here, and keep that in a file"),
    "doctor": ("eformer.cli.doctor", "versions, native kernels, a self-check and a few timings"),
}
INTERRUPTED = 130
_FRAMES = "----"  # how a note of JAX begins that says where its frames went
# Options by other names: those of the functions, and of other programs.
_MEANT = {"--dtype": "--format", "--bits": "--format", "--group-size": "--block-size"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 for success, 1 for failure, 2 for wrong use.

    `argv` is by default that of the process.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["help"]:
        given = [*given[1:2], "--help"]
    if given[:1] == ["demo"]:
        return _said("eformer demo", "the demonstration is not part of the package; run `make demo` in a checkout", 2)
    if not given or given[0] not in COMMANDS:
        return _without_command(given)
    name, *rest = given
    module, text = COMMANDS[name]
    return run_command(f"eformer {name}", f"{text[0].upper()}{text[1:]}.", importlib.import_module(module), rest)


def run_command(name: str, text: str, command: Any, argv: Sequence[str]) -> int:
    """Run a module that is a command. Expected errors become one line; bugs keep their traceback."""
    parser = _Parser(prog=name, description=text)
    command.add_arguments(parser)
    options = parser.parse_args(argv)
    try:
        return command.run(options)
    except Failure as err:
        return _said(name, err, err.status)
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (CheckpointError, OSError) as err:
        notes = [note for note in getattr(err, "__notes__", ()) if not note.startswith(_FRAMES)]
        return _said(name, ". ".join([str(err).removesuffix(".") if notes else str(err), *notes]), FAILED)
    except KeyboardInterrupt:
        again = "; the same command continues where it stopped" if name.endswith("quantize") else ""
        return _said(name, f"interrupted{again}", INTERRUPTED)


class _Parser(argparse.ArgumentParser):
    """Names what a mistyped option or command may have been meant to be."""

    def error(self, message: str) -> NoReturn:
        known = [option for option in self._option_string_actions if option.startswith("--")]
        words = re.findall(r"--[\w-]+", message) if message.startswith("unrecognized") else []
        if message.startswith("argument command"):
            known, words = list(COMMANDS), re.findall(r"invalid choice: '([^']*)'", message)
        for word in words:
            meant = [_MEANT[word]] if _MEANT.get(word) in known else difflib.get_close_matches(word, known, 1)
            message += f". Did you mean {meant[0]}?" if meant else ""
        super().error(message)


def _said(name: str, what: object, status: int) -> int:
    print(f"{name}: {' '.join(str(what).split())}", file=sys.stderr)
    return status


def _without_command(given: list[str]) -> int:
    lines = [f"  {name:12} {text}" for name, (_, text) in COMMANDS.items()]
    parser = _Parser(
        prog="eformer",
        usage="eformer [--version] COMMAND ...",
        description="Quantized arrays for JAX.",
        epilog="\n".join(["commands:", *lines, "", "`eformer COMMAND --help` says more."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("command", nargs="?", choices=COMMANDS, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.version:
        print(f"eformer {version('eformer')}")
        return 0
    parser.print_help()
    return 2


OK, FAILED = 0, Failure.status


def version(name: str) -> str:
    """The version of a distribution, also when it is run from its sources without being installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def numbers(option: str, text: str) -> list[int]:
    """A list of whole numbers of the command line, each at least 1."""
    if not all(part.strip().isdecimal() and int(part) for part in text.split(",")):
        raise WrongUse(f"{option} {text!r} is not a list of whole numbers from 1 on, such as 1,4,16.")
    return [int(part) for part in text.split(",")]


def names(option: str, text: str, allowed: Sequence[str]) -> list[str]:
    """A list of names of the command line."""
    given = text.split(",")
    if unknown := [name for name in given if name not in allowed]:
        raise WrongUse(f"{option} names {unknown[0]!r}; allowed are {', '.join(allowed)}.")
    return given


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def print_json(found: Any) -> None:
    print(json.dumps(found, indent=2))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A titled table; columns of numbers are aligned to the right."""
    if importlib.util.find_spec("rich") is None:
        print("\n  ".join([printable(title), *lines(columns, rows)]))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for i, column in enumerate(columns):
        justify = "right" if are_numbers([row[i] for row in rows]) else "left"
        table.add_column(column, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*map(printable, row))
    # A file or a pipe has no width.
    wide = None if sys.stdout.isatty() else 160
    console = Console(markup=False, highlight=False, width=wide)
    # Above the table: rich would wrap a title to the width of the table.
    console.print(printable(title), soft_wrap=True)
    console.print(table)
