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
from eformer._kernels import qmatmul


@functools.partial(jax.jit, static_argnames=("axes",))
def encode(w: jax.Array, *, axes: int | Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Quantize `w` with one scale per position of the other axes (`axes` are reduced and kept with size 1).

    >>> weight, scale = encode(jnp.array([[1.0, -2.54], [0.0, 0.0]]), axes=-1)
    >>> weight.tolist(), scale.shape
    ([[50, -127], [0, 0]], (2, 1))
    """
    axes = _arguments.check_axes(axes, w.ndim)
    _arguments.check_float(w, "INT8")
    values = w.astype(_blocks.wide(w.dtype))
    absmax = _blocks.absmax_along(w, axes[-1]).astype(values.dtype)
    absmax = _blocks.largest(absmax, axes)
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


def matmul_bf16_int8_weight_only(lhs_bf16: jax.Array, rhs_q_int8: jax.Array, rhs_scale: jax.Array) -> jax.Array:
    """`lhs_bf16 @ (rhs_q_int8 * rhs_scale)` in bf16, accumulated in f32.

    The scale goes where it costs least: per column `(1, N)` onto the result, per row `(K, 1)` onto the left operand,
    anything else onto the decoded weights.

    >>> x, w = jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 4), jnp.int8)
    >>> matmul_bf16_int8_weight_only(x, w, jnp.full((1, 4), 0.5)).tolist()[0]
    [1.5, 1.5, 1.5, 1.5]
    """
    if rhs_q_int8.ndim != 2 or lhs_bf16.ndim < 1 or lhs_bf16.shape[-1] != rhs_q_int8.shape[0]:
        raise ValueError(
            f"shapes do not fit: lhs {list(lhs_bf16.shape)} must be (..., M, K), "
            f"weights {list(rhs_q_int8.shape)} (K, N)."
        )
    scale = jnp.broadcast_to(rhs_scale, (1, 1)) if rhs_scale.ndim < 2 and rhs_scale.size == 1 else rhs_scale
    scale = scale.reshape(1, -1) if scale.ndim == 1 else scale
    x = lhs_bf16.astype(jnp.bfloat16)
    return qmatmul(x, rhs_q_int8, scale, fmt="int8", form="axpy", cols=rhs_q_int8.shape[1], out_dtype=jnp.bfloat16)
