"""Which vectors produce the inputs of matrices, read from a program: where factors of inputs can be folded.

Nothing is computed. A value of the program shows a leaf, or is proportional to vectors along one of its axes (the
product of anything with a norm's weight, the sum of that and a bias). Such a value may be moved, converted and
multiplied by others before products use it. Whatever else becomes of a leaf, or of such a value, rules its fold out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from eformer._jax import jaxprs
from eformer._quantize.folds import Fold, Part

from . import views
from .control import PROGRAM
from .views import View, _NotFollowed


@dataclasses.dataclass(frozen=True)
class Shown:
    """A view of a leaf, and what was added to it."""

    view: View
    offset: float = 0.0


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A value proportional to vectors; `view` says which of its axes are the channels, as it does for a leaf."""

    view: View
    vectors: frozenset[int]


Known = Shown | Scaled


class Producers:
    """What is known of the leaves, by number, from all programs of a model."""

    def __init__(self) -> None:
        self.parts: dict[int, tuple[bool, Part]] = {}  # is it a matrix? and which part of a fold, without its path
        self.together: dict[int, int] = {}  # a leaf and another one of its fold
        self.other: set[int] = set()  # leaves that are used in another way as well

    def read(self, jaxpr: Any, leaves: dict[int, tuple[int, Sequence[int]]], count: int) -> None:
        """Look at a program of `count` arguments; `leaves` are the numbers and shapes of some, by argument."""
        values = [Shown(views.whole(leaves[i][0], leaves[i][1])) if i in leaves else None for i in range(count)]
        self.lost(self.run(jaxpr, values))

    def folds(self, paths: Sequence[str]) -> tuple[Fold, ...]:
        groups: dict[int, list[int]] = {}
        for number in self.parts:
            groups.setdefault(self._root(number), []).append(number)
        ruled_out = set(map(self._root, self.other))
        found = []
        for root, numbers in groups.items():
            parts: tuple[list[Part], list[Part]] = [], []
            for number in sorted(numbers):
                is_matrix, part = self.parts[number]
                parts[is_matrix].append(dataclasses.replace(part, path=paths[number]))
            if root not in ruled_out and all(parts):
                found.append(Fold(*map(tuple, parts)))
        return tuple(found)

    def lost(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Shown):
                self.other.add(value.view.source)
            elif isinstance(value, Scaled):
                self.other |= value.vectors

    def _root(self, number: int) -> int:
        while self.together.get(number, number) != number:
            number = self.together[number]
        return number

    def _join(self, numbers: Iterable[int]) -> None:
        first, *rest = map(self._root, numbers)
        self.together.update(dict.fromkeys(rest, first))

    def _is(self, number: int, is_matrix: bool, part: Part) -> None:
        """A leaf is part of folds in one way only."""
        if self.parts.setdefault(number, (is_matrix, part)) != (is_matrix, part):
            self.other.add(number)

    # -- programs ------------------------------------------------------------------------------------------------------

    def run(self, jaxpr: Any, values: Sequence[Any]) -> list[Any]:
        return jaxprs.followed(jaxpr, values, self._visit)

    def _visit(self, name: str, operands: list[Any], params: dict[str, Any], shape: Sequence[int]) -> Any:
        """What is known of the results; None if nothing is."""
        known = [x for x in operands if isinstance(x, Known)]
        if not known:
            return _number(name, operands, params)
        if name in PROGRAM:
            return self.run(params[PROGRAM[name]], operands)
        if name == "call_hi_primitive" and (remat := jaxprs.remat_hi_primitive(params["_prim"])) is not None:
            return self.run(remat[0], operands)
        try:
            if name == "scan":
                return self._scan(operands, params)
            if name == "dot_general":
                return self._product(operands[0], operands[1], params["dimension_numbers"])
            if name in _ELEMENTWISE:
                return [_spread(_ELEMENTWISE[name](self, *operands), shape)]
            if name in ("optimization_barrier", "device_put"):
                return operands
            return [_moved(name, operands, params)]
        except _NotFollowed:
            self.lost(known)
            return None

    def _scan(self, operands: list[Any], params: dict[str, Any]) -> None:
        n_consts, n_carry = jaxprs.scan_counts(params)
        first, step = n_consts + n_carry, object()  # which stands for the number of a step
        inside: list[Any] = operands[:n_consts]
        for i, value in enumerate(operands[n_consts:], start=n_consts):
            if i >= first and isinstance(value, Shown) and not value.view.picked:
                view = views.squeeze(views.pick(value.view, 0, [step]), [0])
                inside.append(Shown(view, value.offset))
            else:
                self.lost([value])
                inside.append(None)
        self.lost(self.run(params["jaxpr"], inside))

    # -- single equations ----------------------------------------------------------------------------------------------

    def _product(self, lhs: Any, rhs: Any, dimensions: Any) -> None:
        (left, right), batch = dimensions
        x, w, pairs = (lhs, rhs, (left, right)) if isinstance(rhs, Shown) else (rhs, lhs, (right, left))
        if not isinstance(x, Scaled) or not isinstance(w, Shown) or w.offset or batch[0]:
            raise _NotFollowed("a product")
        axes = {axis for at in pairs[1] for axis, _, size in w.view.axes[at] if size > 1}
        channels = [_channels(x.view)[at] for at in pairs[0]]
        if len(axes) != 1 or w.view.picked or channels != [_channels(w.view)[at] for at in pairs[1]]:
            raise _NotFollowed("a product along other axes")
        (axis,) = axes
        stack = _stack(w.view)
        size = w.view.leaf[axis]
        same = _index(x.view) == _index(w.view) and _sizes(x.view) == _sizes(w.view)
        if not same or int(np.prod([n for pieces in channels for _, n in pieces])) != size or _joined(w.view):
            raise _NotFollowed("a product with another matrix of the stack")
        self._is(w.view.source, True, Part("", axis, stack))
        self._join([w.view.source, *x.vectors])

    def _scaled(self, value: Any) -> Scaled:
        """A value as one that is proportional to vectors."""
        if isinstance(value, Scaled):
            return value
        view = value.view
        pieces = [piece for axis in view.axes for piece in axis if piece[2] > 1]
        axes = {axis for axis, _, _ in pieces}
        whole = len(axes) == 1 and int(np.prod([n for _, _, n in pieces])) == view.leaf[next(iter(axes))]
        if not whole or view.picked or _joined(view):
            raise _NotFollowed("no vector")
        self._is(view.source, False, Part("", axes.pop(), _stack(view), value.offset))
        return Scaled(view, frozenset([view.source]))

    def times(self, a: Any, b: Any) -> Scaled:
        if isinstance(a, Known) and isinstance(b, Known):
            if isinstance(a, Scaled) is isinstance(b, Scaled):
                raise _NotFollowed("a product of two")
            one, rest = (a, b) if isinstance(a, Scaled) else (b, a)
            self.lost([rest])
            return self._scaled(one)
        return self._scaled(a if isinstance(a, Known) else b)

    def over(self, a: Any, b: Any) -> Scaled:
        if isinstance(b, Known):
            raise _NotFollowed("a division by it")
        return self._scaled(a)

    def plus(self, a: Any, b: Any) -> Any:
        for value, other in ((a, b), (b, a)):
            if isinstance(value, Shown) and _is_number(other):
                return Shown(value.view, value.offset + float(other))
        return self._sum(a, b)

    def minus(self, a: Any, b: Any) -> Any:
        if isinstance(a, Shown) and _is_number(b):
            return Shown(a.view, a.offset - float(b))
        return self._sum(a, b)

    def _sum(self, a: Any, b: Any) -> Scaled:
        if not (isinstance(a, Known) and isinstance(b, Known)):
            raise _NotFollowed("a sum with something else")
        a, b = self._scaled(a), self._scaled(b)
        if any(f(a.view) != f(b.view) for f in (_channels, _index, _sizes)):
            raise _NotFollowed("a sum of different channels")
        both = a.vectors | b.vectors
        self._join(both)
        return Scaled(a.view, both)


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "mul": Producers.times, "div": Producers.over, "add": Producers.plus, "add_any": Producers.plus,
    "sub": Producers.minus,
}  # fmt: skip


