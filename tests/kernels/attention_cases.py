"""Attention over quantized caches, next to what float64 makes of the same codes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from formats import references

import eformer as ef
from eformer._kernels.attention import attend, attend_joined

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


def stored(rows: jax.Array, kind: str) -> dict[str, np.ndarray]:
    """What a cache stores of rows."""
    if kind == "dense":
        return {"rows": np.asarray(rows)}
    bits, size = int(kind[3:]), rows.shape[-1]
    how: dict[str, Any] = {"block_size": size} if bits == 8 else {"block_size": 64, "scale_dtype": jnp.bfloat16}
    codes, scale, _ = references.integer_encode(np.asarray(rows, np.float32), axis=-1, bits=bits, **how)
    packed = (codes.astype(np.int16) - 128).astype(np.int8) if bits == 8 else references.bits_in_a_row(codes, bits)
    return {"packed": packed, "scale": scale}


def filled_caches(
    key: jax.Array, kinds: tuple[str, str] | None, layers: int | None, shape: tuple[int, ...], dtype: Any
) -> tuple[list[Any], jax.Array | None]:
    """Keys and values, dense where there are no kinds; in stacks, with the number of the last layer, of so many."""
    shape, index = (shape, None) if layers is None else ((layers, *shape), jnp.asarray(layers - 1))
    if kinds is not None:
        return caches(key, kinds, shape), index
    return [jax.random.normal(k, shape, dtype) for k in jax.random.split(key)], index


def check_written(
    key: jax.Array,
    kinds: tuple[str, str] | None,
    layers: int | None,
    place: int,
    *,
    size: int = 64,
    group: int = 4,
    heads: int = 3,
    positions: int = 50,
    dtype: Any = jnp.float32,
    tolerance: float = 1e-5,
    kernel: str = "",
) -> None:
    """Rows that are written on the way are those that `at[...].set` writes, bit for bit, and what is seen is, too."""
    both, index = filled_caches(key, kinds, layers, (2, heads, positions, size), dtype)
    q, *new = (
        jax.random.normal(k, (2, heads, n, size)).astype(dtype)
        for k, n in zip(jax.random.split(key, 3), (group, 1, 1), strict=True)
    )
    # An exact zero, and a row of zeros, whose scale is 0.
    new = [row[:, :, 0].at[0, 0].set(0).at[1, 1, 3].set(0) for row in new]
    run = jax.jit(lambda *given: attended(*given[:-1], new=given[-1], factor=0.125))
    if kinds is not None:
        assert f"cache_attention: {kernel}" in str(ef.explain(run)(q, *both, place, index, new))
    found, *filled = run(q, *both, jnp.asarray(place), index, new)
    at = (*([] if index is None else [int(index)]), slice(None), slice(None), min(place, positions - 1))
    for old, part, row, kind in zip(both, filled, new, kinds or ("dense", "dense"), strict=True):
        for name, want in stored(row, kind).items():
            whole = np.array(old if kind == "dense" else getattr(old, name))
            whole[at] = want
            np.testing.assert_array_equal(np.asarray(part if kind == "dense" else getattr(part, name)), whole)
    seen = attended(q, *filled, place, index, factor=0.125)
    largest = float(jnp.abs(seen).max())
    np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(seen, np.float32), atol=tolerance * largest)


@ef.implicit
def attended_joined(rows: Any, keys: Any, values: Any, place: Any, index: Any, **how: Any) -> Any:
    return attend_joined(rows, keys, values, place, index, **how)


def turned(x: Any, angles: np.ndarray, halves: bool) -> np.ndarray:
    """Pairs of the last axis as complex numbers, in float64."""
    x = np.asarray(x, np.float64)
    a, b = np.split(x, 2, axis=-1) if halves else (x[..., ::2], x[..., 1::2])
    z = (a + 1j * b) * np.exp(1j * angles)
    return np.concatenate((z.real, z.imag), -1) if halves else np.stack((z.real, z.imag), -1).reshape(x.shape)


def check_joined(
    key: jax.Array,
    kinds: tuple[str, str] | None,
    layers: int | None,
    place: int,
    *,
    size: int = 64,
    group: int = 4,
    heads: int = 3,
    positions: int = 50,
    halves: bool | None = None,
    dtype: Any = jnp.float32,
    tolerance: float = 1e-5,
    kernel: str = "",
) -> None:
    """All that a token has in one array is what it is apart, turned before; `halves` None turns nothing."""
    both, index = filled_caches(key, kinds, layers, (2, heads, positions, size), dtype)
    rows = jax.random.normal(key, (2, heads * (group + 2) * size)).astype(dtype)
    angles = np.asarray(jax.random.uniform(key, (size // 2,), maxval=6.0))
    turns = None if halves is None else jnp.stack((jnp.cos(angles), jnp.sin(angles)))
    run = jax.jit(lambda *given: attended_joined(*given, size=size, turns=turns, halves=bool(halves), factor=0.125))
    if kinds is not None:
        assert f"cache_attention: {kernel}" in str(ef.explain(run)(rows, *both, jnp.asarray(place), index))
    found, *filled = run(rows, *both, jnp.asarray(place), index)
    parts = np.split(np.asarray(rows, np.float64), [heads * group * size, heads * (group + 1) * size], axis=-1)
    q, new_keys, new_values = (part.reshape(2, heads, -1, size) for part in parts)
    if halves is not None:
        q, new_keys = (turned(part, angles, halves) for part in (q, new_keys))
    q, *new = (jnp.asarray(part).astype(dtype) for part in (q, new_keys, new_values))
    want, *wanted = attended(q, *both, place, index, new=[row[:, :, 0] for row in new], factor=0.125)
    assert found.shape == want.shape
    largest = float(jnp.abs(want).max())
    np.testing.assert_allclose(np.asarray(found, np.float64), np.asarray(want, np.float64), atol=tolerance * largest)
    for part, other in zip(filled, wanted, strict=True):
        # A value at the edge of two codes may be either.
        step = 0.0 if kinds is None else 1.01 * float(jnp.abs(other.scale.astype(jnp.float32)).max())
        made, there = (np.asarray(ef.materialize(a), np.float64) for a in (part, other))
        np.testing.assert_allclose(made, there, atol=step + tolerance * np.abs(there).max())
        assert (np.abs(made - there) > tolerance * np.abs(there).max()).mean() < 1e-3
