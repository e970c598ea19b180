"""The options of `eformer quantize` as arguments of `quantize_file`, and a plan as data."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from eformer._quantize.plan import Plan

from ._fail import WrongUse

_KEEP = ("none", "dense", "keep")


def from_options(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of the planner. Rules of the command line come before those of a file."""
    rules = [_rule(text) for text in options.rule]
    if options.rules is not None:
        rules += _rules_file(options.rules)
    default: Any = _choice(options.format)
    if options.double_quant or options.block_size is not None:
        if default != "nf4":
            raise WrongUse(f"--double-quant and --block-size are options of nf4, and --format is {options.format!r}.")
        default = {"dtype": "nf4", "double_quant": options.double_quant}
        default |= {} if options.block_size is None else {"block_size": options.block_size}
    skip = tuple(name for name in options.skip.split(",") if name)
    return {"rules": rules, "default": default, "axis": options.axis, "min_size": options.min_size, "skip": skip}


def _rule(text: str) -> tuple[str, Any]:
    pattern, equals, choice = text.rpartition("=")
    if not equals or not pattern:
        raise WrongUse(f"--rule {text!r} is not of the form PATTERN=FORMAT, such as '*embed*=int8' or '*norm*=none'.")
    return pattern, _choice(choice)


def _choice(text: str) -> Any:
    return None if text.lower() in _KEEP else text


def _rules_file(path: Path) -> list[tuple[str, Any]]:
    try:
        found = json.loads(path.read_text())
    except ValueError as err:
        raise WrongUse(f"--rules {path} is not JSON: {err}.") from err
    if not isinstance(found, dict):
        raise WrongUse(f"--rules {path} does not hold an object of patterns and formats.")
    return [(pattern, _choice(c) if isinstance(c, str) else c) for pattern, c in found.items()]


def described(planned: Plan) -> dict[str, Any]:
    """The plan as plain data."""
    lines = [
        {
            "path": ".".join(d.leaf.names),
            "format": "dense" if d.config is None else str(d.config.dtype),
            "axis": None if d.config is None else d.config.axis,
            "reason": d.reason,
        }
        for d in planned.decisions
    ]
    return {"tensors": lines, "warnings": planned.warnings}
