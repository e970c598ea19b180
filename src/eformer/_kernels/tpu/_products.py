"""Bringing a product into the shape the kernel takes, and its result back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..native import in_one_batch_axis
from ..parameters import Problem, out_shape
from ._matmul import Kernel, call
from ._pallas import can_permute, precision
from .tuning import Geometry, geometry


def qmatmul(
    problem: Problem,
    x: jax.Array,
    codes: jax.Array,
    scale: jax.Array | None,
    *,
    interpret: Any = False,
    permute: bool | None = None,
) -> jax.Array:
    """The product of one problem, batch axes included. `permute` forces a way of decoding nf4, for tests."""
    y = product(problem, *in_one_batch_axis(problem, x, codes, scale), interpret=interpret, permute=permute)
    return y.reshape(out_shape(problem, x, codes))


def product(
    problem: Problem,
    x: jax.Array,
    codes: jax.Array,
    scale: jax.Array | None,
    groups: tuple[jax.Array, jax.Array] | None = None,
    *,
    interpret: Any = False,
    permute: bool | None = None,
) -> jax.Array:
    """(tiles, M, K) times (matrices, ...) -> (tiles, M, N); see `_matmul.call` for `groups`."""
    g = geometry(problem, x.shape[1])
    before, factors = (None, None) if scale is None else _factors(problem, g, scale.astype(jnp.float32))
    kernel = Kernel(
        geometry=g,
        form=problem.form,
        out_dtype=problem.out_dtype,
        precision=precision(problem.precision),
        permute=can_permute() if permute is None else permute,
        grouped=groups is not None,
        scaled=factors is not None and problem.fmt != "nf4",
    )
    if before is not None:
        x = (x * (before if groups is None else before[groups[0]])).astype(x.dtype)
    if problem.form == "dot":
        x = split(x, g)
    y = call(kernel, x, stored(problem.fmt, codes), factors, groups, interpret=interpret)
    return y if problem.form == "dot" else weave(y, g)[..., : problem.cols]


def stored(fmt: str, codes: jax.Array) -> jax.Array:
    """Codes as the kernel reads them. For nf4, (matrices, bytes, rows): no copy, XLA keeps the rows last on a TPU."""
    if fmt != "nf4":
        return codes
    matrices, rows, blocks, size = codes.shape
    return codes.transpose(0, 2, 3, 1).reshape(matrices, blocks * size, rows)


def _factors(problem: Problem, g: Geometry, scale: jax.Array) -> tuple[jax.Array | None, jax.Array | None]:
    """What x is multiplied by before, and the factors the kernel takes: the scales of nf4, or those of y."""
    if problem.fmt == "nf4":
        return None, scale.swapaxes(1, 2)
    per_row, per_column = scale.shape[1] != 1, scale.shape[2] != 1
    row = scale.reshape(scale.shape[0], 1, -1)
    if problem.form == "dot":
        return (row, None) if per_column else (None, jnp.broadcast_to(row, (row.shape[0], 1, g.rows)))
    if per_row:
        return row, None
    return None, split(jnp.broadcast_to(row, (row.shape[0], 1, problem.cols)), g)


def split(x: jax.Array, g: Geometry) -> jax.Array:
    """(tiles, M, columns) -> (tiles, steps, planes, M, units), zeros behind the end; unchanged with one plane."""
    if g.planes == 1:
        return x
    tiles, m, columns = x.shape
    x = jnp.pad(x, ((0, 0), (0, 0), (0, g.unit_steps * g.bu * g.planes - columns)))
    return x.reshape(tiles, m, g.unit_steps, g.bu, g.planes).transpose(0, 2, 4, 1, 3)


def weave(y: jax.Array, g: Geometry) -> jax.Array:
    """Inverse of `split`; the padding stays."""
    return y if g.planes == 1 else y.transpose(0, 3, 1, 4, 2).reshape(y.shape[0], g.m, -1)
