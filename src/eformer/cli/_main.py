"""Finds the command and runs it. A command is a row of `COMMANDS` and a module.

The module has two functions: `add_arguments(parser)` and `run(options)`, which returns the exit status. It is imported
only when it is asked for, so that a command may need what others do not.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from ._versions import version

# name -> (module, one line of help)
COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": ("eformer.cli.doctor", "versions, native kernels, a self-check and a few timings"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. `argv` is by default that of the process."""
    given = list(sys.argv[1:] if argv is None else argv)
    if not given or given[0] not in COMMANDS:
        return _without_command(given)
    name, *rest = given
    module, text = COMMANDS[name]
    command = importlib.import_module(module)
    parser = argparse.ArgumentParser(prog=f"eformer {name}", description=text)
    command.add_arguments(parser)
    return command.run(parser.parse_args(rest))


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
