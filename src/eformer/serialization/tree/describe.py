"""Describing leaves: JSON that, together with named tensors, gives back exactly what was saved.

A plain array is described by the name of its tensor. Everything else is a mapping with a `type`: an implicit array with
its parts (described in the same way) and fields, a NumPy array, a random key, a Python number, a container.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer import _jax as compat
from eformer._core import ImplicitArray
from eformer.errors import CheckpointError

from ..safetensors.dtypes import CODES
from . import plain_values
from .saved_types import type_of

Emit = Callable[[str, Any], str]


def describe(value: Any, name: str, emit: Emit) -> Any:
    """The description of a leaf (or of a part of one). `emit(name, array)` takes each tensor and returns its name."""
    if isinstance(value, ImplicitArray):
        return _describe_implicit(value, name, emit)
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):  # a shape: for files whose tensors come later
        return _describe_array(value, name, emit)
    if isinstance(value, (np.ndarray, np.generic)):
        scalar = {"scalar": True} if isinstance(value, np.generic) else {}
        return {"type": "numpy", "tensor": emit(name, value), "dtype": value.dtype.name, **scalar}
    if isinstance(value, (bool, int, float, complex, str)):
        return {"type": "scalar", "value": plain_values.encode(value)}
    if value is None:
        return {"type": "none"}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        items = [describe(item, f"{name}.{i}", emit) for i, item in enumerate(value)]
        return {"type": type(value).__name__, "items": items}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"type": "dict", "items": {key: describe(item, f"{name}.{key}", emit) for key, item in value.items()}}
    raise CheckpointError(
        f"{value!r:.100} of type {type(value).__name__} is not an array and cannot be saved.",
        tensor=name,
        fix="Leave it out (for Equinox: eqx.filter(tree, eqx.is_array)) and pass like= to load.",
    )


def _describe_implicit(array: ImplicitArray, name: str, emit: Emit) -> dict[str, Any]:
    saved = type_of(array)
    parts, fields = saved.pack(array)
    kind = getattr(array, "format", None)  # for human readers of the file; nothing here reads it
    return {
        "type": saved.name,
        **({"format": kind} if isinstance(kind, str) else {}),
        "shape": list(array.shape),
        "dtype": jnp.dtype(array.dtype).name,
        "fields": {key: plain_values.encode(value, f"field {key!r} of {name}") for key, value in fields.items()},
        "parts": {key: describe(part, f"{name}.{key}", emit) for key, part in parts.items()},
    }


def _describe_array(array: Any, name: str, emit: Emit) -> Any:
    if isinstance(array, compat.Tracer):
        raise CheckpointError("is a tracer: saving happens outside jit, vmap and grad.", tensor=name)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        tensor = emit(name, jax.random.key_data(array))
        return {"type": "key", "tensor": tensor, "impl": str(jax.random.key_impl(array))}
    if array.dtype in CODES:
        return emit(name, array)
    return {"type": "array", "tensor": emit(name, array), "dtype": array.dtype.name}
