"""The CUDA kernel for attention over a quantized cache. Runs with EFORMER_TEST_PLATFORM=cuda."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eformer as ef
from eformer import models

from ..attention_cases import CACHES, attended, caches, check_joined, check_written, error

pytestmark = pytest.mark.gpu
# Relative to the largest value: weights are sums of two bfloat16, or one.
LIMITS = {"float32": 3e-5, "float16": 1e-3, "bfloat16": 8e-3}
CASES: list[dict[str, Any]] = [
    {"size": 64, "group": 1, "place": 0},
    {"size": 128, "group": 4, "positions": 1024, "place": 700, "layers": 3},
    {"size": 128, "group": 8, "positions": 1000, "heads": 8, "batch": 9},
    {"size": 128, "group": 5, "positions": 333, "place": 1000, "cap": 3.0},
    {"size": 256, "group": 16, "positions": 777, "window": 300, "place": 600},
    {"size": 256, "group": 2, "positions": 64, "layers": 2},
    {"size": 80, "group": 12, "positions": 130},
    {"size": 128, "group": 4, "positions": 5000, "batch": 1, "heads": 2},
]


MIXED = ("int8", "int4")


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("kinds", CACHES, ids=str)
@pytest.mark.parametrize("options", CASES, ids=str)
def test_it_is_as_exact_as_the_dtype(key, kinds: tuple[str, str], options: dict[str, Any], dtype: str) -> None:
    if kinds == MIXED and options["size"] == 80:
        pytest.skip("left to XLA's products, whose float32 is TF32")
    assert error(key, kinds, dtype=jnp.dtype(dtype), kernel="native_cuda", **options) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("kinds", CACHES, ids=str)
@pytest.mark.parametrize(("size", "group", "heads"), [(64, 3, 2), (128, 4, 8), (256, 2, 40)])
def test_rows_are_written_in_place(key, kinds: tuple[str, str], size: int, group: int, heads: int, dtype: str) -> None:
    how: dict[str, Any] = {
        "size": size,
        "group": group,
        "heads": heads,
        "dtype": jnp.dtype(dtype),
        "kernel": "native_cuda",
    }
    for layers, positions, place in ((None, 50, 31), (3, 300, 299), (2, 1000, 2000), (None, 700, 0)):
        check_written(key, kinds, layers, place, positions=positions, tolerance=LIMITS[dtype], **how)


JOINED = [(64, 3, 2), (128, 4, 8), (128, 1, 5), (256, 2, 3), (80, 4, 2)]


@pytest.mark.parametrize("halves", [None, False, True])
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("kinds", CACHES, ids=str)
@pytest.mark.parametrize(("size", "group", "heads"), JOINED)
def test_all_that_a_token_has_may_be_one_array(
    key, kinds: Any, size: int, group: int, heads: int, dtype: str, halves: bool | None
) -> None:
    how: dict[str, Any] = {"size": size, "group": group, "heads": heads, "halves": halves, "dtype": jnp.dtype(dtype)}
    kernel = "products" if kinds == MIXED and size == 80 else "native_cuda"
    for layers, positions, place in ((None, 50, 31), (3, 300, 299)):
        limit = max(LIMITS[dtype], 1e-3 if kernel == "products" else 0)  # XLA's float32 is TF32
        check_joined(key, kinds, layers, place, positions=positions, tolerance=limit, kernel=kernel, **how)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("cache", ["int8", "int4", "int8+int4"])
def test_joined_weights_decode_as_those_of_their_own(key, cache: str, stacked: bool, halves: bool) -> None:
    """The first have attention that turns and takes apart what a token has, the others do so before it."""
    config = models.Config(
        vocabulary=64, width=512, layers=3, heads=8, kv_heads=2, hidden=1024, head_size=64, rope_halves=halves
    )
    dense = jax.tree.map(lambda w: w.astype(jnp.bfloat16), models.init(config, key))
    layers = [jax.tree.map(lambda w, i=i: w[i], dense["layers"]) for i in range(3)]
    packed = [{n: ef.quantize(w, dtype="nf4") if w.ndim == 2 else w for n, w in layer.items()} for layer in layers]
    tokens = jax.random.randint(key, (5, 9), 0, 64)

    def decoded(params: Any) -> np.ndarray:
        if stacked:
            params = {**params, "layers": jax.tree.map(lambda *parts: jnp.stack(parts), *params["layers"])}
        held = models.make_cache(config, 5, 32, jnp.bfloat16, format=cache, listed=not stacked)
        step, made = jax.jit(lambda *given: models.decode(config, *given)), []
        for place in range(9):
            logits, held = step(params, tokens[:, place : place + 1], held, jnp.asarray(place))
            made.append(np.asarray(logits, np.float64))
        return np.stack(made)

    params = {**dense, "layers": packed}
    own, joined = decoded(params), decoded(models.fuse(params))
    assert np.linalg.norm(joined - own) < 2e-2 * np.linalg.norm(own)


@pytest.mark.parametrize(("kinds", "size"), [(MIXED, 80)], ids=str)
def test_what_is_left_to_products(key, kinds: tuple[str, str], size: int) -> None:
    q, both = jnp.ones((2, 3, 4, size), jnp.bfloat16), caches(key, kinds, (2, 3, 50, size))
    assert "cache_attention: products" in str(ef.explain(lambda *given: attended(*given, factor=1.0))(q, *both, 30))


def test_what_is_not_seen_is_not_read_and_nothing_seen_is_nan(key) -> None:
    q, (keys, values) = jnp.ones((2, 3, 4, 64), jnp.bfloat16), caches(key, MIXED, (2, 3, 50, 64))
    spoilt = values.at[:, :, 31:].set(jnp.full((2, 3, 19, 64), jnp.nan))
    np.testing.assert_array_equal(attended(q, keys, spoilt, 30, factor=1.0), attended(q, keys, values, 30, factor=1.0))
    assert jnp.isnan(attended(q, keys, spoilt, 31, factor=1.0)).all()
    assert jnp.isnan(attended(q, keys, values, -1, factor=1.0)).all()
