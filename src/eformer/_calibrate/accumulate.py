"""Sums of all batches in float64, in memory or in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from eformer._quantize.folds import Fold
from eformer._quantize.leaves import Tree
from eformer._quantize.statistics import Described, LeafStatistics, Statistics, create, of_uses
from eformer.errors import CalibrationError

from .frame import Key
from .views import Sums


class Accumulator:
    """What was found so far, by leaf and use; `place` is the folder that holds the numbers, if one was asked for."""

    def __init__(self, tree: Tree, place: Path | None):
        self.tree, self.place = tree, place
        self.sums: dict[Key, dict[str, np.ndarray]] = {}

    @property
    def seen(self) -> set[int]:
        return {number for number, _, _ in self.sums}

    def add(self, found: Mapping[Key, Sums], batch: int) -> None:
        """The sums of one batch."""
        self._check(found, batch)
        for key, sums in found.items():
            if key not in self.sums:
                self.sums[key] = self._zeros(key, "moment" not in sums)
            for name, total in self.sums[key].items():
                part = np.asarray(sums[name]).reshape(total.shape)
                (np.maximum if name == "absmax" else np.add)(total, part, out=total)

    def _zeros(self, key: Key, diagonal_only: bool) -> dict[str, np.ndarray]:
        leaf = self.tree.leaves[key[0]]
        described = Described(tuple(leaf.value.shape), key[1], key[2], diagonal_only)
        if self.place is None:
            return {name: np.zeros(shape) for name, shape in described.shapes().items()}
        _, (arrays,) = create(self.place / f"{len(self.sums):05d}.safetensors", [(leaf.path, described)])
        return arrays

    def _check(self, found: Mapping[Key, Sums], batch: int) -> None:
        """Raise where an input is no number, naming the leaf that comes first in the model."""
        wrong = {}
        for key, sums in found.items():
            finite = np.isfinite(np.asarray(sums["diagonal"])).reshape(*np.shape(sums["count"]), -1).all(-1)
            if not finite.all():
                wrong[key] = np.argwhere(~finite)[0].tolist()
        if not wrong:
            return
        # In a stack, the leaf whose first layer with such an input is the lowest one.
        depth = len(next(iter(wrong.values())))
        key = min((k for k in wrong if len(wrong[k]) == depth), key=lambda k: wrong[k])
        absmax = np.max(np.asarray(found[key]["absmax"]))
        what = (
            "NaN or infinity" if not np.isfinite(absmax) else f"values as large as {absmax:.3g}, whose squares overflow"
        )
        where = f" (number {', '.join(map(str, wrong[key]))} of the stack)" if wrong[key] else ""
        raise CalibrationError(
            f"in batch {batch}, what {self.tree.leaves[key[0]].path!r}{where} is multiplied with holds {what}. Leave "
            "that batch out, or find what produces it: jax.config.update('jax_debug_nans', True)."
        )

    def statistics(self, observed: Mapping[int, str], first: Mapping[int, int], folds: Sequence[Fold]) -> Statistics:
        """All of it; leaves that are the same array (`first`) have the same statistics."""
        if self.place is not None:
            create(self.place / "folds.safetensors", [], folds)
        uses: dict[int, list[LeafStatistics]] = {}
        for (number, axes, stack), sums in self.sums.items():
            shape = tuple(self.tree.leaves[number].value.shape)
            parts = {"moment": None, **sums}
            uses.setdefault(number, []).append(LeafStatistics(shape, axes, stack, **parts))
        found = {path: of_uses(uses[first[n]]) for n, path in observed.items() if first[n] in uses}
        return Statistics(found, folds)
