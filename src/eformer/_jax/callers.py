"""Who is calling: what the frames above reveal, and the user's file and line behind an operation.

The functions that look at frames say what is lost should JAX rename what they look for.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jax.tree_util as jtu
from jax._src import source_info_util as _source_info
from jax.sharding import PartitionSpec

_OPERATOR_MODULE = "jax._src.numpy.array_methods"
_CONSTRUCTOR_MODULE = "jax._src.numpy.array_constructors"
_CALLED_FOR_OTHERS = ("jax.", "flax.", "haiku.", "equinox.", "optax.")


def read_by_array_operator(depth: int = 2) -> bool:
    """Is an attribute being read by an operator of jax.Array?

    Those ask for `__jax_array__` before they let the other operand have its say, and JAX has no other way to decline.
    Without this question `x @ q` outside a scope could not dispatch. Should JAX move that code, the answer becomes
    False: `x @ q` then materializes instead, and stays right.
    """
    return sys._getframe(depth).f_globals.get("__name__") == _OPERATOR_MODULE


def read_by_array_constructor(depth: int = 2) -> bool:
    """Is an attribute being read by jnp.asarray or jnp.array, that is, was a dense array requested by name?

    Calls by JAX or a framework, on arrays they are given, do not count. Should JAX move that code,
    the answer becomes False: jnp.asarray(q) then warns as any other function does, and stays right.
    """
    frame: FrameType | None = sys._getframe(depth)
    asked = False
    while frame is not None and (name := frame.f_globals.get("__name__", "")).startswith(_CALLED_FOR_OTHERS):
        if name != _CONSTRUCTOR_MODULE:
            return False
        asked, frame = True, frame.f_back
    return asked


def split_in_shard_map(array: Any, frame: FrameType) -> tuple[Any, dict[int, int]]:
    """The PartitionSpec for the whole of `array`, an argument of the shard_map of this frame, and into how many parts
    it cuts which axis; None and nothing if its stored arrays have specs of their own.

    Should JAX rename what is looked for here, the answer is that, too, and nothing is refused.
    """
    given = frame.f_locals
    try:
        spec = _spec_for(array, given["in_specs"], given["args"])
        sizes = given["mesh"].shape
        names = {i: (e if isinstance(e, tuple) else (e,)) for i, e in enumerate(spec or ()) if e is not None}
        return spec, {i: math.prod(sizes[name] for name in entry) for i, entry in names.items()}
    except (AttributeError, KeyError, TypeError, ValueError):  # specs that do not fit the arguments; JAX says so
        return None, {}


def spec_of_result(array: Any) -> Any:
    """The PartitionSpec for the whole of `array`, a result of the shard_map whose body has just run; None if its stored
    arrays have specs of their own, or if it is no such result.

    Should JAX rename what is looked for here, the answer becomes None, and nothing is refused.
    """
    frame = next(_frames("jax._src.shard_map", "f_wrapped"), None)
    given = {} if frame is None else frame.f_locals
    try:
        return _spec_for(array, given["out_specs"], given["ans"]) if {"out_specs", "ans"} <= given.keys() else None
    except ValueError:  # specs that do not fit the results; JAX says so
        return None


# Functions that take values apart by a function of `jax.tree_util`: of JAX, and of Flax Linen.
_WATCHED = {
    "_equality_errors": "jax._src.tree_util",
    "value_and_grad_f": "jax._src.api",
    "param": "flax.core.scope",
    "wrapped": "jax._src.shard_map",
    "associative_scan": "jax._src.lax.control_flow.loops",
}


def who_takes_apart() -> FrameType | None:
    """The frame of a watched function that has asked `jax.tree_util` to take the array apart that is asking.

    Should one of them be renamed, the answer becomes None, and what it has to say is said in its own words.
    """
    frame = sys._getframe(2).f_back
    if frame is None or (module := _WATCHED.get(frame.f_code.co_name)) is None:
        return None
    return frame if frame.f_globals.get("__name__") == module else None


def in_loop_or_branch(frame: FrameType | None) -> bool:
    """Was this function called by a loop or a conditional of JAX, which compares structures? Else: False."""
    for _ in range(8):
        if frame is not None and frame.f_globals.get("__name__", "").startswith("jax._src.lax.control_flow"):
            return True
        frame = frame and frame.f_back
    return False


def shown_by_jax(depth: int = 2) -> bool:
    """Is a value being put into a message of JAX? Should JAX move that code: False, and there is no hint in it."""
    return sys._getframe(depth).f_globals.get("__name__", "").startswith("jax._src.")


def _spec_for(array: Any, specs: Any, values: Any) -> Any:
    """The PartitionSpec that stands for the whole of an array in the specs of some values."""
    is_spec = lambda x: x is None or isinstance(x, PartitionSpec)  # noqa: E731
    held = jtu.tree_map(lambda spec, part: _holds(part, array), specs, values, is_leaf=is_spec)
    pairs = zip(jtu.tree_leaves(specs, is_leaf=is_spec), jtu.tree_leaves(held), strict=True)
    return next((spec for spec, found in pairs if found), None)


def _holds(tree: Any, array: Any) -> bool:
    return any(node is array for node in jtu.tree_leaves(tree, is_leaf=lambda x: x is array))


def _frames(module: str, function: str) -> Iterator[FrameType]:
    """The running calls of a function, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == module:
            yield frame
        frame = frame.f_back


