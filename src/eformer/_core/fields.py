"""What the dataclass fields of an implicit array mean: which are children of the pytree, which are static.

And what `jax.vmap` and `jax.shard_map` make of them: see `check_mapped`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, get_origin

import jax.tree_util as jtu

from eformer import _messages, errors
from eformer._jax import callers, traces

from .operators import ArrayOperators

AUX = "implicit_array_aux"
DECLARED = ("shape", "dtype")  # fields of the base class, kept apart from the user's own


def aux_field(metadata: Mapping[Any, Any] | None = None, **kwargs: Any) -> Any:
    """A dataclass field for static data (sizes, axes, dtypes): not traced, part of the compilation key, hashable.

    Args:
        metadata: further metadata of the field.
        **kwargs: whatever `dataclasses.field` accepts, such as `default`.
    """
    return dataclasses.field(metadata={**(metadata or {}), AUX: True}, **kwargs)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The fields of one class: names of children and of static data, and quick ways to read both."""

    children: tuple[str, ...]
    aux: tuple[str, ...]
    get_children: Callable[[Any], tuple[Any, ...]]
    get_aux: Callable[[Any], tuple[Any, ...]]


@functools.cache
def layout(cls: type) -> Layout:
    """Read the fields of a finished class; called when its first instance is made, since `@dataclass` runs late."""
    _require_dataclass(cls)
    fields = [f for f in dataclasses.fields(cls) if f.name not in DECLARED]
    children = tuple(f.name for f in fields if not f.metadata.get(AUX))
    aux = tuple(f.name for f in fields if f.metadata.get(AUX))
    _restore_descriptors(cls)
    return Layout(children, aux, _tuple_getter(children), _tuple_getter(aux))


@functools.cache
def replaceable_fields(cls: type, keep: tuple[bool, bool]) -> dict[str, Any]:
    """`__dataclass_fields__` for instances: `dataclasses.replace` must not freeze a shape that follows the children."""
    fields = dict(cls.__dataclass_fields__)  # pyright: ignore[reportAttributeAccessIssue]
    for name, kept in zip(DECLARED, keep, strict=True):
        if not kept:
            derived = dataclasses.field(init=False)
            derived.name = name
            derived._field_type = fields[name]._field_type  # pyright: ignore[reportAttributeAccessIssue]
            fields[name] = derived
    return fields


def _require_dataclass(cls: type) -> None:
    """A subclass that only adds methods inherits a complete dataclass; one with fields of its own must be decorated."""
    for base in cls.__mro__:
        if "__dataclass_fields__" in base.__dict__:
            if base.__name__ != "_ArrayBase":
                return
            break
        if any(not _is_class_variable(hint) for hint in inspect.get_annotations(base).values()):
            break
    raise errors.InvalidImplicitArrayError(_messages.NOT_A_DATACLASS.format(name=cls.__name__))


def _is_class_variable(hint: Any) -> bool:
    if isinstance(hint, str):
        return hint.split("[")[0].rpartition(".")[2] == "ClassVar"
    return hint is ClassVar or get_origin(hint) is ClassVar


def _restore_descriptors(cls: type) -> None:
    """A subclass may declare `dtype: Any = aux_field(default=...)`; the default must not hide our descriptor."""
    for name in DECLARED:
        default = cls.__dict__.get(name)
        # a property the user wrote stays; a value, or a scalar type such as jnp.float32, was a default
        if name in cls.__dict__ and (isinstance(default, type) or not hasattr(default, "__get__")):
            delattr(cls, name)


def _tuple_getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if not names:
        return lambda instance: ()
    if len(names) == 1:
        get = operator.attrgetter(names[0])
        return lambda instance: (get(instance),)
    return operator.attrgetter(*names)


class StaticData(tuple[Any, ...]):
    """The static data of an array, as its treedef keeps it; and, no part of the value, which array and where."""

    source: weakref.ref[Any]
    path: str = ""  # where in a model the array is, for messages
    note: str = ""  # how it was quantized, for reports

    def __reduce__(self) -> Any:
        return tuple, (tuple(self),)

    def __repr__(self) -> str:
        return super().__repr__() + _messages.SHOWN_BY_JAX * callers.shown_by_jax()


def static_data_of(q: Any, data: tuple[Any, ...]) -> StaticData:
    static = StaticData(data)
    static.source, static.path = weakref.ref(q), getattr(data, "path", "")
    static.note = getattr(data, "note", "")
    return static


def check_mapped(q: Any, source: Any) -> None:
    """Refuse `jax.vmap` around a function where it maps another axis than that of the array.

    Called when an array rebuilt from the static data of `source` is used for the first time. vmap takes axis `in_axes`
    of every child. For a batch axis (see `core_ndim`) that is the axis of the array. For an axis among or behind those
    that belong together it is another one, and the values would be wrong.

    A tracer of vmap knows its axis and the array it maps. If that is the very child of the array whose static data we
    were rebuilt from, then vmap has taken that array apart: tracers of values that were computed inside may have their
    axis anywhere. Nothing is left to see of `out_axes` when the result is put together, so those are not checked.
    """
    if source is None:
        return
    axes = {axis for leaf, stored in _leaf_pairs(q, source) if (axis := traces.axis_mapped(leaf, stored)) is not None}
    if not axes or q.core_ndim is None:
        return
    if len(axes) == 1 and q.stores_axis_in_place(min(axes), q.ndim + 1):  # with the mapped axis
        return
    raise errors.SlicedBelowCoreError(_messages.MAPPED_CORE.format(name=type(q).__name__))


class _Checking(threading.local):
    result: bool = False


_checking = _Checking()


def check_result(q: Any) -> None:
    """Refuse an array as the result of `jax.shard_map` where one spec for all of it joins what it stores along other
    axes than its own. Called when an array is taken apart while there are named axes."""
    if _checking.result:
        return
    _checking.result = True  # this takes arrays apart itself
    try:
        spec = callers.spec_of_result(q)
        split = [axis for axis, entry in enumerate(spec or ()) if entry is not None]
        if not all(is_stored_along(q, axis) for axis in split):
            raise errors.ShardingError(_messages.SHARDED_RESULT.format(name=type(q).__name__, spec=spec))
    finally:
        _checking.result = False


def is_stored_along(q: Any, axis: int) -> bool:
    """Is this axis the same axis of everything that is stored?"""
    held = all(axis < len(leaf.shape) and leaf.shape[axis] == q.shape[axis] for leaf in stored_arrays(q))
    return axis < q.ndim and held and q.stores_axis_in_place(axis, q.ndim)


def stored_arrays(q: Any) -> list[Any]:
    """What an array stores, without what only stands for an array, such as a spec."""
    return [leaf for leaf in jtu.tree_leaves(layout(type(q)).get_children(q)) if hasattr(leaf, "shape")]


def _leaf_pairs(q: Any, source: Any) -> Iterator[tuple[Any, Any]]:
    """The leaves of both, without those of implicit arrays inside, which are checked themselves."""
    get_children = layout(type(q)).get_children
    for child, stored in zip(get_children(q), get_children(source), strict=True):
        if isinstance(child, traces.Tracer):
            yield child, stored
        elif child is not stored and not isinstance(child, ArrayOperators):
            yield from zip(jtu.tree_leaves(child), jtu.tree_leaves(stored), strict=False)
