"""Attention over quantized caches, next to what float64 makes of the same codes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eformer as ef
from eformer._kernels.attention import attend

CACHES = (("int8", "int8"), ("int8", "int4"), ("int4", "int4"))


def exact(q: Any, keys: Any, values: Any, place: int, *, factor: float, cap: Any = None, window: Any = None) -> Any:
    q, keys, values = (np.asarray(a, np.float64) for a in (q, keys, values))
    scores = np.einsum("bkgd,bksd->bkgs", q, keys) * factor
    scores = scores if cap is None else np.tanh(scores / cap) * cap
    places = np.arange(keys.shape[2])
    seen = (places <= place) & (window is None or places > place - (window or 0))
    scores = np.where(seen, scores, -np.inf)
    odds = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bkgs,bksd->bkgd", odds / odds.sum(-1, keepdims=True), np.where(seen[:, None], values, 0))


def caches(key: jax.Array, kinds: tuple[str, str], shape: tuple[int, ...]) -> list[Any]:
    """Keys and values whose rows differ in size by a factor of a thousand."""
    made = []
    for part, kind in zip(jax.random.split(key), kinds, strict=True):
        rows = jax.random.normal(part, shape) * 10.0 ** jax.random.uniform(part, (*shape[:-1], 1), minval=-3, maxval=0)
        made.append(ef.QuantizedCache.quantize(rows, kind))
    return made


@ef.implicit
def attended(q: Any, keys: Any, values: Any, place: Any, index: Any = None, **how: Any) -> Any:
    return attend(q, keys, values, place, index, **how)


def error(
    key: jax.Array,
    kinds: tuple[str, str],
    *,
    size: int = 64,
    group: int = 4,
    positions: int = 200,
    place: int | None = None,
    dtype: Any = jnp.float32,
    batch: int = 2,
    heads: int = 3,
    layers: int | None = None,
    cap: float | None = None,
    window: int | None = None,
    kernel: str = "",
) -> float:
    """The largest error relative to the largest value, over all entries of a stack where there is one.

    `kernel` is part of the name of what has to compute it.
    """
    lead = () if layers is None else (layers,)
    q = (3 * jax.random.normal(key, (batch, heads, group, size))).astype(dtype)
    both = caches(key, kinds, (*lead, batch, heads, positions, size))
    place = positions - 1 if place is None else place
    how = {"factor": size**-0.5, "cap": cap, "window": window}
    run, worst = jax.jit(lambda q, keys, values, place, *index: attended(q, keys, values, place, *index, **how)), 0.0
    shown = str(ef.explain(lambda *given: attended(*given, **how))(q, *both, place, *([0] if lead else [])))
    assert f"cache_attention: {kernel}" in shown
    for index in range(layers or 1):
        given = [] if layers is None else [jnp.asarray(index)]
        found = run(q, *both, jnp.asarray(place), *given)
        assert found.dtype == q.dtype
        dense = [np.asarray(part.materialize(), np.float64) for part in both]
        dense = dense if layers is None else [part[index] for part in dense]
        want = exact(q.astype(jnp.float32), *dense, place, **how)
        worst = max(worst, float(np.abs(np.asarray(found, np.float64) - want).max() / np.abs(want).max()))
    return worst