# Packages that call functions on behalf of the user: their frames are not the place to look at.
_FRAMEWORKS = ("flax", "haiku", "equinox", "optax", "jax", "jaxtyping", "orbax")
_STDLIB = os.path.dirname(os.__file__) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_source_info.register_exclusion(_PACKAGE + os.sep)


class _Replays(threading.local):
    def __init__(self) -> None:
        self.tracebacks: list[Any] = []


_replays = _Replays()


class replaying:
    """A block in which a jaxpr is replayed: its equations may have lost their origin, the call around it has not."""

    __slots__ = ()

    def __enter__(self) -> None:
        _replays.tracebacks.append(_source_info._source_info_context.context.traceback)

    def __exit__(self, *exc: object) -> None:
        _replays.tracebacks.pop()


def at_origin(origin: Any) -> contextlib.AbstractContextManager[Any]:
    """A block about an equation of a jaxpr that came from there: `replayed_location` is where that was written."""
    return _source_info.user_context(origin.traceback)


def replayed_location() -> tuple[str, int] | None:
    """(file, line) the jaxpr being replayed remembers for the operation being processed, or None."""
    here = _source_info._source_info_context.context.traceback
    for traceback in (here, *reversed(_replays.tracebacks)):
        frames = list(_source_info.user_frames(traceback)) if traceback is not None else []
        places = [(frame.file_name, frame.start_line) for frame in frames]
        if places:
            return next((place for place in places if not _is_framework(place[0])), places[0])
    return None


def calling_location() -> tuple[str, int]:
    """(file, line) of the user's code that is running."""
    running = sys._getframe(1)  # JAX cuts its own tracebacks at the function being traced
    first = None
    while running is not None:
        file = running.f_code.co_filename
        if _source_info.is_user_filename(file):
            if not _is_framework(file):
                return file, running.f_lineno
            first = first or (file, running.f_lineno)
        running = running.f_back
    return first or ("<unknown>", 0)


def program_location() -> tuple[str, int] | None:
    """(file, line) of the outermost code that is running and not installed: a line of a script, a cell or a test.

    A string that is executed counts only if there is nothing else: it is how worker processes begin.
    """
    found, text, running = None, None, sys._getframe(1)
    while running is not None:
        file, place = running.f_code.co_filename, (running.f_code.co_filename, running.f_lineno)
        if file == "<string>":
            text = place
        elif _source_info.is_user_filename(file) and not _is_installed(file):
            found = place
        running = running.f_back
    return found or text


@functools.lru_cache(maxsize=4096)
def _is_installed(file: str) -> bool:
    parts = file.replace(os.sep, "/").split("/")
    return file.startswith(("<frozen", _STDLIB)) or "site-packages" in parts or "dist-packages" in parts


@functools.lru_cache(maxsize=4096)
def _is_framework(file: str) -> bool:
    parts = file.replace(os.sep, "/").split("/")
    return any(a in ("site-packages", "dist-packages") and b in _FRAMEWORKS for a, b in itertools.pairwise(parts))
