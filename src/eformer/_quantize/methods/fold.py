"""AWQ factors that norms and biases take over, so that no array has to carry them.

A calibration has seen which vectors the inputs of matrices are proportional to (`Fold`). Where all these matrices get
"awq" factors along those channels, they share one set of them: the vectors are divided by it, the matrices multiplied.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from eformer._core import ImplicitArray
from eformer._formats.arguments import checked_axis
from eformer._jax import traces

from ..config import QuantizationConfig
from ..folds import FOLDED, Fold, Part
from ..plan import Decision
from ..statistics import Statistics
from .choose import Chosen
from .encode import shared_factors


class Folding:
    """The folds of a model that can be made; `chosen` is what every leaf gets, and `vectors` are the leaves that
    change, once their matrices are at hand."""

    def __init__(self, decisions: Sequence[Decision], chosen: dict[str, Chosen], calibration: Statistics | None):
        self.decisions = {decision.leaf.path: decision for decision in decisions}
        self.leaves = Counter(id(decision.leaf.value) for decision in decisions)
        self.chosen, self.vectors = chosen, dict[str, Any]()
        self.waiting: dict[str, Fold] = {}
        for fold in () if calibration is None else getattr(calibration, "folds", ()):
            if self._holds(fold):
                self.waiting |= dict.fromkeys((part.path for part in fold.matrices), fold)

    def _holds(self, fold: Fold) -> bool:
        parts = (*fold.vectors, *fold.matrices)
        if not all(part.path in self.decisions for part in parts):
            return False
        values = [self.decisions[part.path].leaf.value for part in parts]
        if any(self.leaves[id(value)] > 1 for value in values):  # tied to a leaf that is used elsewhere
            return False
        sizes = set(map(_sizes, values, parts))
        vectors = all(_stays(self.decisions[part.path]) for part in fold.vectors)
        return len(sizes) == 1 and None not in sizes and vectors and all(map(self._takes_factors, fold.matrices))

    def _takes_factors(self, part: Part) -> bool:
        how, decision = self.chosen.get(part.path), self.decisions[part.path]
        config, value = decision.config, decision.leaf.value
        if how is None or not how.method.startswith("awq") or not isinstance(config, QuantizationConfig):
            return False
        uses = [] if how.statistics is None else how.statistics.uses
        along = len(uses) == 1 and uses[0].axes == (part.axis,) and uses[0].stack == part.stack
        packed = config.axis if isinstance(config.axis, tuple) else (config.axis,)
        ndim = len(value.shape)
        of_stack = any(checked_axis(axis, ndim) % ndim in part.stack for axis in packed)
        return along and config.scaled and config.activations is None and not of_stack

    def abstract(self) -> dict[str, Chosen]:
        """What every leaf gets, with factors of which only the shape is known."""
        made = dict(self.chosen)
        for fold in dict.fromkeys(self.waiting.values()):
            for part in fold.matrices:
                lead, channels = _sizes(self.decisions[part.path].leaf.value, part) or ((), 0)
                made[part.path] = self._with(part.path, np.ones((math.prod(lead), channels), np.float32))
        return made

    def ready(self, path: str) -> Chosen:
        """How to quantize a leaf; the factors of its fold are searched for when its first matrix asks."""
        fold = self.waiting.get(path)
        if fold is not None:
            self._search(fold)
        return self.chosen[path]

    def _search(self, fold: Fold) -> None:
        paths = [part.path for part in fold.matrices]
        for path in paths:
            del self.waiting[path]
        leaves = {part.path: self.decisions[part.path].leaf.value for part in (*fold.vectors, *fold.matrices)}
        if not all(_is_at_hand(value) for value in leaves.values()):
            return
        statistics = [self.chosen[path].statistics for path in paths]
        configs = [dataclasses.replace(cast(Any, self.decisions[path].config), method=None) for path in paths]
        weights = [jnp.asarray(leaves[path]) for path in paths]
        factor = shared_factors(weights, statistics, configs)  # pyright: ignore[reportArgumentType]
        if factor is None:
            return
        divided, found = _divided(fold.vectors, leaves, np.asarray(factor, np.float64))
        if all(np.all(np.isfinite(np.asarray(value, np.float64))) for value in divided.values()):
            self.vectors |= divided
            self.chosen |= {path: self._with(path, found) for path in paths}

    def _with(self, path: str, factor: Any) -> Chosen:
        how = self.chosen[path]
        return dataclasses.replace(how, factor=factor, note=how.note + FOLDED)


def _sizes(value: Any, part: Part) -> tuple[tuple[int, ...], int] | None:
    """How many vectors or matrices there are along each axis of the stack, and of how many channels."""
    shape = getattr(value, "shape", ())
    if any(axis >= len(shape) for axis in (part.axis, *part.stack)):
        return None
    return tuple(shape[axis] for axis in part.stack), shape[part.axis]


def _stays(decision: Decision) -> bool:
    """Is a leaf kept as it is, and dense?"""
    value = decision.leaf.value
    plain = hasattr(value, "dtype") and not isinstance(value, ImplicitArray)
    return decision.config is None and plain and jnp.issubdtype(value.dtype, jnp.floating)


def _is_at_hand(value: Any) -> bool:
    return isinstance(value, np.ndarray) or (traces.is_concrete(value) and value.is_fully_addressable)


def _divided(vectors: Sequence[Part], leaves: dict[str, Any], factor: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
    """The vectors divided by factors (S, K), and the factors to multiply rows by: those that are left once the first
    vector is rounded to its dtype."""
    made = {}
    for number, part in enumerate(vectors):
        value = leaves[part.path]
        order = (*part.stack, part.axis, *(a for a in range(value.ndim) if a not in (*part.stack, part.axis)))
        rows = np.transpose(np.asarray(value, np.float64), order).reshape(factor.shape) + part.offset
        new = (rows / factor - part.offset).astype(value.dtype)
        if number == 0:
            rounded = np.asarray(new, np.float64) + part.offset
            left = rows / np.where(rounded == 0, 1, rounded)
            factor = np.where(np.abs(left / factor - 1) < 0.01, left, factor)  # a vector may be 0, or tiny
        split = new.reshape([value.shape[axis] for axis in order])
        new = np.ascontiguousarray(np.transpose(split, np.argsort(order)))
        made[part.path] = jax.device_put(new, value.sharding) if isinstance(value, jax.Array) else new
    return made, factor
