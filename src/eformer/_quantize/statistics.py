"""What the matrices of a model are multiplied with, as `eformer.calibrate` records it: containers, files, sums.

A file is a safetensors file with four tensors per use, `{number}/moment`, `diagonal`, `absmax` and `count`, and the
table of uses in its metadata. A folder of such files is read as one; arrays that are read stay on disk, memory mapped.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eformer.errors import CalibrationError

from . import folds as _folds
from .folds import Fold

PARTS = ("moment", "diagonal", "absmax", "count")
_TABLE = "eformer.statistics"
_FOLDS = "eformer.folds"
_SUFFIX = ".safetensors"
_MIXED = (
    "one of these statistics holds whole moments and the other one diagonals only; calibrate both with the same "
    "diagonal_only."
)


@dataclasses.dataclass(frozen=True)
class LeafStatistics:
    """The inputs x of one leaf, summed over all tokens in float64.

    `axes` are the axes of the leaf that products contract and `stack` those that number its matrices (layers of a
    scanned stack, experts), both ascending. K is the product of the contracted sizes, flattened in that order.

    `moment` (stack..., K, K) is the sum of x xᵀ, or None if only its diagonal was asked for; `diagonal` (stack..., K)
    the sum of x²; `absmax` (stack..., K) the largest |x|; `count` (stack...) the number of tokens. A leaf that products
    contract along different axes (tied weights) has `others`, one for each further use.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    stack: tuple[int, ...]
    moment: np.ndarray | None
    diagonal: np.ndarray
    absmax: np.ndarray
    count: np.ndarray
    others: tuple[LeafStatistics, ...] = ()

    def __post_init__(self) -> None:
        for name in ("shape", "axes", "stack"):
            object.__setattr__(self, name, tuple(map(int, getattr(self, name))))
        for name, shape in _described(self).shapes().items():
            found = np.shape(getattr(self, name))
            if found != shape:
                raise CalibrationError(
                    f"{name} has shape {found}; statistics of a leaf of shape {self.shape}, contracted along "
                    f"{self.axes}, with stacks along {self.stack}, need {shape}."
                )

    @property
    def channels(self) -> int:
        """K, the length of x."""
        return math.prod(self.shape[axis] for axis in self.axes)

    @property
    def stack_sizes(self) -> tuple[int, ...]:
        return tuple(self.shape[axis] for axis in self.stack)

    @property
    def tokens(self) -> int:
        """Tokens that every matrix of the leaf has seen: the smallest count."""
        return int(np.min(self.count)) if np.size(self.count) else 0

    @property
    def uses(self) -> list[LeafStatistics]:
        """This use and the others, each without others of its own."""
        return [dataclasses.replace(self, others=()), *self.others]

    def along(self, axes: int | Iterable[int]) -> LeafStatistics | None:
        """The use that contracts these axes (negative ones count from the end), or None."""
        given = (axes,) if isinstance(axes, int) else axes
        wanted = tuple(sorted(axis % len(self.shape) for axis in given))
        return next((use for use in self.uses if use.axes == wanted), None)

    @property
    def nbytes(self) -> int:
        return sum(getattr(use, part).nbytes for use in self.uses for part in PARTS if getattr(use, part) is not None)

    def __repr__(self) -> str:
        kind = "diagonal only" if self.moment is None else "whole moment"
        stack = f", stack {self.stack}" if self.stack else ""
        more = f", {len(self.others)} more use{'s' * (len(self.others) > 1)}" if self.others else ""
        return f"LeafStatistics(shape {self.shape}, axes {self.axes}{stack}, {kind}, {self.tokens:,} tokens{more})"

    def __add__(self, other: LeafStatistics) -> LeafStatistics:
        if self.shape != other.shape:
            raise CalibrationError(
                f"statistics of leaves of shapes {self.shape} and {other.shape} cannot be added: they are two models."
            )
        return of_uses(added([*self.uses, *other.uses]))


def of_uses(uses: Sequence[LeafStatistics]) -> LeafStatistics:
    """One entry for all uses of a leaf."""
    return dataclasses.replace(uses[0], others=tuple(uses[1:]))


