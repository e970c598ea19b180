"""What the dataclass fields of an implicit array mean: which are children of the pytree, which are static."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, get_origin

from eformer import _messages, errors

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
