"""Ternary {-1, 0, 1} and binary {-1, 1} codes with a least-squares scale, packed at two bits and one.

A value decodes to `code * scale`. Ternary keeps the values with `|w| > threshold` (default: half the standard deviation
of the whole core array) and scales by the mean of their magnitudes; binary takes the sign, 0 counting as +1, and scales
by the mean of all magnitudes. For fixed codes these scales have the least squared error. Corner cases:

- Scales are f32 (f64 for f64 input), laid out as storage is: the blocked axis last, with size 1.
- Where ternary keeps nothing the scale is 0.
- NaN or an infinity makes every scale it enters NaN. With the default threshold it enters all of them.
  Without a scale (`scale=None`) there is no place for it: NaN becomes 0 (ternary) or +1 (binary).
- Sums are f32: a channel whose magnitudes add up to more than 3.4e38 gets a NaN scale.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from eformer._formats import arguments as _arguments
from eformer._formats import blocks as _blocks
from eformer._formats.onebit.packing import pack as pack
from eformer._formats.onebit.packing import unpack as unpack

ScaleKind = Literal["channel", "tensor"]
BITS = {"ternary": 2, "binary": 1}

_STATIC = ("axis", "scale", "core_ndim")


def ternary(
    w: jax.Array,
    *,
    axis: int,
    threshold: ArrayLike | None = None,
    scale: ScaleKind | None = "channel",
    core_ndim: int | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Codes in {-1, 0, 1}, int8 of the shape of `w`, and the scale.

    `scale="channel"` reduces over `axis`: shape `lead + trail + (1,)`. `"tensor"` reduces over the last `core_ndim`
    axes (default: all), each kept with size 1. `threshold` is absolute and broadcasts against `w`.

    >>> codes, scale = ternary(jnp.array([[0.1, -2.0, 4.0]]), axis=-1)
    >>> codes.tolist(), scale.tolist()
    ([[0, -1, 1]], [[3.0]])
    """
    if isinstance(threshold, (int, float)) and not threshold >= 0:
        raise ValueError(f"{threshold=} is not allowed. Give a magnitude of at least 0, or None for 0.5 * std(w).")
    return _ternary(w, threshold, axis=axis, scale=scale, core_ndim=core_ndim)


@functools.partial(jax.jit, static_argnames=_STATIC)
def _ternary(
    w: jax.Array, threshold: ArrayLike | None, *, axis: int, scale: ScaleKind | None, core_ndim: int | None
) -> tuple[jax.Array, jax.Array | None]:
    values, core = _prepare(w, axis, scale, core_ndim, "ternary")
    if threshold is None:
        limit = jnp.asarray(0.5, values.dtype) * _std(values, axis, core)
    else:
        limit = jnp.asarray(threshold, values.dtype)
    codes = jnp.where(values > limit, 1, jnp.where(values < -limit, -1, 0)).astype(jnp.int8)
    if scale is None:
        return codes, None
    magnitude = jnp.abs(values)
    # NaN is not <= limit, so it stays in the sum.
    total = _reduce(jnp.where(magnitude <= limit, 0, magnitude), axis, scale, core)
    count = _reduce((magnitude > limit).astype(values.dtype), axis, scale, core)
    mean = jnp.where(total < jnp.inf, total / jnp.maximum(count, 1), jnp.nan)
    # A NaN threshold keeps nothing and sums everything: it must show in the scale.
    undefined = jnp.any(jnp.isnan(limit), axis=tuple(range(-min(core, limit.ndim), 0)), keepdims=True)
    return codes, jnp.moveaxis(jnp.where(undefined, jnp.nan, mean), axis, -1)