def _spread(value: Any, shape: Sequence[int]) -> Any:
    """The result of an operation whose operands were broadcast, as they are along axes of length 1."""
    if len(shape) != len(value.view.shape):
        raise _NotFollowed("a number")
    return dataclasses.replace(value, view=views.broadcasted(value.view, shape, range(len(shape))))


def _moved(name: str, operands: list[Any], params: dict[str, Any]) -> Known:
    """The same value in another shape or dtype."""
    value = operands[0]
    if not isinstance(value, Known):
        raise _NotFollowed(name)
    if (name == "neg" and isinstance(value, Shown)) or (name == "convert_element_type" and not _floating(params)):
        raise _NotFollowed(name)
    view = value.view
    if name in views.MOVES:
        view = views.MOVES[name](view, params, view.shape)
    elif name == "dynamic_slice" and all(map(_is_number, operands[1:])):
        sizes = zip(view.shape, params["slice_sizes"], map(int, operands[1:]), strict=True)
        view = views.cut(view, [np.arange(size) + min(max(at, 0), n - size) for n, size, at in sizes], view.shape)
    elif name not in ("neg", "convert_element_type"):
        raise _NotFollowed(name)
    if isinstance(value, Scaled) and view.picked:
        raise _NotFollowed("a part of the channels")
    return dataclasses.replace(value, view=view)


def _floating(params: dict[str, Any]) -> bool:
    return jnp.issubdtype(params["new_dtype"], jnp.floating)


def _number(name: str, operands: list[Any], params: dict[str, Any]) -> list[Any] | None:
    """A constant that is still one number."""
    if name == "broadcast_in_dim" and _is_number(operands[0]):
        return operands[:1]
    if name == "convert_element_type" and _is_number(operands[0]):
        return [np.asarray(operands[0]).astype(params["new_dtype"])]
    return None


def _is_number(x: Any) -> bool:
    plain = x is not None and not isinstance(x, Known) and np.ndim(x) == 0
    return plain and jnp.issubdtype(getattr(x, "dtype", type(x)), np.number)


def _channels(view: View) -> list[list[tuple[int, int]]]:
    """Of every axis of the array, the pieces of leaf axes that it is, as (stride, size)."""
    return [[(stride, size) for _, stride, size in pieces if size > 1] for pieces in view.axes]


def _stack(view: View) -> tuple[int, ...]:
    return tuple(sorted(axis for axis in view.taken if view.leaf[axis] > 1))


def _index(view: View) -> list[Any]:
    """Which vector or matrix of its stack this is."""
    return [view.taken[axis] for axis in _stack(view)]


def _sizes(view: View) -> list[int]:
    return [view.leaf[axis] for axis in _stack(view)]


def _joined(view: View) -> bool:
    return any(start is not None for start in view.starts)
