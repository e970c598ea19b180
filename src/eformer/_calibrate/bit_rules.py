"""Budgets and targets as people write them, and rules as people read them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from eformer._quantize.config import QuantizationConfig
from eformer._quantize.plan import Choice, Rules, as_config

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def kind_of(path: str) -> str:
    """
    >>> kind_of("layers/12/mlp/up")
    'layers/*/mlp/up'
    """
    return re.sub(r"(?<![^/])\d+(?![^/])", "*", path)


def readable(chosen: Mapping[str, Choice]) -> dict[str, Choice]:
    """Rules for these paths: one for every kind of leaf, after one for each that differs from most of its kind.

    >>> readable({"layers/0/up": "nf4", "layers/1/up": "nf4", "layers/2/up": "int8"})
    {'layers/2/up': 'int8', 'layers/*/up': 'nf4'}
    """
    kinds: dict[str, list[str]] = {}
    for path in chosen:
        kinds.setdefault(kind_of(path), []).append(path)
    special: dict[str, Choice] = {}
    general: dict[str, Choice] = {}
    for kind, paths in kinds.items():
        counts = [repr(chosen[path]) for path in paths]
        most = max(counts, key=counts.count)
        general[kind] = next(chosen[path] for path in paths if repr(chosen[path]) == most)
        special |= {path: chosen[path] for path in paths if repr(chosen[path]) != most}
    rules = special | general
    found = Rules(rules)
    fits = all((rule := found.first(path)) is not None and rule.config == as_config(chosen[path]) for path in chosen)
    return rules if fits else dict(chosen)  # a pattern of one kind that matches another


def named(choice: Choice) -> str:
    """A choice in a few words."""
    brief = short(as_config(choice))
    if not isinstance(brief, dict):
        return "dense" if brief is None else str(brief)
    rest = [f"{name}={value}" for name, value in brief.items() if name != "dtype"]
    return ", ".join([str(brief["dtype"]), *rest])


def short(config: QuantizationConfig | None) -> Choice:
    """A configuration as one would write it: without the axis, which a rule need not name, and without defaults."""
    if config is None:
        return None
    plain = QuantizationConfig(config.dtype)
    differing = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in ("dtype", "axis") and getattr(config, field.name) != getattr(plain, field.name)
    }
    return {"dtype": str(config.dtype), **differing} if differing else str(config.dtype)


def bytes_of(budget: int | str, size: int) -> int:
    """
    >>> bytes_of("4.25 bits", 1000), bytes_of("2.1 GB", 1000), bytes_of(7, 1000)
    (531, 2100000000, 7)
    """
    if isinstance(budget, (int, np.integer)) and not isinstance(budget, bool):
        return int(budget)
    if isinstance(budget, str) and (found := re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]+)\s*", budget)):
        number, unit = found.groups()
        if unit.lower() in ("bit", "bits"):
            return math.floor(float(number) * size / 8)
        if unit.upper() in _UNITS:
            return math.floor(float(number) * _UNITS[unit.upper()])
    raise ValueError(
        f'budget={budget!r} is not understood; write "4.25 bits" (per weight), "2.1 GB", or a number of bytes.'
    )


def fraction(target: Any) -> float:
    """
    >>> fraction("+1 % perplexity"), fraction(0.01)
    (0.01, 0.01)
    """
    if isinstance(target, str) and (found := re.fullmatch(r"\s*\+?\s*([\d.]+)\s*%\s*(perplexity)?\s*", target)):
        return float(found[1]) / 100
    if isinstance(target, (int, float)) and not isinstance(target, bool) and target > 0:
        return float(target)
    raise ValueError(f'target={target!r} is not understood; write "+1 % perplexity", or 0.01 for the same.')
