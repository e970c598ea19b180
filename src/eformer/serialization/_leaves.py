"""Descriptions of leaves: JSON that, together with named tensors, gives back exactly what was saved.

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
from eformer.errors import CheckpointError, UninitializedAval

from . import _values
from ._dtypes import CODES, fits_jax, named_dtype
from ._header import check_shape
from ._types import type_named, type_of

MAX_DEPTH = 64  # of descriptions and structures: far beyond real models, far below the limit of the interpreter

# What classes of arrays say to parts and fields that do not fit.
_REFUSALS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError, UninitializedAval)

Emit = Callable[[str, Any], str]
Fetch = Callable[..., Any]


# -- saving ------------------------------------------------------------------------------------------------------------


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
        return {"type": "scalar", "value": _values.encode(value)}
    if value is None:
        return {"type": "none"}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        items = [describe(item, f"{name}.{i}", emit) for i, item in enumerate(value)]
        return {"type": type(value).__name__, "items": items}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"type": "dict", "items": {key: describe(item, f"{name}.{key}", emit) for key, item in value.items()}}
    raise CheckpointError(
        f"{value!r:.100} of type {type(value).__name__} is no array and cannot be saved.",
        tensor=name,
        fix="Leave it out (for Equinox: eqx.filter(tree, eqx.is_array)) and pass like= to load.",
    )


def _describe_implicit(array: ImplicitArray, name: str, emit: Emit) -> dict[str, Any]:
    saved = type_of(array)
    parts, fields = saved.pack(array)
    kind = getattr(array, "format", None)  # for whoever reads the file; nothing here does
    return {
        "type": saved.name,
        **({"format": kind} if isinstance(kind, str) else {}),
        "shape": list(array.shape),
        "dtype": jnp.dtype(array.dtype).name,
        "fields": {key: _values.encode(value, f"field {key!r} of {name}") for key, value in fields.items()},
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


# -- loading -----------------------------------------------------------------------------------------------------------


def tensors_of(description: Any, depth: int = 0) -> list[str]:
    """The names of all tensors a description mentions; raises if it is not a description."""
    if depth > MAX_DEPTH:
        raise CheckpointError(f"has a description nested more than {MAX_DEPTH} deep.")
    if isinstance(description, str):
        return [description]
    if not isinstance(description, dict):
        raise CheckpointError(f"has the description {description!r:.100}, which is neither a name nor a mapping.")
    if "tensor" in description:
        if not isinstance(description["tensor"], str):
            raise CheckpointError(f"has the tensor name {description['tensor']!r:.100}.")
        return [description["tensor"]]
    inner = description.get("parts", description.get("items", []))
    if not isinstance(inner, (dict, list)):
        raise CheckpointError(f"has parts {inner!r:.100} that are neither a mapping nor a list.")
    items = inner.values() if isinstance(inner, dict) else inner
    return [name for item in items for name in tensors_of(item, depth + 1)]


def restore(description: Any, fetch: Fetch) -> Any:
    """What was described. `fetch(tensor, dtype=None, numpy=False)` gives the array of a tensor.

    Expects what `tensors_of` has accepted.
    """
    if isinstance(description, str):
        return fetch(description)
    kind = description.get("type")
    simple = _SIMPLE.get(kind) if isinstance(kind, str) else None
    if simple is not None:
        return simple(description, fetch)
    return _restore_implicit(description, fetch)


def _restore_implicit(description: dict[str, Any], fetch: Fetch) -> Any:
    saved = type_named(description.get("type"))
    parts, fields = description.get("parts"), description.get("fields")
    shape, dtype = description.get("shape"), named_dtype(description.get("dtype"))
    if not isinstance(parts, dict) or not isinstance(fields, dict):
        raise CheckpointError("has no mappings of parts and fields.")
    check_shape(shape, CheckpointError)
    inner = {key: restore(part, fetch) for key, part in parts.items()}
    try:
        made = saved.unpack(inner, {key: _values.decode(value) for key, value in fields.items()})
        found = tuple(made.shape), jnp.dtype(made.dtype)
    except CheckpointError:
        raise
    except _REFUSALS as err:
        what = f"does not make a {saved.cls.__name__}: {str(err)[:500]}"
        raise CheckpointError(what, fix=_wider(dtype)) from err
    if found != (tuple(shape), dtype):  # pyright: ignore[reportArgumentType]
        what = f"is described as {dtype}{shape}, but its parts make {found[1]}{list(found[0])}."
        raise CheckpointError(what, fix=_wider(dtype))
    return made


def _wider(dtype: np.dtype) -> str:
    """What to do about a dtype that JAX does not hold as it is set up now."""
    how = 'jax.config.update("jax_enable_x64", True), or JAX_ENABLE_X64=1 in the environment'
    return "" if fits_jax(dtype) else f"JAX holds {dtype} with jax_enable_x64 only: {how}, before loading."


def _restore_array(description: dict[str, Any], fetch: Fetch) -> Any:
    return fetch(_tensor(description), dtype=named_dtype(description.get("dtype")))


def _restore_numpy(description: dict[str, Any], fetch: Fetch) -> Any:
    array = fetch(_tensor(description), dtype=named_dtype(description.get("dtype")), numpy=True)
    if description.get("scalar") is True and isinstance(array, np.ndarray):
        if array.ndim:
            raise CheckpointError(f"is described as a scalar, but has the shape {list(array.shape)}.")
        return array[()]
    return array


def _restore_key(description: dict[str, Any], fetch: Fetch) -> Any:
    impl = description.get("impl")
    data = fetch(_tensor(description))
    if isinstance(data, jax.ShapeDtypeStruct):
        return data
    try:
        return jax.random.wrap_key_data(jnp.asarray(data), impl=impl)
    except (TypeError, ValueError) as err:
        raise CheckpointError(f"is no random key of the kind {impl!r:.100}: {err}") from err


def _restore_scalar(description: dict[str, Any], fetch: Fetch) -> Any:
    del fetch
    return _values.decode(description.get("value"))


def _restore_items(description: dict[str, Any], fetch: Fetch) -> Any:
    items, kind = description.get("items"), description["type"]
    if not isinstance(items, dict if kind == "dict" else list):
        raise CheckpointError(f"is described as a {kind} of {items!r:.100}.")
    if isinstance(items, dict):
        return {key: restore(item, fetch) for key, item in items.items()}
    made = [restore(item, fetch) for item in items]  # pyright: ignore[reportOptionalIterable]
    return made if kind == "list" else tuple(made)


def _tensor(description: dict[str, Any]) -> str:
    if not isinstance(description.get("tensor"), str):
        raise CheckpointError("has a description that names no tensor.")
    return description["tensor"]


_SIMPLE: dict[str, Callable[[dict[str, Any], Fetch], Any]] = {
    "array": _restore_array,
    "numpy": _restore_numpy,
    "key": _restore_key,
    "scalar": _restore_scalar,
    "none": lambda description, fetch: None,
    "list": _restore_items,
    "tuple": _restore_items,
    "dict": _restore_items,
}
