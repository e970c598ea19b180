"""The loop of the tiled path: decode one panel of rows at a time and multiply it while it is in cache.

A format decodes a panel into `planes`: plane i holds every n-th column starting at i, which is how packed bytes come
apart without shuffling (n values per byte). x is split the same way once, or the result is woven together once, so the
interleaved dense matrix never exists.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eformer._jax.avals import zeros_like_in

from ..formats import FORMATS, Format, entries
from ..parameters import Problem

# Decoded bytes one panel may take: much less than a dense matrix, enough to make the cost of a loop step small. XLA
# rearranges x for every panel it is multiplied with: with many rows of x fewer, larger panels are quicker.
_PANEL_BYTES, _PANEL_BYTES_MANY, _MANY = 8 << 20, 16 << 20, 64
_SMALLEST, _LARGEST = 32, 4096
NIBBLES = (4, 0)  # shifts of the first and the second value in a byte

# (codes of a panel, scale of a panel or None) -> planes, each of the shape of the codes, or of the units of codes
Planes = Callable[[jax.Array, Any], list[jax.Array]]


def panel_rows(problem: Problem) -> int:
    """Rows per panel: the power of two that fits the budget."""
    budget = _PANEL_BYTES if problem.has_at_most(_MANY - 1) else _PANEL_BYTES_MANY
    fitting = budget // (problem.compute_dtype.itemsize * max(problem.cols, 1))
    return min(max(1 << max(fitting.bit_length() - 1, 0), _SMALLEST), _LARGEST)


def split_columns(x: jax.Array, planes: int, positions: int) -> jax.Array:
    """(M, C) -> (planes, M, positions), zero-padded where the storage is."""
    padding = planes * positions - x.shape[-1]
    if padding:
        x = jnp.pad(x, ((0, 0), (0, padding)))
    return x.reshape(x.shape[0], positions, planes).transpose(2, 0, 1)


def weave_columns(ys: list[jax.Array], cols: int) -> jax.Array:
    """Inverse of `split_columns`, the padding dropped."""
    woven = ys[0] if len(ys) == 1 else jnp.stack(ys, axis=-1).reshape(ys[0].shape[0], -1)
    return woven[:, :cols]


def take_rows(array: Any, start: Any, count: int, axis: int = 0) -> Any:
    return None if array is None else lax.dynamic_slice_in_dim(array, start, count, axis)


def for_panels(rows: int, panel: int, body: Callable[[Any, Any, Any], Any], init: Any) -> Any:
    """Run body(start, repeated, carry) over all panels.

    The last panel is moved back to end at the last row instead of being cut, so that every step has one shape;
    `repeated` is how many of its first rows the step before has already seen.
    """

    def step(i: Any, carry: Any) -> Any:
        wanted = i * panel
        start = jnp.minimum(wanted, rows - panel)
        return body(start, wanted - start, carry)

    return lax.fori_loop(0, -(-rows // panel), step, init)


def dot_form(
    x: jax.Array, codes: jax.Array, scale: Any, planes: Planes, *, row: Format, panel: int, precision: Any
) -> jax.Array:
    """x @ D.T, (M, C) -> (M, R)."""
    rows = codes.shape[0]
    xs = split_columns(x, row.per_code, row.units_held(codes))

    def product(panel_codes: jax.Array, panel_scale: Any) -> jax.Array:
        return dot_panel(planes(panel_codes, panel_scale), xs, precision)

    if rows <= panel:
        return product(codes, scale).T

    def body(start: Any, repeated: Any, y: jax.Array) -> jax.Array:
        del repeated  # writing the same rows twice is harmless
        part = product(take_rows(codes, start, panel), take_rows(scale, start, panel))
        return lax.dynamic_update_slice_in_dim(y, part, start, 0)

    return for_panels(rows, panel, body, zeros_like_in((rows, x.shape[0]), x.dtype, x)).T


def dot_panel(decoded: list[jax.Array], xs: jax.Array, precision: Any) -> jax.Array:
    """(P, M). The panel is the left operand: XLA splits the rows of the larger operand over threads."""
    dots = [
        lax.dot_general(flat(w), part, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=xs.dtype)
        for w, part in zip(decoded, xs, strict=True)
    ]
    return functools.reduce(operator.add, dots)


def flat(plane: jax.Array) -> jax.Array:
    return plane.reshape(plane.shape[0], -1)


def axpy_form(
    x: jax.Array, codes: jax.Array, scale: Any, planes: Planes, *, row: Format, cols: int, panel: int, precision: Any
) -> jax.Array:
    """x @ D, (M, R) -> (M, C): add up the products of row panels."""
    rows = codes.shape[0]

    def product(x_panel: jax.Array, panel_codes: jax.Array, panel_scale: Any) -> list[jax.Array]:
        dims = (((1,), (0,)), ((), ()))
        return [
            lax.dot_general(x_panel, flat(w), dims, precision=precision, preferred_element_type=x.dtype)
            for w in planes(panel_codes, panel_scale)
        ]

    if rows <= panel:
        return weave_columns(product(x, codes, scale), cols)

    def body(start: Any, repeated: Any, ys: list[jax.Array]) -> list[jax.Array]:
        x_panel = take_rows(x, start, panel, axis=1)
        if rows % panel:
            x_panel = jnp.where(jnp.arange(panel) >= repeated, x_panel, 0)
        part = product(x_panel, take_rows(codes, start, panel), take_rows(scale, start, panel))
        return [y + p for y, p in zip(ys, part, strict=True)]

    zeros = zeros_like_in((x.shape[0], row.units_held(codes)), x.dtype, x)
    ys = for_panels(rows, panel, body, [zeros] * row.per_code)
    return weave_columns(ys, cols)


# -- the values of a panel of bytes, plane by plane: plane i holds value i of every unit -------------------------------


def unscaled(row: Format, codes: jax.Array, dtype: Any) -> list[jax.Array]:
    if row.table is not None:
        return [entries(row.table, codes, dtype, shift) for shift in NIBBLES]
    if row.name == "binary":
        one = jnp.ones((), dtype)
        return [jnp.where((codes & jnp.uint8(1 << bit)) != 0, one, -one) for bit in range(7, -1, -1)]
    return [row.values(field, dtype) for field in row.fields(codes)]


def planes(fmt: str, codes: jax.Array, scale: Any, dtype: Any) -> list[jax.Array]:
    """Each of the shape of the codes; scale None stands for 1."""
    return scaled(unscaled(FORMATS[fmt], codes, dtype), scale, codes)


def scaled(values: list[jax.Array], scale: Any, codes: jax.Array) -> list[jax.Array]:
    """Planes times the scale of every block (codes with an axis of blocks) or of every value."""
    if scale is None:
        return values
    factors = [scale[..., None]] if codes.ndim == 3 else split_columns(scale, len(values), codes.shape[-1])
    return [value * factors[i % len(factors)] for i, value in enumerate(values)]