def added(uses: Iterable[LeafStatistics]) -> list[LeafStatistics]:
    """Uses of one leaf, those of the same axes and stack summed."""
    sums: dict[Any, LeafStatistics] = {}
    for use in uses:
        key = use.axes, use.stack
        sums[key] = _sum(sums[key], use) if key in sums else use
    return list(sums.values())


def _sum(a: LeafStatistics, b: LeafStatistics) -> LeafStatistics:
    if (a.moment is None) != (b.moment is None):
        raise CalibrationError(_MIXED)
    moment = None if a.moment is None or b.moment is None else a.moment + b.moment
    return dataclasses.replace(
        a,
        moment=moment,
        diagonal=a.diagonal + b.diagonal,
        absmax=np.maximum(a.absmax, b.absmax),
        count=a.count + b.count,
    )


class Statistics(Mapping[str, LeafStatistics]):
    """What every matrix of a model was multiplied with: a mapping from paths, as rules and reports spell them.

    Made by `eformer.calibrate`. `a + b` is what one calibration on the batches of both would have found. `folds` says
    which norms and biases can take over factors of inputs: what the programs of all batches agree on.

    >>> one = LeafStatistics((2, 3), (0,), (), np.eye(2), np.ones(2), np.ones(2), np.asarray(1.0))
    >>> stats = Statistics({"dense/kernel": one})
    >>> stats + stats
    Statistics(1 leaf, whole moments, 2 tokens, 72 bytes)
    >>> (stats + stats)["dense/kernel"].moment
    array([[2., 0.],
           [0., 2.]])
    """

    def __init__(
        self,
        leaves: Mapping[str, LeafStatistics] | Iterable[tuple[str, LeafStatistics]] = (),
        folds: Iterable[Fold] = (),
    ):
        self._leaves = dict(leaves)
        self.folds = tuple(folds)

    def __getitem__(self, path: str) -> LeafStatistics:
        if path not in self._leaves:
            known = ", ".join(map(repr, list(self._leaves)[:3]))
            raise KeyError(f"there are no statistics of {path!r}; paths look like {known or 'none'}")
        return self._leaves[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    @property
    def diagonal_only(self) -> bool:
        return any(leaf.moment is None for leaf in self.values())

    @property
    def tokens(self) -> int:
        """The most tokens any matrix has seen."""
        return int(max((np.max(use.count, initial=0) for leaf in self.values() for use in leaf.uses), default=0))

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.values())

    def __repr__(self) -> str:
        leaves = "1 leaf" if len(self) == 1 else f"{len(self)} leaves"
        kind = "diagonals only" if self.diagonal_only else "whole moments"
        return f"Statistics({leaves}, {kind}, {self.tokens:,} tokens, {self.nbytes:,} bytes)"

    def __add__(self, other: Statistics) -> Statistics:
        if not isinstance(other, Statistics):
            return NotImplemented
        if self and other and self.diagonal_only != other.diagonal_only:
            raise CalibrationError(_MIXED)
        sums = dict(self)
        for path, leaf in other.items():
            try:
                sums[path] = sums[path] + leaf if path in sums else leaf
            except CalibrationError as err:
                err.add_note(f"at {path!r}")
                raise
        if not (self and other):
            return Statistics(sums, self.folds or other.folds)
        return Statistics(sums, [fold for fold in self.folds if fold in other.folds])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all to one safetensors file, an array at a time."""
        uses = [(name, use) for name, leaf in self.items() for use in leaf.uses]
        data, places = create(path, [(name, _described(use)) for name, use in uses], self.folds)
        for (_, use), place in zip(uses, places, strict=True):
            for part, array in place.items():
                array[...] = getattr(use, part)
        data.flush()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Statistics:
        """Read a file, or a folder as `calibrate(directory=...)` fills one. Arrays stay on disk until they are used."""
        place = Path(path)
        files = sorted(place.glob("*" + _SUFFIX)) if place.is_dir() else [place]
        if not files:
            raise CalibrationError(f"{path}: there are no statistics in this folder.")
        found: dict[str, list[LeafStatistics]] = {}
        folds: list[Fold] = []
        for file in files:
            uses, more = _read(file)
            folds += more
            for name, use in uses:
                found.setdefault(name, []).append(use)
        return cls({name: of_uses(added(uses)) for name, uses in found.items()}, folds)


def check_statistics(given: Any, name: str, fix: str = "") -> None:
    """Raise unless this is what `calibrate` returns, or None."""
    known = isinstance(given, Mapping) and all(isinstance(leaf, LeafStatistics) for leaf in given.values())
    if given is None or known:
        return
    if not fix:
        one = isinstance(given, LeafStatistics)
        fix = (
            "Give those of the whole model" if one else "Give what eformer.calibrate(forward, params, batches) returns"
        )
        fix += ", or a file of them, eformer.Statistics.load(path)."
    shown = f"={given!r:.60}" if isinstance(given, (str, int, float)) else ""
    raise TypeError(f"{name}{shown} is of type {type(given).__name__}, not the Statistics of a model. {fix}")


# -- files -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Described:
    """A use without its numbers: what a file needs to know in order to have room for them."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    stack: tuple[int, ...]
    diagonal_only: bool

    def shapes(self) -> dict[str, tuple[int, ...]]:
        lead, k = [self.shape[a] for a in self.stack], math.prod(self.shape[a] for a in self.axes)
        parts = {"moment": (*lead, k, k), "diagonal": (*lead, k), "absmax": (*lead, k), "count": tuple(lead)}
        return {part: shape for part, shape in parts.items() if part != "moment" or not self.diagonal_only}


