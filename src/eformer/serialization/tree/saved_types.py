"""Which implicit arrays can be saved, and how: a registry from names in files to classes.

A file names types, never modules: a file cannot cause an import. The types of this library are listed at the end,
others are registered by their owners with `register_type`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from eformer._core import ImplicitArray
from eformer._core.fields import layout
from eformer._formats.activations.array import ActivationArray
from eformer._formats.cache.array import QuantizedCache
from eformer._formats.floating.array import ArrayFloat
from eformer._formats.int8.array import Array8B
from eformer._formats.integer.array import ArrayInt
from eformer._formats.nf4.array import ArrayNF4, CompressedAbsmax
from eformer._formats.nf4.codec import GROUP
from eformer._formats.onebit.array import Array1B
from eformer._formats.permuted.array import PermutedArray
from eformer._formats.scaled.array import ScaledArray
from eformer._lora.array import LoraArray
from eformer._lora.dora import DoraArray
from eformer._lora.parts import DroppingLora
from eformer.errors import CheckpointError

Pack = Callable[[Any], tuple[Mapping[str, Any], Mapping[str, Any]]]
Unpack = Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
C = TypeVar("C", bound=type[Any])

# Where an array lives is decided by who loads it.
_NOT_SAVED = ("sharding",)
# Names with a meaning of their own in descriptions of leaves.
RESERVED = ("array", "numpy", "key", "scalar", "list", "tuple", "dict", "ordered_dict", "node", "none")


@dataclasses.dataclass(frozen=True)
class SavedType:
    """How one class is saved: `pack` gives its stored parts (arrays, or trees of them) and its plain fields."""

    name: str
    cls: type
    pack: Pack
    unpack: Unpack


_by_name: dict[str, SavedType] = {}
_by_class: dict[type, SavedType] = {}


def register_type(cls: C, name: str | None = None, *, pack: Pack | None = None, unpack: Unpack | None = None) -> C:
    """Let instances of an `ImplicitArray` class be saved and loaded. Returns the class.

    Args:
        cls: the class.
        name: what files call it, by default the name of the class. It is what finds the class again: keep it.
        pack: `pack(array) -> (parts, fields)`, by default the children and the auxiliary fields of the dataclass
            (but not a sharding). Fields hold None, booleans, numbers, strings, dtypes, and tuples of these.
        unpack: `unpack(parts, fields) -> array`, by default the constructor.

    >>> import jax
    >>> @dataclasses.dataclass
    ... class Doubled(ImplicitArray):
    ...     half: jax.Array
    ...     def materialize(self):
    ...         return self.half * 2
    >>> register_type(Doubled, "example.doubled").__name__
    'Doubled'
    """
    given: Any = cls
    if not (isinstance(given, type) and issubclass(given, ImplicitArray)):
        raise TypeError(f"register_type takes a class derived from ImplicitArray, got {cls!r}.")
    name = cls.__name__ if name is None else name
    if name in RESERVED or not name:
        raise ValueError(f"{name!r} has a meaning of its own in files; choose another name.")
    known = _by_name.get(name)
    if known is not None and _origin(known.cls) != _origin(cls):
        raise ValueError(f"{name!r} is already the name of {known.cls.__qualname__}; choose another name.")
    saved = SavedType(name, cls, pack or pack_fields, unpack or (lambda parts, fields: cls(**parts, **fields)))
    _by_name[name] = _by_class[cls] = saved
    return cls


def _origin(cls: type) -> tuple[str, str]:
    """Where a class was written: running a notebook cell again makes a new class of the same origin."""
    return cls.__module__, cls.__qualname__


def type_of(array: ImplicitArray) -> SavedType:
    """How an instance is saved, or an error that says what to register."""
    saved = _by_class.get(type(array))
    if isinstance(array, DroppingLora):
        raise CheckpointError(
            "what lora_dropout returned is for one step of training, and cannot be saved.",
            fix="Save the model that lora_dropout was given.",
        )
    if saved is None:
        name = type(array).__name__
        raise CheckpointError(
            f"arrays of type {name} cannot be saved: this type is not registered.",
            fix=f"Call eformer.serialization.register_type({name}) first, before saving and before loading.",
        )
    return saved


def type_named(name: Any) -> SavedType:
    """The type a file asks for by name."""
    saved = _by_name.get(name) if isinstance(name, str) else None
    if saved is None:
        raise CheckpointError(
            f"is of the type {name!r:.100}, which is not registered; known are {', '.join(sorted(_by_name))}.",
            fix="Import the module that defines it, or call eformer.serialization.register_type(cls, name).",
        )
    return saved


def saved_classes() -> list[type]:
    """Every class that can be saved now."""
    return list(_by_class)


def pack_fields(array: ImplicitArray) -> tuple[dict[str, Any], dict[str, Any]]:
    """Children and auxiliary fields by name; a shape or dtype the instance remembers is a field too."""
    names = layout(type(array))
    parts = {name: getattr(array, name) for name in names.children}
    fields = {name: getattr(array, name) for name in names.aux if name not in _NOT_SAVED}
    remembered = {"shape": array.__dict__.get("_shape"), "dtype": array.__dict__.get("_dtype")}
    return parts, {**fields, **{name: value for name, value in remembered.items() if value is not None}}


# -- the types of this library -----------------------------------------------------------------------------------------
# Constructors accept more than storage (dense values are quantized, for instance). From a file only storage is
# accepted, so kinds are checked here first; whether the parts fit together is checked by the constructors.

FLOATING = "floating"
OPTIONAL = "floating or none"
SCALE = "floating or uint8"


def _kind_fits(part: Any, kind: str) -> bool:
    allowed = kind.split(" or ")
    if part is None:
        return "none" in allowed
    dtype = np.dtype(getattr(part, "dtype", object))
    return dtype.name in allowed or (FLOATING in allowed and bool(jnp.issubdtype(dtype, jnp.floating)))


def strict(cls: type, kinds: Mapping[str, str], fields: Mapping[str, Any]) -> Unpack:
    """An `unpack` that demands exactly these parts and fields."""

    def unpack(parts: Mapping[str, Any], found: Mapping[str, Any]) -> Any:
        if set(parts) != set(kinds) or set(found) != set(fields):
            raise CheckpointError(
                f"has parts {sorted(parts)} and fields {sorted(found)}; {cls.__name__} takes {sorted(kinds)} and "
                f"{sorted(fields)}."
            )
        for name, kind in kinds.items():
            if not _kind_fits(parts[name], kind):
                part = parts[name]
                what = f"{part.dtype}{list(part.shape)}" if hasattr(part, "dtype") else repr(part)[:100]
                raise CheckpointError(f"has a part {name!r} that is {what} instead of {kind}.")
        for name, allowed in fields.items():
            if not isinstance(found[name], allowed) or isinstance(found[name], bool) is not (allowed is bool):
                wanted = getattr(allowed, "__name__", allowed)
                raise CheckpointError(f"has {name}={found[name]!r:.100}, which is not of type {wanted}.")
        return cls(**parts, **found)

    return unpack


def _unpack_absmax(parts: Mapping[str, Any], fields: Mapping[str, Any]) -> CompressedAbsmax:
    """The class itself trusts its parts to fit together, so that is checked here."""
    kinds = {"codes": "uint8", "scale": "float32", "offset": "float32"}
    made = strict(CompressedAbsmax, kinds, {"core": int})(parts, fields)
    shape, core = tuple(made.codes.shape), made.core
    if not 0 <= core <= len(shape):
        raise CheckpointError(f"has core={core} for absmax codes of shape {list(shape)}.")
    batch = shape[: len(shape) - core]
    groups = math.ceil(math.prod(shape[len(shape) - core :]) / GROUP)
    if tuple(made.scale.shape) != (*batch, groups) or tuple(made.offset.shape) != batch:
        raise CheckpointError(
            f"has absmax codes of shape {list(shape)}, which need scales {[*batch, groups]} and offsets {list(batch)}, "
            f"but got {list(made.scale.shape)} and {list(made.offset.shape)}."
        )
    return made


def _pack_lora(q: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """As earlier versions did, which knew no dropout, where there is none."""
    parts, fields = pack_fields(q)
    return parts, {name: value for name, value in fields.items() if name != "dropout" or value}


def _unpack_lora(parts: Mapping[str, Any], fields: Mapping[str, Any]) -> LoraArray:
    more = {"dropout": float} if "dropout" in fields else {}
    return strict(LoraArray, {"w": FLOATING, "a": FLOATING, "b": FLOATING}, {**_LORA, **more})(parts, fields)


_BLOCKED = {"axis": int, "pad": int, "use_kernel": bool, "dtype": np.dtype}
_INT8 = {"axis": tuple, "use_kernel": bool, "dtype": np.dtype}
_FLOAT = {"kind": str, "axis": int | None, "pad": int, "use_kernel": bool, "dtype": np.dtype}
_LORA = {"scale": float, "left": int, "right": int}

# The name in files, the class, its parts and its fields.
TYPES: tuple[tuple[str, type, dict[str, str], dict[str, Any]], ...] = (
    ("nf4", ArrayNF4, {"packed": "uint8", "absmax": FLOATING}, {"block_size": int, **_BLOCKED}),
    ("int8", Array8B, {"weight": "int8", "scale": FLOATING}, _INT8),
    (
        "int",
        ArrayInt,
        {"packed": "uint8 or int8", "scale": FLOATING, "zero": "uint8 or floating or none", "bias": OPTIONAL},
        {"bits": int, "block_size": int, **_BLOCKED},
    ),
    (
        "cache",
        QuantizedCache,
        {"packed": "uint8 or int8", "scale": FLOATING, "zero": "none", "bias": "none"},
        {"bits": int, "block_size": int, **_BLOCKED},
    ),
    ("onebit", Array1B, {"weight": "uint8", "scale": OPTIONAL}, {"bits": int, **_BLOCKED}),
    ("float", ArrayFloat, {"codes": "uint8", "scale": SCALE, "tensor_scale": OPTIONAL}, _FLOAT),
    (
        "activations",
        ActivationArray,
        {"w": FLOATING, "x_scale": "float32 or none", "seed": "uint32 or none"},
        {"activations": str, "backward": str | None},
    ),
    ("permuted", PermutedArray, {"w": FLOATING, "order": "int32"}, {"axis": int}),
    ("dora", DoraArray, {"v": FLOATING, "magnitude": FLOATING, "squares": FLOATING}, {"columns": bool}),
    ("scaled", ScaledArray, {"w": FLOATING, "factor": FLOATING}, {"core": int}),
)
for _name, _cls, _kinds, _fields in TYPES:
    register_type(_cls, _name, unpack=strict(_cls, _kinds, _fields))
register_type(LoraArray, "lora", pack=_pack_lora, unpack=_unpack_lora)
register_type(CompressedAbsmax, "nf4_absmax", unpack=_unpack_absmax)
