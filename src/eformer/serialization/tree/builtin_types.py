"""The quantized arrays of this library as files hold them: which parts and fields, of which kinds.

The constructors accept more than storage (dense values are quantized, for instance). From a file only storage is
accepted, so kinds are checked here first; whether the parts fit together is checked by the constructors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from eformer._formats.grouped.array import GroupedArray
from eformer._formats.int8.array import Array8B
from eformer._formats.nf4.array import ArrayNF4, CompressedAbsmax
from eformer._formats.nf4.codec import GROUP
from eformer._formats.onebit.array import Array1B
from eformer._lora.array import LoraArray
from eformer.errors import CheckpointError

from .saved_types import Unpack, register_type

FLOATING = "floating"
OPTIONAL = "floating or none"


def _kind_fits(part: Any, kind: str) -> bool:
    if part is None:
        return kind == OPTIONAL
    dtype = np.dtype(getattr(part, "dtype", object))
    return jnp.issubdtype(dtype, jnp.floating) if kind in (FLOATING, OPTIONAL) else dtype.name in kind.split(" or ")


def strict(cls: type, kinds: Mapping[str, str], fields: Mapping[str, type]) -> Unpack:
    """An `unpack` that demands exactly these parts and fields."""

    def unpack(parts: Mapping[str, Any], found: Mapping[str, Any]) -> Any:
        if set(parts) != set(kinds) or set(found) != set(fields):
            raise CheckpointError(
                f"has parts {sorted(parts)} and fields {sorted(found)}; {cls.__name__} takes {sorted(kinds)} and "
                f"{sorted(fields)}."
            )
        for name, kind in kinds.items():
            if not _kind_fits(parts[name], kind):
                raise CheckpointError(f"has a part {name!r} that is {_described(parts[name])} instead of {kind}.")
        for name, allowed in fields.items():
            if not isinstance(found[name], allowed) or isinstance(found[name], bool) is not (allowed is bool):
                raise CheckpointError(f"has {name}={found[name]!r:.100}, which is not of type {allowed.__name__}.")
        return cls(**parts, **found)

    return unpack


def _described(part: Any) -> str:
    return f"{part.dtype}{list(part.shape)}" if hasattr(part, "dtype") else repr(part)[:100]


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


_BLOCKED = {"axis": int, "pad": int, "use_kernel": bool, "dtype": np.dtype}
_INT8 = {"axis": tuple, "use_kernel": bool, "dtype": np.dtype}
_LORA = {"scale": float, "left": int, "right": int}

# The name in files, the class, its parts and its fields.
TYPES: tuple[tuple[str, type, dict[str, str], dict[str, type]], ...] = (
    ("nf4", ArrayNF4, {"packed": "uint8", "absmax": FLOATING}, {"block_size": int, **_BLOCKED}),
    ("int8", Array8B, {"weight": "int8", "scale": FLOATING}, _INT8),
    ("onebit", Array1B, {"weight": "uint8", "scale": OPTIONAL}, {"bits": int, **_BLOCKED}),
    (
        "grouped",
        GroupedArray,
        {"codes": "uint8 or int8", "scale": FLOATING, "offset": OPTIONAL},
        {"zero": int, **_BLOCKED},
    ),
    ("lora", LoraArray, {"w": FLOATING, "a": FLOATING, "b": FLOATING}, _LORA),
)
for _name, _cls, _kinds, _fields in TYPES:
    register_type(_cls, _name, unpack=strict(_cls, _kinds, _fields))
register_type(CompressedAbsmax, "nf4_absmax", unpack=_unpack_absmax)
