"""Factors of inputs that other leaves can take over: which vectors produce what matrices are multiplied with."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

FOLDED = ", folded"  # what reports add to the method


@dataclasses.dataclass(frozen=True)
class Part:
    """A leaf of a fold: `axis` has the channels, `stack` numbers vectors or matrices. A vector acts with `offset`
    added to it, as that of a norm which multiplies by `1 + w`."""

    path: str
    axis: int
    stack: tuple[int, ...]
    offset: float = 0.0


@dataclasses.dataclass(frozen=True)
class Fold:
    """All inputs of these matrices are proportional to these vectors together, a channel at a time, and nothing else
    sees either: vectors divided by factors and rows of the matrices multiplied by them are the same model."""

    vectors: tuple[Part, ...]
    matrices: tuple[Part, ...]


def to_text(folds: Sequence[Fold]) -> str:
    return json.dumps([dataclasses.asdict(fold) for fold in folds])


def from_text(text: str) -> tuple[Fold, ...]:
    return tuple(
        Fold(*(tuple(map(_part, fold[name])) for name in ("vectors", "matrices"))) for fold in json.loads(text)
    )


def _part(given: dict[str, Any]) -> Part:
    return Part(**{**given, "stack": tuple(given["stack"])})
