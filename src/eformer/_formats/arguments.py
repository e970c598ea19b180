"""What users hand to formats, checked once for all of them: values, storage, axes, sizes.

Checks of codecs look at shapes and dtypes only, so that they run while a program is traced.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eformer._core import ImplicitArray
from eformer._core.materialization import materialize_on_request
from eformer._jax import traces
from eformer._messages import shown
from eformer.errors import AvalMismatchError

FLOATS = ("bfloat16", "float16", "float32", "float64")


def check_float(w: jax.Array, format_name: str) -> None:
    """Raise a TypeError unless `w` holds real floating-point values of a supported width."""
    if w.dtype.name not in FLOATS:
        raise TypeError(
            f"{format_name} quantizes floating-point arrays, but got dtype {w.dtype.name} (shape {w.shape}). "
            f"Allowed: {', '.join(FLOATS)}. Convert first, for example w.astype(jnp.float32)."
        )


def as_index(value: Any, name: str) -> int:
    """Return `value` as an int, or raise a TypeError that names it; True and False do not count as numbers.

    >>> as_index(3, "axis")
    3
    """
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name}={value!r} is of type {type(value).__name__}, but must be an integer.")


def check_axis(axis: int, ndim: int) -> int:
    """Return `axis` as a negative int, or raise if it does not name one of `ndim` axes.

    >>> check_axis(-2, 3)
    -2
    """
    axis = as_index(axis, "axis")
    if not -ndim <= axis <= -1:
        allowed = f"{-ndim} to -1" if ndim else "none, because the array has no axes"
        raise ValueError(f"{axis=} is not a blocked axis of an array of rank {ndim}. Allowed: {allowed}.")
    return axis


def check_axes(axes: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """Return `axes` as a sorted tuple of negative ints; duplicates and an empty tuple are errors.

    >>> check_axes((1, -3), 3)
    (-3, -2)
    """
    named = tuple(axes) if isinstance(axes, Sequence) and not isinstance(axes, str) else (axes,)
    given = tuple(as_index(a, "axis") for a in named)
    if not given:
        raise ValueError("axes=() would give every value a scale of its own. Name at least one axis to share it along.")
    wrong = [a for a in given if not -ndim <= a < ndim]
    if wrong:
        raise ValueError(f"axes={given} holds {wrong}, out of range for rank {ndim}. Allowed: {-ndim} to {ndim - 1}.")
    negative = sorted({a - ndim if a >= 0 else a for a in given})
    if len(negative) != len(given):
        raise ValueError(f"axes={given} names an axis twice for rank {ndim}. Name each axis once.")
    return tuple(negative)


def check_block_size(block_size: Any, largest: int | None = None) -> int:
    """Return `block_size` as an int, or raise unless it is positive and even (two codes share a byte)."""
    block_size = as_index(block_size, "block_size")
    if block_size <= 0 or block_size % 2:
        raise ValueError(
            f"{block_size=} is not allowed: NF4 packs two codes per byte. Use a positive even number (64)."
        )
    if largest is not None and block_size > largest:
        raise ValueError(f"{block_size=} is larger than the largest allowed, {largest}.")
    return block_size


def check_core(core_ndim: int | None, ndim: int) -> int:
    """Return how many trailing axes form one matrix; None means all of them."""
    core = ndim if core_ndim is None else operator.index(core_ndim)
    if not 0 <= core <= ndim:
        raise ValueError(f"{core_ndim=} is out of range for rank {ndim}. Allowed: 0 to {ndim}, or None for all axes.")
    return core


def check_storage(packed: jax.Array, name: str) -> None:
    """Raise a TypeError unless packed codes are bytes."""
    if packed.dtype != jnp.uint8:
        raise TypeError(f"{name} must be stored as uint8, but got {packed.dtype.name} (shape {packed.shape}).")


def check_size(size: int, stored: int, unit: int, name: str) -> int:
    """Raise unless `size` values fill exactly `stored` units of `unit` values, the last one possibly in part."""
    size = operator.index(size)
    if size < 0 or math.ceil(size / unit) != stored:
        low = max(unit * (stored - 1) + 1, 0)
        raise ValueError(
            f"{size=} does not match the storage: {stored} {name} of {unit} values hold {low} to {unit * stored}."
        )
    return size


_PLAIN = (bool, int, float, complex, str, bytes, list, dict, set)


def is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic, ImplicitArray))


def is_dense_float(x: Any) -> bool:
    return is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)


def is_storage(*arrays: Any) -> bool:
    """Real arrays, as opposed to the placeholders of some tree_map."""
    return all(is_array(a) or isinstance(a, jax.ShapeDtypeStruct) for a in arrays)


def as_array(values: Any, name: str) -> jax.Array:
    """`values` as a JAX array, or a TypeError that says what they are."""
    if isinstance(values, jax.Array):
        return values
    try:
        return jnp.asarray(values)
    except (TypeError, ValueError, OverflowError) as err:
        kind = type(values).__name__
        raise TypeError(
            f"{name} takes an array, got {shown(values)} of type {kind}. The parameters of a model go to quantize_tree."
        ) from err


def as_float(array: Any, name: str) -> jax.Array:
    """A dense floating array of rank 1 or more, or a clear error."""
    if isinstance(array, ImplicitArray):
        array = materialize_on_request(array)
    if isinstance(array, jax.ShapeDtypeStruct):
        raise TypeError(
            f"{name} quantizes values, and {array} has none. Use jax.eval_shape(quantize, ...) to learn the storage."
        )
    array = as_array(array, name)
    check_float(array, name)
    if array.ndim == 0:
        raise ValueError(f"{name} quantizes arrays of rank 1 or more, got a scalar.")
    # Rounding is a step function. Zero is its gradient in every format, so that `w + stop_gradient(q - w)` works.
    return lax.stop_gradient(array) if isinstance(array, traces.Tracer) else array


def checked_axis(axis: Any, ndim: int) -> int:
    """The blocked axis, counted from the end; by default the contracted axis of `x @ w`."""
    if axis is None:
        return -1 if ndim < 2 else -2
    if isinstance(axis, (tuple, list)):
        if len(axis) != 1:
            raise ValueError(f"axis={axis} names {len(axis)} axes; values are packed along exactly one.")
        axis = axis[0]
    axis = as_index(axis, "axis")
    if not -ndim <= axis < ndim:
        raise ValueError(f"{axis=} is out of range for an array of rank {ndim}. Allowed: {-ndim} to {ndim - 1}.")
    return axis - ndim if axis >= 0 else axis


def checked_dtype(dtype: Any, default: Any, name: str) -> Any:
    """The logical dtype of a quantized array: floating."""
    if dtype is None:
        return default
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype={jnp.dtype(dtype).name} is not allowed: {name} stands for floating values.")
    return dtype


def check_logical_dtype(q: Any, name: str, *, signed: bool = False) -> None:
    """Refuse a declared dtype the values cannot be decoded to lazily: floating ones, and signed integers for codes."""
    dtype = q.__dict__.get("_dtype")
    if dtype is None or jnp.issubdtype(dtype, jnp.floating) or (signed and jnp.issubdtype(dtype, jnp.signedinteger)):
        return
    allowed, fits = ("signed integer or floating", "int8") if signed else ("floating", "float32")
    given = jnp.dtype(dtype).name
    raise TypeError(
        f"dtype={given} is not allowed: {name} stands for {allowed} values. Use dtype=jnp.{fits}, and convert the "
        f"dense array where you need another: q.materialize().astype({given!r})."
    )


def check_fields(q: Any, *arrays: str) -> None:
    """Refuse plain Python values in place of storage, and a `sharding` that is not a sharding."""
    for name in arrays:
        value = getattr(q, name)
        if value is None or isinstance(value, _PLAIN) or type(value) is tuple:
            raise TypeError(
                f"{type(q).__name__} takes arrays, got {name}={value!r} of type {type(value).__name__}. Convert values "
                f"first, for example with jnp.asarray."
            )
    if not (q.sharding is None or isinstance(q.sharding, (jax.sharding.Sharding, jax.sharding.PartitionSpec))):
        raise TypeError(
            f"sharding={q.sharding!r} is of type {type(q.sharding).__name__}; allowed are a NamedSharding, a "
            "PartitionSpec or None."
        )


def axis_and_pad(q: Any, ndim: int, steps: int, unit: int) -> tuple[int, int]:
    """The blocked axis and the padding of storage given directly; a declared shape says where it ends."""
    axis = checked_axis(q.axis, ndim)
    as_index(q.pad, "pad")
    declared = q.__dict__.get("_shape")
    if declared is None:
        if not 0 <= q.pad < max(unit, 1) or q.pad > steps * unit:
            raise ValueError(f"pad={q.pad} is not allowed: only the last {unit} values can be padding.")
        return axis, q.pad
    if len(declared) != ndim:
        raise AvalMismatchError(f"shape={declared} has {len(declared)} axes, but the storage holds {ndim}.")
    pad = steps * unit - declared[axis]
    if not 0 <= pad < max(unit, 1):
        low = max(unit * (steps - 1) + 1, 0)
        raise AvalMismatchError(
            f"shape={declared} has {declared[axis]} entries along axis {axis}, but the storage holds "
            f"{low} to {steps * unit}."
        )
    return axis, pad


def check_declared_shape(q: Any, made: Any) -> None:
    declared = q.__dict__.get("_shape")
    if declared is not None and declared != made.shape:
        raise AvalMismatchError(f"{type(q).__name__} was given shape={declared} for an array of shape {made.shape}.")
    q.__dict__["_shape"] = None


def keep_sharding(q: Any, array: Any) -> Any:
    """`q` split as the dense array was."""
    sharding = array.sharding if traces.is_concrete(array) else None
    split = isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh.size > 1
    return q.with_sharding(sharding) if split else q
