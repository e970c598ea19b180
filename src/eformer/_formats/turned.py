"""Transposes that moved codes inside a program, which a product can do without.

Formats without blocks store codes in their logical orientation, so `w.T` moves them. A product takes either
orientation: where it still has the array that was transposed, it multiplies with that one, and XLA drops the transpose.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

_NOTE = "_turned"


@dataclasses.dataclass(frozen=True)
class Turned:
    """What an array was, and the permutation of its axes. `made` is the array: copies of it may differ."""

    made: weakref.ref[Any]
    source: Any
    permutation: tuple[int, ...]

    def numbers(self, axes: Any, q_first: bool) -> Any:
        """The dimension numbers of the same product with `source`; None if its result has other axes first.

        `axes` are those that are contracted, of q and of x, and those of batches.
        """
        (qc, xc), (qb, xb) = axes
        kept = [axis for i, axis in enumerate(self.permutation) if i not in (*qc, *qb)]
        if kept != sorted(kept):
            return None
        pairs = [(tuple(self.permutation[axis] for axis in q), x) for q, x in ((qc, xc), (qb, xb))]
        return tuple(pair if q_first else pair[::-1] for pair in pairs)


def remember(made: Any, source: Any, permutation: Sequence[int]) -> Any:
    made.__dict__[_NOTE] = Turned(weakref.ref(made), source, tuple(permutation))
    return made


def before(q: Any) -> Turned | None:
    """What `q` was made of by a transpose, if that is known."""
    found = q.__dict__.get(_NOTE)
    return found if found is not None and found.made() is q else None
