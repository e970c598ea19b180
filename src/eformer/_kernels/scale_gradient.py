"""The gradient of a product with respect to the scale of its matrix, a panel of rows at a time.

The values of D are what the codes stand for, v, times their scale. With G the gradient of the result,

    y = x @ D.T:  dD = G.T @ x        y = x @ D:  dD = x.T @ G        d scale = sum of v * dD where it is shared

dD is as large as the dense matrix, so only a panel of it exists at any time.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eformer._jax import avals

from .formats import unpack
from .group_tiles import cut
from .parameters import Parameters

_PANEL_BYTES = 4 << 20


def scale_gradient(parameters: Parameters, g: jax.Array, x: jax.Array, codes: jax.Array, scale: Any) -> jax.Array:
    """Of `qmatmul`: g has the shape of its result, `scale` is the type of the gradient."""
    batch = parameters.format.batch_of(codes)

    def run(g: jax.Array, x: jax.Array, codes: jax.Array) -> jax.Array:
        if not batch:
            return _one(parameters, g, x, codes, scale.shape).astype(scale.dtype)
        flat = [a.reshape(math.prod(batch), *a.shape[len(batch) :]) for a in (g, x, codes)]
        made = lax.map(lambda one: _one(parameters, one[0], one[1], one[2], scale.shape[len(batch) :]), flat)
        return made.reshape(scale.shape).astype(scale.dtype)

    split = avals.explicit_sharding_of(scale) if avals.typed_by_a_mesh(g, x, codes) else None
    apply: Any = run if split is None else jax.sharding.auto_axes(run, axes=avals.explicit_axes(), out_sharding=split)
    return apply(g, x, codes)


def scale_gradient_of_groups(
    parameters: Parameters, g: jax.Array, x: jax.Array, codes: jax.Array, sizes: jax.Array, scale: Any
) -> jax.Array:
    """Of `qragged_dot`: one tile of one expert at a time."""
    m, groups = x.shape[0], codes.shape[0]
    tiles = cut(sizes, m, height=1 << (max(m // groups, 1) - 1).bit_length())

    def step(total: jax.Array, tile: tuple[Any, ...]) -> tuple[jax.Array, None]:
        rows, group = tile
        g_rows, x_rows = (a.at[rows].get(mode="fill", fill_value=0) for a in (g, x))  # nothing where there is no row
        found = _one(parameters, g_rows, x_rows, codes[group], scale.shape[1:])
        return total.at[group].add(found), None

    wide = jnp.promote_types(scale.dtype, jnp.float32)
    zeros = avals.vary(jnp.zeros(scale.shape, wide), avals.varying_axes(g) | avals.varying_axes(x))
    return lax.scan(step, zeros, (tiles.rows, tiles.group))[0].astype(scale.dtype)


def _one(parameters: Parameters, g: jax.Array, x: jax.Array, codes: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Of one matrix; x and g may have any axes of rows."""
    left, right = (g, x) if parameters.form == "dot" else (x, g)
    left, right = (a.reshape(math.prod(a.shape[:-1]), a.shape[-1]) for a in (left, right))
    wide = jnp.result_type(left.dtype, right.dtype, jnp.float32)
    if left.dtype != right.dtype:
        left, right = left.astype(wide), right.astype(wide)
    rows, height = codes.shape[0], _panel_rows(parameters.cols, wide)

    def panel(stored: tuple[jax.Array, jax.Array]) -> jax.Array:
        """(rows of the panel, columns or blocks or 1): what these rows, (P, M) of the left operand, add."""
        columns, held = stored
        change = lax.dot_general(
            columns, right, (((1,), (0,)), ((), ())), precision=parameters.precision, preferred_element_type=wide
        )
        values = parameters.format.values(unpack(held, parameters.fmt), wide)
        if not parameters.format.blocked:
            found = values[..., : parameters.cols] * change
            return found if shape[-1] == parameters.cols else jnp.sum(found, axis=-1, keepdims=True)
        missing = math.prod(values.shape[1:]) - parameters.cols
        return jnp.sum(values * jnp.pad(change, ((0, 0), (0, missing))).reshape(values.shape), axis=-1)

    made = in_panels(panel, (left.T, codes), rows, height)
    return made if shape[0] == rows else jnp.sum(made, axis=0, keepdims=True)


def _panel_rows(columns: int, dtype: Any) -> int:
    return max(_PANEL_BYTES // (jnp.dtype(dtype).itemsize * max(columns, 1)), 8)


def in_panels(panel: Any, stored: Any, rows: int, height: int) -> jax.Array:
    """`panel` of a few rows of everything at a time, the results one below the other."""
    if rows <= height:
        return panel(stored)
    count, left = divmod(rows, height)
    whole = jax.tree.map(lambda a: a[: rows - left].reshape(count, height, *a.shape[1:]), stored)
    made = lax.map(panel, whole)
    made = made.reshape(count * height, *made.shape[2:])
    if not left:
        return made
    return jnp.concatenate([made, panel(jax.tree.map(lambda a: a[rows - left :], stored))])
