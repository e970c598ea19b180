"""What `eformer quantize` does with every tensor: the options of the command, the roles of the tensors, the outcome."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from eformer._quantize.paths import Leaf
from eformer._quantize.plan import Decision, plan
from eformer._quantize.rules import Recipe
from eformer.errors import UnusedRuleWarning
from eformer.serialization import GgufFile

from ._fail import WrongUse
from ._files import Tensor

_KEEP = ("none", "dense", "keep")


@dataclasses.dataclass(frozen=True)
class Wishes:
    """The options of the command, understood."""

    rules: list[tuple[str, Any]]
    default: Any
    axis: int | None
    min_size: int
    skip: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Decided:
    """What becomes of every tensor, and rules for `quantize_file` that say so, one per recipe."""

    decisions: list[Decision]
    rules: list[tuple[str, Any]]
    warnings: list[str]


def from_options(options: argparse.Namespace) -> Wishes:
    """Read rules from the command line and from a file; those of the command line come first."""
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
    return Wishes(rules, default, options.axis, options.min_size, skip)


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
        raise WrongUse(f"--rules {path} holds no object of patterns and formats.")
    return [(pattern, _choice(c) if isinstance(c, str) else c) for pattern, c in found.items()]


def decide(listed: Sequence[Tensor], wishes: Wishes) -> Decided:
    """Decide for every tensor by its name, shape and neighbours, as `quantize_tree` does for leaves."""
    leaves = [Leaf(tuple(re.split(r"[./]", t.path)), _stand_in(t)) for t in listed]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UnusedRuleWarning)
        try:
            found = plan(leaves, wishes.rules, default=wishes.default, min_size=wishes.min_size, skip=wishes.skip)
        except (TypeError, ValueError) as err:
            raise WrongUse(str(err)) from err
    decisions = [_with_axis(d, wishes.axis) for d in found]
    groups: dict[Recipe, list[str]] = {}
    for tensor, decision in zip(listed, decisions, strict=True):
        if decision.recipe is not None:
            groups.setdefault(decision.recipe, []).append(tensor.path)
    # One rule per recipe: quantize_file tries every rule on every name.
    rules = [(f"re:^(?:{'|'.join(map(re.escape, paths))})$", recipe) for recipe, paths in groups.items()]
    lines = [line for w in caught for line in str(w.message).splitlines() if line.startswith("rule ")]
    return Decided(decisions, rules, lines)


def _stand_in(tensor: Tensor) -> Any:
    """A leaf of that shape; one that is no dense array of floating values is nothing to quantize."""
    try:
        return jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)
    except TypeError:
        return None


def _with_axis(decision: Decision, axis: int | None) -> Decision:
    if decision.recipe is None or axis is None:
        return decision
    return dataclasses.replace(decision, recipe=dataclasses.replace(decision.recipe, axis=axis))


def described(decided: Decided) -> dict[str, Any]:
    """The plan as plain data."""
    lines = [
        {
            "path": ".".join(d.leaf.names),
            "format": "dense" if d.recipe is None else str(d.recipe.config.dtype),
            "axis": None if d.recipe is None else d.recipe.axis,
            "reason": d.reason,
        }
        for d in decided.decisions
    ]
    return {"tensors": lines, "warnings": decided.warnings}


def tokenizer_notes(opened: Any) -> dict[str, str]:
    """What `eformer generate` needs of a GGUF file besides its tensors and the numbers that quantize_file keeps."""
    if not isinstance(opened, GgufFile):
        return {}
    lists = {k: _plain(v) for k, v in opened.metadata.items() if k.startswith("tokenizer.") and not isinstance(v, str)}
    return {"tokenizer": json.dumps(lists)} if lists else {}


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
