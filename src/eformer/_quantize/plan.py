"""What becomes of every leaf, decided before anything is computed."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from eformer._core import ImplicitArray
from eformer.errors import UnusedRuleWarning

from .config import QuantizationConfig
from .paths import Leaf
from .roles import GROUPS, Role, roles_of
from .rules import Choice, Recipe, Rules, recipe

FLOATS = ("float32", "bfloat16", "float16", "float64")
SKIP = ("norms", "biases", "routers", "positions")
MIN_SIZE = 4096


@dataclasses.dataclass(frozen=True)
class Decision:
    """A leaf, its role, how to quantize it (None: it stays as it is) and why it stays."""

    leaf: Leaf
    role: Role
    recipe: Recipe | None
    reason: str = ""


def plan(
    leaves: Sequence[Leaf],
    rules: Any = None,
    *,
    default: Choice = "nf4",
    min_size: int = MIN_SIZE,
    skip: Iterable[str] = SKIP,
) -> list[Decision]:
    """Decide for every leaf; rules that decide nothing are named in a warning."""
    if isinstance(rules, (str, QuantizationConfig, Recipe)):  # one choice for everything
        rules, default = None, rules
    ordered, fallback = Rules({} if rules is None else rules), recipe(default)
    kinds = skipped_kinds(skip)
    if min_size < 0:
        raise ValueError(f"min_size={min_size} is not allowed; give a number of values, 0 or more.")
    decisions, obstacles = [], {}
    for leaf, role in zip(leaves, roles_of(leaves), strict=True):
        rule = ordered.first(leaf.path)
        wanted = fallback if rule is None else rule.recipe
        why = "a rule keeps it" if wanted is None else obstacle(leaf, role, min_size, kinds)
        if rule is not None and rule.recipe is not None:
            obstacles.setdefault(rule.pattern, []).append((leaf.path, why))
        decisions.append(Decision(leaf, role, None if why else _with_axis(wanted, role), why))
    _report_unused(ordered, [leaf.path for leaf in leaves], obstacles)
    return decisions


def skipped_kinds(skip: Iterable[str]) -> frozenset[str]:
    """The kinds of leaves that group names stand for."""
    names = (skip,) if isinstance(skip, str) else tuple(skip)
    unknown = [name for name in names if name not in GROUPS]
    if unknown:
        raise ValueError(
            f"skip={names!r} names {unknown}; allowed are {', '.join(GROUPS)}. To keep leaves by their path, give a "
            'rule: {"*pattern*": None}.'
        )
    return frozenset(GROUPS[name] for name in names)


def obstacle(leaf: Leaf, role: Role, min_size: int, skip: frozenset[str]) -> str:
    """Why a leaf cannot or should not be quantized, or nothing."""
    value = leaf.value
    if isinstance(value, ImplicitArray):
        return "it is quantized already"
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        return "it is not an array"
    if not jnp.issubdtype(value.dtype, jnp.floating) or value.dtype.name not in FLOATS:
        return f"its dtype is {value.dtype.name}"
    if role.kind in skip:
        return f"it is a {role.kind}"
    size = math.prod(value.shape)
    if len(value.shape) < 2:
        return "it is no matrix"
    return f"it has {size} values, fewer than {min_size}" if size < min_size or not size else ""


def _with_axis(chosen: Recipe | None, role: Role) -> Recipe | None:
    if chosen is None or chosen.axis is not None:
        return chosen
    return dataclasses.replace(chosen, axis=role.axis(str(chosen.config.dtype)))


def _report_unused(rules: Rules, paths: Sequence[str], obstacles: dict[str, list[tuple[str, str]]]) -> None:
    lines = [str(unused) for unused in rules.unused(paths)]
    for pattern, found in obstacles.items():
        if all(why for _, why in found):
            path, why = found[0]
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            lines.append(f"rule {pattern!r} quantizes nothing: {path!r}{more} stays as it is because {why}")
    if lines:
        near = ", ".join(map(repr, paths[:3]))
        lines.append(f"paths look like {near}; `skip=` and `min_size=` decide which of them may be quantized")
        warnings.warn("\n".join(lines), UnusedRuleWarning, stacklevel=4)
