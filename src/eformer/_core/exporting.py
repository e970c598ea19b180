"""Implicit arrays as arguments and results of exported programs: their static data as text that `jax.export` keeps."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import jax.numpy as jnp
from jax import export


def register_for_export(cls: type) -> None:
    """Tell `jax.export` how to write the static data of a class, by a name that another process finds again."""
    home = "eformer" if cls.__module__.startswith("eformer.") else cls.__module__
    with contextlib.suppress(ValueError):  # a class of this name was there before, as when a notebook defines one again
        export.register_pytree_node_serialization(
            cls,
            serialized_name=f"{home}.{cls.__qualname__}",
            serialize_auxdata=lambda aux: json.dumps(_plain(cls, aux)).encode(),
            deserialize_auxdata=lambda text: _restored(json.loads(text)),
        )


def _plain(cls: type, value: Any) -> Any:
    """As JSON has it: tuples are lists, and a dtype is an object with its name."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(cls, x) for x in value]
    try:
        return {"dtype": jnp.dtype(value).name}
    except TypeError as err:
        raise TypeError(
            f"{cls.__name__} has static data that jax.export cannot write: {value!r} of type {type(value).__name__}. "
            "Allowed are None, booleans, numbers, strings, dtypes, and tuples of them."
        ) from err


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_restored, value))
    return jnp.dtype(value["dtype"]) if isinstance(value, dict) else value
