"""Products with matrices that have zero points or biases, by way of products without.

The values of a block are D = S + b, S being what symmetric codes stand for and b one number per row and block:

    x @ D.T = x @ S.T + (sums of x over blocks) @ b.T        x @ D = x @ S + (x @ b, repeated over blocks)

The second terms are products with one column per block. They are for kernels that decode S only, and for scales and
biases that are differentiated. Both terms are added in float32 or wider, then rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eformer._jax import avals

from .activations import values_of_rounded
from .parameters import Parameters, Problem


def beyond_symmetric(parameters: Parameters, scale: jax.Array, offset: jax.Array, dtype: Any) -> jax.Array:
    """b, of the shape of the scale: what is added to (code - 2**(bits - 1)) * scale."""
    half, scale = 2 ** (parameters.format.bits - 1), scale.astype(dtype)
    if offset.dtype == jnp.uint8:
        return (half - offset.astype(dtype)) * scale
    return offset.astype(dtype) + half * scale


def of_product(problem: Problem, x: Any, codes: Any, scale: Any, offset: Any, x_scale: Any = None) -> jax.Array:
    """The second term of one problem: x (batch..., M, K), or (..., K) without batch axes."""
    del codes
    return _of_rows(problem, len(problem.batch), _seen(problem, x, x_scale), scale, offset, problem.compute_dtype)


def of_groups(
    problem: Problem, x: Any, codes: Any, sizes: Any, scale: Any, offset: Any, x_scale: Any = None
) -> jax.Array:
    """The second term of groups of rows of x (M, K), each times its own matrix."""
    del codes
    large = problem.compute_dtype
    x, b = _seen(problem, x, x_scale).astype(large), beyond_symmetric(problem, scale, offset, large)
    if problem.form == "dot":
        return lax.ragged_dot(_block_sums(x, problem.block), b.swapaxes(1, 2), sizes, "highest")
    return _spread(lax.ragged_dot(x, b, sizes, "highest"), problem)


def _of_rows(parameters: Parameters, batch: int, x: Any, scale: Any, offset: Any, large: Any) -> jax.Array:
    b, dot = beyond_symmetric(parameters, scale, offset, large), parameters.form == "dot"
    x, lead = x.astype(large), tuple(range(batch))
    x = _block_sums(x, parameters.block) if dot else x
    found = lax.dot_general(x, b, (((x.ndim - 1,), (batch + dot,)), (lead, lead)), precision="highest")
    return found if dot else _spread(found, parameters)


def differentiable(
    parameters: Parameters, product: Callable[[Parameters], jax.Array], x: Any, codes: Any, scale: Any, offset: Any
) -> jax.Array:
    """A product with a derivative in scale and offset; `product` computes the one without an offset."""
    large = jnp.promote_types(parameters.out_dtype, jnp.float32)
    batch = codes.ndim - parameters.format.core_ndim
    y = product(parameters.without_offset(large))

    def correction(x: jax.Array, scale: jax.Array, offset: jax.Array) -> jax.Array:
        return _of_rows(parameters, batch, x, scale, offset, large)

    split = avals.explicit_sharding_of(y)
    add: Any = (
        correction
        if split is None
        else jax.sharding.auto_axes(correction, axes=avals.explicit_axes(), out_sharding=split)
    )
    return (y + add(x, scale, offset)).astype(parameters.out_dtype)


def _seen(problem: Problem, x: jax.Array, x_scale: Any) -> jax.Array:
    """What x is multiplied as."""
    return x if problem.activations is None else values_of_rounded(x, x_scale, problem.activations)


def _block_sums(x: jax.Array, block: Any) -> jax.Array:
    """Sums of blocks of the last axis, the last of which may be short."""
    missing = -x.shape[-1] % block
    if missing:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block).sum(-1)


def _spread(values: jax.Array, parameters: Parameters) -> jax.Array:
    """One value per block of the last axis, for every place in it."""
    shape = (*values.shape, parameters.block)
    spread = lax.broadcast_in_dim(values, shape, range(values.ndim)).reshape(*values.shape[:-1], -1)
    return spread[..., : parameters.cols]
