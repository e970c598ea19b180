"""A model as programs that observe: traced once for every kind of batch, compiled, and run."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from eformer._core import ImplicitArray, implicit
from eformer._jax import jaxprs
from eformer._quantize.folds import Fold
from eformer._quantize.leaves import Tree, roles_of
from eformer._quantize.plan import SKIP, skipped_kinds
from eformer.errors import CalibrationWarning

from . import control as control  # the table of rules is filled by importing them
from . import rules as rules
from .frame import Frame, Key, Tracked, run, source
from .producers import Producers
from .views import Sums, whole

# The moments of one batch that are taken in one pass; where there are more, the batch is run several times.
PASS_BYTES = 4 << 30
_UNTRACEABLE = (
    "calibrate traces forward as jax.jit does: branch on values with jax.lax.cond, and pass anything that is not an "
    "array as a Python value in the batch."
)


@dataclasses.dataclass
class _Program:
    """A traced model: its constants, and one compiled function for every pass."""

    constants: Sequence[Any]
    passes: list[Callable[..., dict[Key, Sums]]]


class Model:
    """`forward` and the leaves of its first argument; `observed` are those to look at: number -> path."""

    def __init__(self, forward: Callable[..., Any], tree: Tree, observed: Mapping[int, str], diagonal_only: bool):
        self.forward, self.tree, self.observed, self.diagonal_only = forward, tree, observed, diagonal_only
        values = [leaf.value for leaf in tree.leaves]
        # Leaves that are one array (tied weights) are one leaf here, the first of them.
        self.first = {number: next(i for i, v in enumerate(values) if v is values[number]) for number in observed}
        self.arrays, self.structure, self.static = _taken_apart(values)
        self.programs: dict[Any, _Program] = {}
        self.order: dict[Key, None] = {}  # uses, in the order of the program, which compiled functions do not keep
        self.unseen: dict[int, set[str]] = {}
        self.other: dict[int, set[str]] = {}
        self.producers = Producers()
        self.hidden = False  # did a result hold what is no array?

    def run(self, batch: Any) -> Iterator[dict[Key, Sums]]:
        """The sums of one batch, in as many parts as there are passes."""
        arrays, structure, static = _taken_apart(jtu.tree_leaves(batch, is_leaf=_is_implicit))
        around = jtu.tree_structure(batch, is_leaf=_is_implicit)
        key = around, structure, tuple((i, _known_by(v)) for i, v in static.items()), tuple(map(jax.typeof, arrays))
        if key not in self.programs:
            self.programs[key] = self._traced(arrays, lambda a: around.unflatten(_put_together(a, structure, static)))
        program = self.programs[key]
        for one in program.passes:
            found = one(program.constants, self.arrays, arrays)
            yield {key: found[key] for key in self.order if key in found}

    def _traced(self, batch: list[Any], as_batch: Callable[[Any], Any]) -> _Program:
        @implicit
        def forward(values: list[Any], batch: Any) -> list[Any]:
            results = jtu.tree_leaves(self.forward(self.tree.rebuild(values), batch))
            self.hidden = self.hidden or not all(map(_is_seen, results))
            return [result for result in results if isinstance(result, jax.Array)]

        def call(leaves: list[Any], batch: list[Any]) -> list[Any]:
            return forward(_put_together(leaves, self.structure, self.static), as_batch(batch))

        try:
            jaxpr = jax.make_jaxpr(call)(self.arrays, batch)
        except jax.errors.JAXTypeError as err:
            err.add_note(_UNTRACEABLE)
            raise
        numbered = _put_together(range(len(self.arrays)), self.structure, self.static)
        places = [(self.first[number], numbered[number]) for number in self.observed]
        constants = jaxprs.constants(jaxpr)
        vectors = {place: (number, self.arrays[place].shape) for number, place in self._alone(numbered)}
        self.producers.read(jaxpr, vectors, len(self.arrays) + len(batch))

        def observing(numbers: Iterable[int]) -> Callable[..., dict[Key, Sums]]:
            return lambda consts, leaves, batch: self._observe(jaxpr, places, set(numbers), consts, leaves, batch)

        sizes = jax.eval_shape(observing(self.first.values()), constants, self.arrays, batch)
        return _Program(constants, [jax.jit(observing(part)) for part in _parts(sizes)])

    def _observe(self, jaxpr: Any, places: Any, numbers: set[int], consts: Any, leaves: Any, batch: Any) -> Any:
        ordered = sorted({number for number, _ in places})
        frame = Frame([source(self.tree.leaves[number].value.shape) for number in ordered], self.diagonal_only)
        values = [*leaves, *batch]
        for number, place in places:
            if number in numbers:
                values[place] = Tracked(values[place], (whole(ordered.index(number), values[place].shape),))
        run(frame, jaxpr, values, consts)
        for theirs, ours in ((frame.unseen, self.unseen), (frame.other, self.other)):
            for at, notes in theirs.items():
                ours.setdefault(ordered[at], set()).update(notes)
        found = {(ordered[at], axes, stack): sums for (at, axes, stack), sums in frame.sums.items()}
        self.order |= dict.fromkeys(found)
        return found

    def _alone(self, numbered: Sequence[Any]) -> Iterator[tuple[int, int]]:
        """The floating-point leaves that are one array each, and that no other leaf is: number, place."""
        values = Counter(id(leaf.value) for leaf in self.tree.leaves)
        for number, leaf in enumerate(self.tree.leaves):
            plain = isinstance(numbered[number], int) and values[id(leaf.value)] == 1
            if plain and jnp.issubdtype(leaf.value.dtype, jnp.floating):
                yield number, numbered[number]

    def folds(self) -> tuple[Fold, ...]:
        """Where factors of inputs can go. A result that is no array may hide what else becomes of a value."""
        return () if self.hidden else self.producers.folds([leaf.path for leaf in self.tree.leaves])

    def warn(self, seen: Iterable[int]) -> None:
        """Name the leaves whose products could not be seen, to the caller of the caller."""
        roles, kinds, lines = roles_of(self.tree.leaves), skipped_kinds(SKIP), []
        for number, path in self.observed.items():
            first = self.first[number]
            others = self.other.get(first, set())
            if first in self.unseen:
                lines.append(f"{path!r}: not observed in {', '.join(sorted(self.unseen[first]))}")
            elif first not in seen and others != {"lookup"} and roles[number].kind not in kinds:
                uses = ", ".join(sorted(others))
                lines.append(f"{path!r} was {f'only used by {uses}' if uses else 'never used'}")
        if lines:
            more = [] if len(lines) <= 10 else [f"and {len(lines) - 10} more"]
            text = "no (or not all) inputs of these leaves were recorded; they can only be rounded:"
            warnings.warn("\n".join([text, *lines[:10], *more]), CalibrationWarning, stacklevel=3)


def _parts(sizes: Mapping[Key, Any]) -> list[list[int]]:
    """Leaves in groups whose sums fit into one pass, a leaf at least in each."""
    parts, room = [], 0
    for number in dict.fromkeys(key[0] for key in sizes):
        arrays = jtu.tree_leaves([sums for key, sums in sizes.items() if key[0] == number])
        size = sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)
        if not parts or size > room:
            parts.append([])
            room = PASS_BYTES
        parts[-1].append(number)
        room -= size
    return parts or [[]]


# -- leaves that are traced, and leaves that are constants -------------------------------------------------------------


def _is_implicit(x: Any) -> bool:
    return isinstance(x, ImplicitArray)


def _is_seen(x: Any) -> bool:
    """Is this result an array, or nothing that could hold one?"""
    return isinstance(x, (jax.Array, np.ndarray, str, bytes, int, float, complex))


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, ImplicitArray)) or (isinstance(x, np.ndarray) and x.dtype.kind not in "OSUMm")


def _taken_apart(values: Sequence[Any]) -> tuple[list[Any], Any, dict[int, Any]]:
    """The arrays in these values, those of implicit arrays one by one; how to put them together; the other values."""
    static = {i: value for i, value in enumerate(values) if not _is_array(value)}
    arrays, structure = jtu.tree_flatten([value for value in values if _is_array(value)])
    return list(map(jnp.asarray, arrays)), structure, static


def _put_together(arrays: Sequence[Any], structure: Any, static: Mapping[int, Any]) -> list[Any]:
    dynamic = structure.unflatten(arrays)
    given = iter(dynamic)
    return [static[i] if i in static else next(given) for i in range(len(dynamic) + len(static))]


def _known_by(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value
