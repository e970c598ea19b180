"""Layers of a scanned stack, and where in the stack they are.

Inside a scan a layer is a slice, and what XLA hands to a native kernel is a copy of it. The rule of scan notes here
which array every slice comes from; a product of slices that are noted reads the stack in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple


class Place(NamedTuple):
    """Entry `index` along the first axis of `stack`; `layer` is the slice itself."""

    layer: Any
    stack: Any
    index: Any


_places: ContextVar[dict[int, Place]] = ContextVar("eformer_stacks", default={})  # noqa: B039 - never changed in place


@contextlib.contextmanager
def noted(places: Sequence[Place]) -> Iterator[None]:
    """Inside the block these layers are known by their identity."""
    token = _places.set({**_places.get(), **{id(place.layer): place for place in places}})
    try:
        yield
    finally:
        _places.reset(token)


def place_of(layer: Any) -> Place | None:
    """Where a layer comes from, if that is known here."""
    found = _places.get().get(id(layer))
    return found if found is not None and found.layer is layer else None


def passed_on(outside: Sequence[Any], inside: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """For a function that is traced: what is known of its arguments outside holds inside as well."""
    known = [(place_of(o), i) for o, i in zip(outside, inside, strict=True)]
    return noted([place._replace(layer=i) for place, i in known if place is not None])