@functools.partial(jax.jit, static_argnames=_STATIC)
def binary(
    w: jax.Array, *, axis: int, scale: ScaleKind | None = "channel", core_ndim: int | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Codes in {-1, 1}, int8 of the shape of `w`, and the scale as for `ternary`.

    >>> codes, scale = binary(jnp.array([[0.0, -2.0, 4.0]]), axis=-1)
    >>> codes.tolist(), scale.tolist()
    ([[1, -1, 1]], [[2.0]])
    """
    values, core = _prepare(w, axis, scale, core_ndim, "binary")
    codes = jnp.where(values < 0, -1, 1).astype(jnp.int8)
    if scale is None:
        return codes, None
    count = w.shape[axis] if scale == "channel" else math.prod(w.shape[w.ndim - core :])
    mean = _reduce(jnp.abs(values), axis, scale, core) / max(count, 1)
    return codes, jnp.moveaxis(jnp.where(mean < jnp.inf, mean, jnp.nan), axis, -1)


@functools.partial(jax.jit, static_argnames=("kind", *_STATIC))
def encode(
    w: jax.Array,
    threshold: ArrayLike | None = None,
    *,
    kind: Literal["ternary", "binary"],
    axis: int,
    scale: ScaleKind | None = "channel",
    core_ndim: int | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """`ternary` or `binary` straight to packed bytes: the int8 codes are never written to memory.

    >>> packed, scale = encode(jnp.array([[0.1, -2.0, 4.0]]), kind="ternary", axis=-1)
    >>> packed.tolist(), scale.tolist()
    ([[73]], [[3.0]])
    """
    if kind == "ternary":
        codes, scales = ternary(w, axis=axis, threshold=threshold, scale=scale, core_ndim=core_ndim)
    elif kind == "binary" and threshold is None:
        codes, scales = binary(w, axis=axis, scale=scale, core_ndim=core_ndim)
    else:
        raise ValueError(f"{kind=} with {threshold=}: allowed are 'ternary', and 'binary' without a threshold.")
    return pack(codes, axis=axis, bits=BITS[kind]), scales


@functools.partial(jax.jit, static_argnames=("axis", "bits", "size", "dtype"))
def decode(
    packed: jax.Array, scale: jax.Array | None, *, axis: int, bits: int, size: int, dtype: DTypeLike
) -> jax.Array:
    """The dense array: codes times scale, multiplied in the dtype of the scale and rounded once to `dtype`."""
    codes = unpack(packed, axis=axis, bits=bits, size=size)
    if scale is None:
        return codes.astype(dtype)
    return (codes.astype(scale.dtype) * jnp.moveaxis(scale, -1, axis)).astype(dtype)


def _prepare(
    w: jax.Array, axis: int, scale: ScaleKind | None, core_ndim: int | None, name: str
) -> tuple[jax.Array, int]:
    """The values in the dtype to compute in, and the number of core axes, once all arguments are known to fit."""
    _arguments.check_float(w, name)
    core = _arguments.check_core(core_ndim, w.ndim)
    _arguments.check_axis(axis, core)
    if scale not in ("channel", "tensor", None):
        raise ValueError(f"{scale=} is unknown. Allowed: 'channel', 'tensor', None.")
    return w.astype(_blocks.wide(w.dtype)), core


def _reduce(x: jax.Array, axis: int, scale: ScaleKind, core: int) -> jax.Array:
    """The sum over the blocked axis or, for one scale per tensor, over all core axes; reduced axes are kept."""
    partial = _blocks.sum_along(x, axis)
    if scale == "channel":
        return partial
    return jnp.sum(partial, axis=tuple(range(-core, 0)), keepdims=True)


def _std(values: jax.Array, axis: int, core: int) -> jax.Array:
    """Standard deviation over the core axes, kept with size 1; NaN if it is not finite."""
    count = max(math.prod(values.shape[values.ndim - core :]), 1)
    mean = _reduce(values, axis, "tensor", core) / count
    variance = _reduce(jnp.square(values - mean), axis, "tensor", core) / count
    return jnp.sqrt(jnp.where(variance < jnp.inf, variance, jnp.nan))


def ternary_reference(
    w: np.ndarray, *, axis: int, threshold: float | None = None, scale: ScaleKind | None = "channel"
) -> tuple[np.ndarray, np.ndarray | None]:
    """`ternary` of one core array in f64, written for reading."""
    values = np.asarray(w, np.float64)
    limit = 0.5 * np.std(values) if threshold is None else threshold
    codes = np.where(values > limit, 1, np.where(values < -limit, -1, 0)).astype(np.int8)
    axes = axis if scale == "channel" else None
    kept = np.maximum(np.sum(np.abs(codes), axis=axes, keepdims=True), 1)
    mean = np.sum(np.abs(values * codes), axis=axes, keepdims=True) / kept
    return codes, None if scale is None else np.moveaxis(mean, axis, -1)


def binary_reference(
    w: np.ndarray, *, axis: int, scale: ScaleKind | None = "channel"
) -> tuple[np.ndarray, np.ndarray | None]:
    """`binary` of one core array in f64, written for reading."""
    values = np.asarray(w, np.float64)
    codes = np.where(values < 0, -1, 1).astype(np.int8)
    mean = np.mean(np.abs(values), axis=axis if scale == "channel" else None, keepdims=True)
    return codes, None if scale is None else np.moveaxis(mean, axis, -1)
