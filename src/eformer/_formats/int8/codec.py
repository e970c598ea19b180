"""INT8: symmetric 8-bit values with one scale shared along chosen axes.

A value decodes to `weight * scale`, where `scale = max|w| / 127` and `weight = round(w * (1 / scale))`, half to even,
within [-127, 127]. Corner cases:

- The scale is f32 (f64 for f64 input) whatever the input; `weight` keeps the logical shape, `scale` broadcasts to it.
- Where all values are 0 the scale is 0. So it is below 127 times the smallest normal number: such values decode to 0.
- NaN or an infinity makes the scale NaN and its weights 0: all values that share the scale decode to NaN.
- `encode(decode(q)) == q` bit for bit in f32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from eformer._formats import arguments as _arguments
from eformer._formats import blocks as _blocks


def encode(w: jax.Array, *, axes: int | Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Quantize `w` with one scale per position of the other axes (`axes` are reduced and kept with size 1).

    >>> weight, scale = encode(jnp.array([[1.0, -2.54], [0.0, 0.0]]), axes=-1)
    >>> weight.tolist(), scale.shape
    ([[50, -127], [0, 0]], (2, 1))
    """
    return _encode(w, axes=_arguments.check_axes(axes, jnp.ndim(w)))


@functools.partial(jax.jit, static_argnames=("axes",))
def _encode(w: jax.Array, *, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    _arguments.check_float(w, "INT8")
    values = w.astype(_blocks.wide(w.dtype))
    absmax = _blocks.absmax_along(w, axes[-1]).astype(values.dtype)
    absmax = jnp.max(absmax, axis=axes, keepdims=True, initial=0)
    # Dividing by a value XLA cannot fold: it turns `/ 127` into `* (1 / 127)`, one ulp off for 1 value in 20, and with
    # it encode(decode(q)) would no longer give back the scale.
    scale = absmax / jnp.where(absmax < jnp.inf, 127, jnp.nan).astype(values.dtype)
    scale = jnp.minimum(jnp.where(scale < jnp.finfo(values.dtype).tiny, 0, scale), _largest_scale(values.dtype))
    rounded = jnp.round(values * (1 / jnp.where(scale == 0, 1, scale)))
    rounded = jnp.where(jnp.isnan(rounded), 0, jnp.clip(rounded, -127, 127))
    return rounded.astype(jnp.int8), scale


def _largest_scale(dtype: np.dtype) -> np.floating:
    """The scale of the largest number, rounded down so that 127 times it is finite."""
    largest = jnp.finfo(dtype).max
    return np.nextafter(largest / largest.dtype.type(127), largest.dtype.type(0))


@functools.partial(jax.jit, static_argnames=("dtype",))
def decode(weight: jax.Array, scale: jax.Array, *, dtype: DTypeLike) -> jax.Array:
    """`weight * scale`, multiplied in the dtype of the scale and rounded once to `dtype`."""
    return (weight.astype(scale.dtype) * scale).astype(dtype)


def encode_reference(w: np.ndarray, *, axes: int | tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """`encode`, written for reading."""
    values = np.asarray(w)
    values = values.astype(np.float64 if values.dtype == np.float64 else np.float32)
    absmax = np.max(np.abs(values), axis=axes, keepdims=True, initial=0)
    scale = np.where(np.isfinite(absmax), absmax, np.nan).astype(values.dtype) / values.dtype.type(127)
    scale = np.where(scale < np.finfo(values.dtype).tiny, 0, np.minimum(scale, _largest_scale(values.dtype)))
    rounded = np.rint(values * (1 / np.where(scale == 0, 1, scale)).astype(values.dtype))
    return np.nan_to_num(np.clip(rounded, -127, 127), nan=0).astype(np.int8), scale.astype(values.dtype)


def decode_reference(weight: np.ndarray, scale: np.ndarray, *, dtype: DTypeLike) -> np.ndarray:
    """`decode`, written for reading."""
    scale = np.asarray(scale)
    return (np.asarray(weight).astype(scale.dtype) * scale).astype(jnp.dtype(dtype))
