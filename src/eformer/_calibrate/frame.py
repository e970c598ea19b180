"""A program, an equation at a time: every array that shows an observed leaf is followed to the products it is in.

All equations are computed as they are. Beside them, a `Frame` sums what the leaves are multiplied with. The body of a
loop, of a branch or of a shard_map is a frame of its own, whose leaves are its arguments; `control` has those.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eformer._jax import avals, jaxprs

from . import products, views
from .views import Sums, View, _NotFollowed

Key = tuple[int, tuple[int, ...], tuple[int, ...]]  # source, contracted axes, stack axes


@dataclasses.dataclass(frozen=True)
class Source:
    """A leaf, or an argument of a body: its shape here, and where a shard_map splits it, the mesh axes of every axis
    and the sizes of the whole. `above` are the mesh axes of stacks that it is one matrix of."""

    shape: tuple[int, ...]
    names: tuple[tuple[str, ...], ...]
    whole: tuple[int, ...]
    above: frozenset[str] = frozenset()

    def split_by(self, stack: Iterable[int]) -> frozenset[str]:
        """The mesh axes that sums vary over if these are the axes of the stack."""
        return self.above.union(name for axis in stack for name in self.names[axis])


def source(shape: Sequence[int]) -> Source:
    return Source(tuple(shape), ((),) * len(shape), tuple(shape))


@dataclasses.dataclass(frozen=True)
class Tracked:
    """A value, and the leaves that it shows: one, or those that it is a concatenation of."""

    value: Any
    views: tuple[View, ...]


@dataclasses.dataclass
class Frame:
    """Sums of every leaf and use, and notes on what happened to leaves that could not be followed.

    `manual` are the mesh axes of the enclosing shard_maps, `is_typed` whether types say what varies over them.
    """

    sources: Sequence[Source]
    diagonal_only: bool
    manual: tuple[str, ...] = ()
    is_typed: bool = True
    sums: dict[Key, Sums] = dataclasses.field(default_factory=dict)
    unseen: dict[int, set[str]] = dataclasses.field(default_factory=dict)  # products that could not be looked into
    other: dict[int, set[str]] = dataclasses.field(default_factory=dict)  # operations that are no products

    def add(self, view: View, batch: Sequence[int], contracted: Sequence[int], sums: Sums) -> None:
        """Sums over a product with an array, to be added to those of the leaf it shows."""
        found = views.project(view, batch, contracted, sums, self.sources[view.source].whole)
        key = view.source, found.axes, found.stack
        axes = self.sources[view.source].split_by(found.stack)
        part = {name: avals.vary(array, axes) for name, array in found.sums.items()}
        if all(entry is None for entry in found.index):
            self.sums[key] = products.added(self.sums[key], part) if key in self.sums else part
            return
        start = self.sums[key] if key in self.sums else self._zeros(key, part)
        self.sums[key] = products.added_at(start, part, found.index)

    def _zeros(self, key: Key, like: Sums) -> Sums:
        number, axes, stack = key
        one = self.sources[number]
        lead, side = [one.shape[axis] for axis in stack], [one.whole[axis] for axis in axes]
        shapes = {
            name: jax.ShapeDtypeStruct((*lead, *side * views.SIDES[name]), array.dtype) for name, array in like.items()
        }
        return products.zeros(shapes, one.split_by(stack))

    def note(self, kept: dict[int, set[str]], tracked: Tracked, what: str) -> None:
        for view in tracked.views:
            kept.setdefault(view.source, set()).add(what)

    # -- products ------------------------------------------------------------------------------------------------------

    def product(self, weight: Tracked, x: Any, pairs: Any, primitive: str) -> None:
        """Record x, of which axes are paired with axes of the weight: `pairs` = (contracted, batch)."""
        contracted, batch = (sorted(axes) for axes in pairs)
        for view in weight.views:
            try:
                self._product(view, x, contracted, batch)
            except _NotFollowed as why:
                self.note(self.unseen, Tracked(None, (view,)), f"{primitive}: {why}")

    def _product(self, view: View, x: Any, contracted: list[Any], batch: list[Any]) -> None:
        if len(batch) == 1 and (found := views.numbered(view, batch[0][0])) is not None:
            self._product_with_numbers(*found, x, contracted, batch[0])
            return
        split: list[str] = []
        for axis, x_axis in contracted:
            names = self._names(view, axis)
            if names:
                x = lax.all_gather(x, names, axis=x_axis, tiled=True)
                split += names
        sums = products.moments(x, [b for _, b in batch], [c for _, c in contracted], self.diagonal_only)
        self._summed(view, [a for a, _ in batch], [a for a, _ in contracted], sums, split)

    def _product_with_numbers(self, view: View, numbers: Any, x: Any, contracted: list[Any], batch: Any) -> None:
        """Each entry along the batch axis is multiplied with the matrix of its number: grouped by number, they need no
        moment of their own."""
        if any(self._names(view, axis) for axis, _ in contracted):
            raise _NotFollowed("a product along an axis that devices share")
        sides = [x_axis for _, x_axis in contracted]
        sizes = [x.shape[x_axis] for x_axis in sides]
        tokens = [axis for axis in range(x.ndim) if axis not in (batch[1], *sides)]
        rows = lax.transpose(avals.on_every_device(x), [batch[1], *tokens, *sides])
        rows = rows.reshape(len(numbers), -1, math.prod(sizes))
        owner = jnp.repeat(numbers, rows.shape[1])
        order = jnp.argsort(owner)
        counts = jnp.bincount(owner, length=view.shape[batch[0]])
        sums = products.grouped(rows.reshape(-1, rows.shape[-1])[order], counts, self.diagonal_only)
        split = {n: a.reshape(*a.shape[:1], *sizes * views.SIDES[n]) for n, a in sums.items()}
        self._summed(view, [batch[0]], [axis for axis, _ in contracted], split, ())

    def _summed(self, view: View, batch: list[int], contracted: list[int], sums: Sums, split: Sequence[str]) -> None:
        if self.manual:
            stack = self.sources[view.source].split_by(stack_axes(view, batch))
            varying = frozenset[str]().union(*map(avals.varying_axes, sums.values()))
            tokens = [name for name in self.manual if name not in stack and name not in split]
            tokens = [name for name in tokens if name in varying] if self.is_typed else tokens
            sums = products.reduced_over_devices(sums, tokens)
            sums = products.same_on_devices(sums, split)
        self.add(view, batch, contracted, sums)

    def _names(self, view: View, axis: int) -> tuple[str, ...]:
        """The mesh axes that split an axis of an array, which then has to be the whole axis of the leaf."""
        one, pieces = self.sources[view.source], view.axes[axis]
        names = tuple(name for leaf_axis, _, _ in pieces for name in one.names[leaf_axis])
        for leaf_axis, _, size in pieces if names else ():
            if len(pieces) > 1 or leaf_axis in view.picked or size != one.shape[leaf_axis]:
                raise _NotFollowed("a product along a part of an axis that devices share")
        return names

    def grouped(self, weight: Tracked, x: Any, group_sizes: Any, group: int, contracted: int) -> None:
        sums = products.grouped(x, group_sizes, self.diagonal_only)
        for view in weight.views:
            try:
                if self._names(view, contracted):
                    raise _NotFollowed("a product along an axis that devices share")
                self._summed(view, [group], [contracted], sums, ())
            except _NotFollowed as why:
                self.note(self.unseen, Tracked(None, (view,)), f"ragged_dot_general: {why}")


def stack_axes(view: View, batch: Sequence[int]) -> set[int]:
    """The axes of a leaf that number matrices, if these axes of the array are batch axes of a product."""
    shown = {axis for pieces in view.axes for axis, _, _ in pieces}
    gone = {axis for axis in range(len(view.leaf)) if axis not in shown}
    return gone | {axis for b in batch for axis, _, _ in view.axes[b]}


def dense(value: Any) -> Any:
    return value.value if isinstance(value, Tracked) else value


def run(frame: Frame, jaxpr: Any, values: Sequence[Any], constants: Sequence[Any] | None = None) -> list[Any]:
    """The results of a jaxpr whose arguments may be tracked."""
    return jaxprs.evaluate(jaxpr, values, functools.partial(visit, frame), constants)


_OPAQUE = ("pallas", "ffi", "custom", "triton", "tpu", "pure_callback", "io_callback")  # what may hide a product

# Rules by the name of the primitive: rule(frame, primitive, operands, params) -> results, tracked ones among them.
RULES: dict[str, Callable[..., Any]] = {}


def rule(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(names, fn))
        return fn

    return decorate


def bind(primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    return jaxprs.computed(primitive, list(map(dense, operands)), params)


def visit(frame: Frame, primitive: Any, operands: list[Any], params: dict[str, Any]) -> Any:
    tracked = [operand for operand in operands if isinstance(operand, Tracked)]
    if not tracked:
        return bind(primitive, operands, params)
    found = RULES.get(primitive.name)
    if found is not None:
        return found(frame, primitive, operands, params)
    for operand in tracked:
        opaque = primitive.name.startswith(_OPAQUE)
        frame.note(frame.unseen if opaque else frame.other, operand, primitive.name)
    return bind(primitive, operands, params)
