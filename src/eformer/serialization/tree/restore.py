"""Leaves from their descriptions and the tensors these name: the inverse of `describe`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer.errors import CheckpointError, UninitializedAval

from ..safetensors.header import check_shape, fits_jax, named_dtype
from .saved_types import type_named
from .structure import MAX_DEPTH, decode_plain

# What classes of arrays say to parts and fields that do not fit.
_REFUSALS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError, UninitializedAval)

Fetch = Callable[..., Any]


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
        made = saved.unpack(inner, {key: decode_plain(value) for key, value in fields.items()})
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
        raise CheckpointError(f"is not a random key of the kind {impl!r:.100}: {err}") from err


def _restore_scalar(description: dict[str, Any], fetch: Fetch) -> Any:
    del fetch
    return decode_plain(description.get("value"))


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
