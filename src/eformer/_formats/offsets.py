"""Products with matrices whose blocks have a zero point or a bias, by way of products without.

The values of a block are D = S + b, S being what the kernels decode and b one number per row and block:

    x @ D.T = x @ S.T + (sums of x over blocks) @ b.T        x @ D = x @ S + (x @ b, repeated over blocks)

The second terms are products with one column per block. Both are added in float32 or wider, then rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eformer._jax import avals

from .blocks import wide

Product = Callable[[Any], jax.Array]  # of x and S, in a dtype


def added(q: Any, x: jax.Array, offset: jax.Array, form: str, options: Any, product: Product) -> jax.Array:
    """x (batch..., M, K), or (..., K) without batch axes, times `q` (batch..., R, K) of these offsets."""
    out, batch = options["out_dtype"], q.ndim - 2
    large = wide(out)
    y = product(large)

    def correction(x: jax.Array, offset: jax.Array) -> jax.Array:
        lead = tuple(range(batch))
        x = block_sums(x.astype(large), q.kernel_block) if form == "dot" else x.astype(large)
        dims = (((x.ndim - 1,), (batch + (form == "dot"),)), (lead, lead))
        found = lax.dot_general(x, offset.astype(large), dims, precision="highest")
        return found if form == "dot" else spread(found, q.kernel_block, q.shape[-1])

    add: Any = correction
    split = avals.explicit_sharding_of(y)
    if split is not None:
        add = jax.sharding.auto_axes(correction, out_sharding=split)
    return (y + add(x, offset)).astype(out)


def added_to_groups(
    q: Any, x: jax.Array, offset: jax.Array, sizes: jax.Array, form: str, out: Any, product: Product
) -> jax.Array:
    """Groups of rows of x (M, K), each times its own matrix of `q` (experts, R, K)."""
    large = wide(out)
    offset = offset.astype(large)
    if form == "dot":
        more = lax.ragged_dot(block_sums(x.astype(large), q.kernel_block), offset.swapaxes(1, 2), sizes, "highest")
    else:
        more = spread(lax.ragged_dot(x.astype(large), offset, sizes, "highest"), q.kernel_block, q.shape[-1])
    return (product(large) + more).astype(out)


def block_sums(x: jax.Array, block: int) -> jax.Array:
    """Sums of blocks of the last axis, the last of which may be short."""
    missing = -x.shape[-1] % block
    if missing:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block).sum(-1)


def spread(values: jax.Array, block: int, size: int) -> jax.Array:
    """One value per block of the last axis, for every place in it."""
    shape = (*values.shape, block)
    spread = lax.broadcast_in_dim(values, shape, range(values.ndim)).reshape(*values.shape[:-1], -1)
    return spread[..., :size]