def _described(use: LeafStatistics) -> Described:
    return Described(use.shape, use.axes, use.stack, use.moment is None)


def create(
    path: str | os.PathLike[str], uses: Sequence[tuple[str, Described]], folds: Sequence[Fold] = ()
) -> tuple[np.memmap, list[dict[str, np.ndarray]]]:
    """A new file of zeros for these uses: its memory map, and the arrays of every use in it, to be written to."""
    header: dict[str, Any] = {}
    table, at = [], 0
    for number, (name, use) in enumerate(uses):
        table.append({"path": name, **dataclasses.asdict(use)})
        for part, shape in use.shapes().items():
            end = at + 8 * math.prod(shape)
            header[f"{number}/{part}"] = {"dtype": "F64", "shape": list(shape), "data_offsets": [at, end]}
            at = end
    header["__metadata__"] = {_TABLE: json.dumps(table), _FOLDS: _folds.to_text(folds)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + max(at, 1))  # a map of nothing is not allowed
    data = np.memmap(path, np.uint8, "r+", offset=8 + len(text))
    return data, [_arrays(data, header, number) for number in range(len(table))]


def _arrays(data: np.ndarray, header: Mapping[str, Any], number: int) -> dict[str, np.ndarray]:
    entries = {part: header[f"{number}/{part}"] for part in PARTS if f"{number}/{part}" in header}
    return {
        part: data[slice(*entry["data_offsets"])].view("<f8").reshape(entry["shape"]) for part, entry in entries.items()
    }


def _read(path: Path) -> tuple[list[tuple[str, LeafStatistics]], tuple[Fold, ...]]:
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > os.fstat(file.fileno()).st_size:
                raise ValueError("it ends too early")
            header = json.loads(file.read(length))
        table = json.loads(header["__metadata__"][_TABLE])
        folds = _folds.from_text(header["__metadata__"].get(_FOLDS, "[]"))  # earlier versions wrote none
        uses = []
        data = np.memmap(path, np.uint8, "r", offset=8 + length)
        for number, row in enumerate(table):
            arrays = {"moment": None, **_arrays(data, header, number)}
            uses.append((row["path"], LeafStatistics(row["shape"], row["axes"], row["stack"], **arrays)))
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise CalibrationError(
            f"{path} holds no statistics that can be read ({err!r}); give a file that Statistics.save wrote, or a "
            "folder that calibrate(directory=...) filled."
        ) from err
    return uses, folds
