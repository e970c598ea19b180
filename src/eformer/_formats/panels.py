"""The product of a format that the kernels do not know: decoded a panel of rows at a time by its own `materialize`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eformer._core.materialization import decode
from eformer._record import record

ROWS, VALUES = 256, 1 << 17  # of a panel, at most: it should stay in a cache


def product(q: Any, x: jax.Array, form: str, *, out_dtype: Any, precision: Any) -> Any:
    """x @ D.T (`form="dot"`) or x @ D (`form="axpy"`), D being `q` of shape (batch..., R, C), packed along C if at all.

    The backward pass decodes again: between the passes nothing dense is kept.
    """
    lead, (rows, columns) = q.shape[:-2], q.shape[-2:]
    height = min(rows, ROWS, max(1, VALUES // columns))
    why = f"{q.format} has no kernel: {height} rows are decoded at a time"
    record("kernel", op="product", name="panels", reason=why, rows=rows, columns=columns)
    stored = {p.field: q.frozen_scale() if p.is_scale else q.part(p) for p in q.parts}
    absent = {name: None for name, array in stored.items() if array is None}
    parts = {
        name: jnp.broadcast_to(array, (*lead, rows, *array.shape[q.ndim - 1 :]))
        for name, array in stored.items()
        if array is not None
    }

    def one(x: jax.Array, parts: Any) -> jax.Array:
        wide = jnp.promote_types(x.dtype, q.dtype)

        def dot(x: jax.Array, panel: Any) -> jax.Array:
            contracted = 1 if form == "dot" else 0
            numbers = (((1,), (contracted,)), ((), ()))
            w = decode(q.moved({**absent, **panel}, q.blocked, sharding=None)).astype(wide)
            return lax.dot_general(x.astype(wide), w, numbers, precision=precision, preferred_element_type=sums)

        sums = jnp.promote_types(out_dtype, jnp.float32)
        return (_dot_form if form == "dot" else _axpy_form)(jax.checkpoint(dot), x, parts, height).astype(out_dtype)

    if not lead:
        return one(x.reshape(-1, x.shape[-1]), parts).reshape(*x.shape[:-1], rows if form == "dot" else columns)
    for _ in lead:
        one = jax.vmap(one)
    return one(x, parts)


def _cut(parts: Any, height: int) -> tuple[int, Any, Any]:
    """How many whole panels there are, these stacked, and the rows that are left, or None."""
    rows = next(iter(parts.values())).shape[0]
    count, left = divmod(rows, height)
    panels = {name: a[: rows - left].reshape(count, height, *a.shape[1:]) for name, a in parts.items()}
    return count, panels, {name: a[rows - left :] for name, a in parts.items()} if left else None


def _dot_form(dot: Any, x: jax.Array, parts: Any, height: int) -> jax.Array:
    count, panels, rest = _cut(parts, height)
    stacked = lax.map(lambda panel: dot(x, panel), panels)  # (panels, M, height)
    y = jnp.moveaxis(stacked, 0, 1).reshape(x.shape[0], count * height)
    return y if rest is None else jnp.concatenate([y, dot(x, rest)], axis=1)


def _axpy_form(dot: Any, x: jax.Array, parts: Any, height: int) -> jax.Array:
    _, panels, rest = _cut({"": x.T, **parts}, height)

    def step(y: Any, panel: Any) -> tuple[Any, None]:
        stored = {name: a for name, a in panel.items() if name}
        return y + dot(panel[""].T, stored), None

    first = {name: a[0] for name, a in panels.items()}
    y = step(0, first)[0] if rest is None else step(step(0, first)[0], rest)[0]
    return lax.scan(step, y, {name: a[1:] for name, a in panels.items()})[0]
