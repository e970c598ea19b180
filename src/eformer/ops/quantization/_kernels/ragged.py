"""Products and lookups that touch only part of the stored matrices: mixture of experts, embedding rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eformer._errors import QuantizedGradientError

from .avals import vary, varying_axes
from .problem import check_names, check_storage
from .reference import decode
from .spec import NO_GRADIENT, qmatmul


def qragged_dot(
    x: Any,
    codes: Any,
    scale: Any,
    group_sizes: Any,
    *,
    fmt: str,
    form: str,
    cols: int,
    block: int | None = None,
    out_dtype: Any = None,
    precision: Any = None,
    preference: str = "auto",
) -> jax.Array:
    """Consecutive groups of rows of x (M, K), each times its own matrix: codes (G, R, ...), group_sizes (G,).

    The quantized counterpart of `jax.lax.ragged_dot`; rows behind the last group give zeros. One expert is decoded at a
    time, and experts without rows are not decoded at all.

    >>> codes = jnp.array([[[1]], [[2]], [[3]]], jnp.int8)
    >>> x, scale = jnp.ones((4, 1)), jnp.ones((3, 1, 1))
    >>> qragged_dot(x, codes, scale, jnp.array([2, 0, 1]), fmt="int8", form="dot", cols=1)[:, 0]
    Array([1., 1., 3., 0.], dtype=float32)
    """
    check_names(fmt, form, preference)
    x, codes, group_sizes = jnp.asarray(x), jnp.asarray(codes), jnp.asarray(group_sizes)
    scale = None if scale is None else jnp.asarray(scale)
    block = check_storage(fmt, codes, scale, cols, block)
    groups = _check_groups(x, codes, group_sizes, 4 if fmt == "nf4" else 3)
    if scale is not None and scale.ndim == 2:
        scale = jnp.broadcast_to(scale, (groups, *scale.shape))

    def product(rows: jax.Array, group: jax.Array) -> jax.Array:
        part = None if scale is None else scale[group]
        return qmatmul(
            rows, codes[group], part, fmt=fmt, form=form, cols=cols, block=block,
            out_dtype=out_dtype, precision=precision, preference=preference,
        )  # fmt: skip

    width = codes.shape[1] if form == "dot" else cols
    out = jax.eval_shape(product, x, jax.ShapeDtypeStruct((), jnp.int32)) if groups else x
    y = jnp.zeros((x.shape[0], width), out.dtype)
    if 0 in (groups, x.shape[0]):
        return y
    group, rows = _tiles(group_sizes, x.shape[0])
    tiles = x.at[rows].get(mode="fill", fill_value=0)

    def step(_: None, tile: tuple[Any, ...]) -> tuple[None, jax.Array]:
        values, group, used = tile
        empty = jnp.zeros((values.shape[0], width), out.dtype)
        return None, lax.cond(used, lambda: product(values, group), lambda: _as_varying(empty, values, group, codes))

    _, parts = lax.scan(step, None, (tiles, group, rows[:, 0] < x.shape[0]))
    return y.at[rows].add(parts, mode="drop")


def _as_varying(empty: jax.Array, *like: jax.Array) -> jax.Array:
    """Both branches of a cond must vary over the same axes inside shard_map."""
    return vary(empty, frozenset[str]().union(*map(varying_axes, like)))


def _check_groups(x: Any, codes: Any, group_sizes: Any, rank: int) -> int:
    if codes.ndim != rank or x.ndim != 2:
        raise ValueError(
            f"qragged_dot takes x of shape (M, K) and codes of rank {rank} with the experts in front, got "
            f"{list(x.shape)} and {list(codes.shape)}; use vmap for more axes."
        )
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer) or group_sizes.shape != codes.shape[:1]:
        raise ValueError(
            f"group_sizes must be integers of shape {codes.shape[:1]}, one per expert, got "
            f"{group_sizes.dtype}{list(group_sizes.shape)}."
        )
    return codes.shape[0]


def _tiles(group_sizes: jax.Array, m: int) -> tuple[jax.Array, jax.Array]:
    """Cut the groups into tiles of equal height: (expert, row numbers) of each, row number m where there is none.

    Groups of unknown sizes need at most m / height + (number of groups that can be non-empty) tiles, a static number.
    """
    groups = group_sizes.shape[0]
    height = 1 << (max(m // groups, 1) - 1).bit_length()
    count = -(-m // height) + min(groups, m)
    sizes = group_sizes.astype(jnp.int32)
    tiles = -(-sizes // height)
    last_tile, last_row = jnp.cumsum(tiles), jnp.cumsum(sizes)
    number = jnp.arange(count, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(last_tile, number, side="right"), groups - 1).astype(jnp.int32)
    first = (last_row - sizes)[group] + (number - (last_tile - tiles)[group]) * height
    rows = first[:, None] + jnp.arange(height, dtype=jnp.int32)
    exists = (rows < last_row[group][:, None]) & (number < last_tile[-1])[:, None]
    return group, jnp.where(exists, rows, m)


def qgather(
    codes: Any,
    scale: Any,
    indices: Any,
    *,
    fmt: str,
    cols: int,
    block: int | None = None,
    dtype: Any = jnp.float32,
) -> jax.Array:
    """Rows of the decoded matrix (R, cols): indices (...) -> (..., cols). Only the rows asked for are decoded.

    Indices follow the rules of `jax.numpy` indexing: negative ones count from the end, others are clamped.

    >>> table = jnp.array([[1, 2], [3, 4]], jnp.int8)
    >>> qgather(table, jnp.full((1, 1), 10.0), jnp.array([1, 0, 1]), fmt="int8", cols=2)[:, 0]
    Array([30., 10., 30.], dtype=float32)
    """
    check_names(fmt, "dot", "auto")
    codes, indices = jnp.asarray(codes), jnp.asarray(indices)
    scale = None if scale is None else _no_gradient(jnp.asarray(scale), fmt)
    check_storage(fmt, codes, scale, cols, block)
    if codes.ndim != (3 if fmt == "nf4" else 2):
        raise ValueError(f"qgather takes one matrix, got codes of shape {list(codes.shape)}; use vmap for batch axes.")
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"indices must be integers, got {indices.dtype}.")
    flat = indices.reshape(-1)
    if scale is not None and scale.shape[0] == codes.shape[0]:
        scale = scale[flat]
    rows = decode(codes[flat], scale, fmt=fmt, cols=cols, dtype=dtype)
    return rows.reshape(*indices.shape, cols)


def _no_gradient(scale: jax.Array, fmt: str) -> jax.Array:
    """The scale itself, refusing to be differentiated."""

    @jax.custom_jvp
    def identity(value: jax.Array) -> jax.Array:
        return value

    @identity.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise QuantizedGradientError(NO_GRADIENT.format(what="scale", fmt=fmt))

    del refuse
    return identity(scale)
