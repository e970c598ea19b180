"""Dtype names of safetensors files and the NumPy dtypes they stand for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer.errors import CheckpointError

_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
DTYPES: dict[str, np.dtype] = {code: jnp.dtype(name) for code, name in _NAMES.items()}
CODES: dict[np.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}
# Dtypes JAX knows and the file format does not: stored as bytes, the name kept in the metadata.
_FOREIGN = (
    "complex128", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float4_e2m1fn", "int4", "uint4", "int2", "uint2",
)  # fmt: skip
FOREIGN: dict[str, np.dtype] = {name: jnp.dtype(getattr(jnp, name)) for name in _FOREIGN if hasattr(jnp, name)}


def named_dtype(name: Any) -> np.dtype:
    """The dtype of a name found in metadata; only numeric dtypes have one."""
    if isinstance(name, str):
        if name in FOREIGN:
            return FOREIGN[name]
        if name in _NAMES.values():
            return jnp.dtype(name)
    raise CheckpointError(f"{name!r:.100} is not a dtype; known are {', '.join([*_NAMES.values(), *FOREIGN])}.")


def stored_layout(shape: tuple[int, ...], dtype: np.dtype) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of the tensor that holds such an array: a dtype the format lacks is stored as bytes."""
    native = dtype.newbyteorder("=")
    if native in CODES:
        return shape, native
    if native in FOREIGN.values():
        return (shape if native.itemsize == 1 else (*shape, native.itemsize)), np.dtype(np.uint8)
    allowed = ", ".join([*_NAMES.values(), *FOREIGN])
    raise CheckpointError(f"arrays of dtype {dtype} cannot be saved; allowed are {allowed}.")


def as_stored(array: np.ndarray) -> np.ndarray:
    """`array`, or its bytes, as `stored_layout` says."""
    shape, dtype = stored_layout(array.shape, array.dtype)
    native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    return native.view(dtype).reshape(shape)


def loaded_shape(shape: tuple[int, ...], stored: np.dtype, dtype: np.dtype) -> tuple[int, ...]:
    """The shape of an array of `dtype` held by a tensor of this shape and dtype; the inverse of `stored_layout`."""
    if stored == dtype:
        return shape
    if stored == np.uint8 and dtype in FOREIGN.values():
        if dtype.itemsize == 1:
            return shape
        if shape[-1:] == (dtype.itemsize,):
            return shape[:-1]
    raise CheckpointError(f"storage {stored}{list(shape)} cannot hold values of dtype {dtype}.")


def from_stored(stored: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The inverse of `as_stored`."""
    shape = loaded_shape(stored.shape, stored.dtype, dtype)
    if stored.dtype == dtype:
        return stored
    return np.ascontiguousarray(stored).reshape(-1).view(dtype).reshape(shape)


def fits_jax(dtype: np.dtype) -> bool:
    """Can JAX hold this dtype now? (64-bit types need jax_enable_x64.)"""
    return jax.dtypes.canonicalize_dtype(dtype) == dtype
