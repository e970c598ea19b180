"""Finds the command and runs it. A command is a row of `COMMANDS` and a module.

The module has two functions: `add_arguments(parser)` and `run(options)`, which returns the exit status. It is imported
only when it is used, so one command may need packages that others do not.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from eformer.errors import CheckpointError

from ._common import FAILED, Failure, version

# name -> (module, one line of help)
COMMANDS: dict[str, tuple[str, str]] = {
    "quantize": ("eformer.cli.quantize", "quantize a checkpoint, a tensor at a time"),
    "inspect": ("eformer.cli.inspect", "list what is in a safetensors or GGUF file"),
    "report": ("eformer.cli.report", "bits per weight, sizes and errors of a checkpoint"),
    "generate": ("eformer.cli.generate", "continue a text with a language model"),
    "bench": ("eformer.cli.bench", "time products with quantized matrices against dense ones"),
    "doctor": ("eformer.cli.doctor", "versions, native kernels, a self-check and a few timings"),
}
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 for success, 1 for failure, 2 for wrong use.

    `argv` is by default that of the process.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["demo"]:
        return _said("eformer demo", "the demonstration is not part of the package; run `make demo` in a checkout", 2)
    if not given or given[0] not in COMMANDS:
        return _without_command(given)
    name, *rest = given
    module, text = COMMANDS[name]
    return run_command(f"eformer {name}", f"{text[0].upper()}{text[1:]}.", importlib.import_module(module), rest)


def run_command(name: str, text: str, command: Any, argv: Sequence[str]) -> int:
    """Run a module that is a command. Expected errors become one line; bugs keep their traceback."""
    parser = argparse.ArgumentParser(prog=name, description=text)
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
        return _said(name, err, FAILED)
    except KeyboardInterrupt:
        return _said(name, "interrupted", INTERRUPTED)


def _said(name: str, what: object, status: int) -> int:
    print(f"{name}: {' '.join(str(what).split())}", file=sys.stderr)
    return status


def _without_command(given: list[str]) -> int:
    lines = [f"  {name:12} {text}" for name, (_, text) in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="eformer",
        usage="eformer [--version] COMMAND ...",
        description="Quantized arrays for JAX.",
        epilog="\n".join(["commands:", *lines, "", "`eformer COMMAND --help` says more."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    parser.add_argument("command", nargs="?", choices=COMMANDS, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.version:
        print(f"eformer {version('eformer')}")
        return 0
    parser.print_help()
    return 2
