"""Argument checks shared by all codecs. They look at shapes and dtypes only, so they run at trace time."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

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


def check_block_size(block_size: int) -> int:
    """Return `block_size` as an int, or raise unless it is positive and even (two codes share a byte)."""
    block_size = as_index(block_size, "block_size")
    if block_size <= 0 or block_size % 2:
        raise ValueError(
            f"{block_size=} is not allowed: NF4 packs two codes per byte. Use a positive even number (64)."
        )
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
