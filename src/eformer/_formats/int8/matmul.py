"""The documented weight-only product of bf16 activations and int8 weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from eformer._kernels import qmatmul


def matmul_bf16_int8_weight_only(lhs_bf16: jax.Array, rhs_q_int8: jax.Array, rhs_scale: jax.Array) -> jax.Array:
    """`lhs @ (rhs_q * rhs_scale)` in bf16, accumulated in f32.

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
