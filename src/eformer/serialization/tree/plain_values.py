"""Plain values as JSON: None, booleans, numbers, strings, dtypes, and tuples of these, told apart exactly."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from eformer.errors import CheckpointError

from ..safetensors.dtypes import named_dtype

MAX_DEPTH = 64  # of descriptions and structures: far beyond real models, far below the limit of the interpreter


def encode(value: Any, what: str = "the value") -> Any:
    """JSON for a plain value.

    >>> encode((1, None, float("inf")))
    {'tuple': [1, None, {'float': 'inf'}]}
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if type(value) is complex:
        return {"complex": [encode(value.real), encode(value.imag)]}
    if type(value) is tuple:
        return {"tuple": [encode(item, what) for item in value]}
    if isinstance(value, np.dtype):
        return {"dtype": named_dtype(value.name).name}
    if isinstance(value, type) and hasattr(value, "dtype") and isinstance(value.dtype, np.dtype):  # jnp.float32
        return {"dtype": named_dtype(value.dtype.name).name}
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        return encode(value.item(), what)
    raise CheckpointError(
        f"{what} is {value!r:.100} of type {type(value).__name__}, which has no place in a file; allowed are None, "
        "booleans, numbers, strings, dtypes, and tuples of these.",
        fix="Give register_type a pack= and an unpack= that turn it into such values.",
    )


def decode(value: Any, depth: int = 0) -> Any:
    """The value `encode` was given."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict) and len(value) == 1 and depth < 16:
        ((tag, body),) = value.items()
        if tag == "tuple" and isinstance(body, list):
            return tuple(decode(item, depth + 1) for item in body)
        if tag == "dtype":
            return named_dtype(body)
        if tag == "float" and body in ("inf", "-inf", "nan"):
            return float(body)
        if tag == "complex" and isinstance(body, list) and len(body) == 2:
            real, imag = (decode(part, depth + 1) for part in body)
            if isinstance(real, float) and isinstance(imag, float):
                return complex(real, imag)
    raise CheckpointError(f"holds the value {value!r:.100}, which is not a plain value.")
