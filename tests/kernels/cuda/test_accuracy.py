"""Products are as accurate as dense ones: against float64, at most 1.5 times the error of the dense product.

The reference multiplies the values the array stands for (codes times scales) in float64. The dense product is that of
`materialize()`, in the dtype of x and at the default precision.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eformer as ef
from eformer.ops.quantization import Array1B, Array8B, ArrayNF4

pytestmark = pytest.mark.gpu

LIMIT = 1.5
ROWS = (1, 2, 8, 12, 40, 64, 150, 1100)
TYPES = (("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "float32"))
ENCODERS: dict[str, Any] = {
    "nf4": ArrayNF4.quantize,
    "int4": lambda w: ef.quantize(w, dtype="int4", block_size=64),
    "int8": Array8B.quantize,
    "ternary": lambda w: Array1B.from_float(w, "ternary"),
    "binary": lambda w: Array1B.from_float(w, "binary"),
}
FORMS: dict[str, Any] = {
    "dot": ef.implicit(lambda x, w: x @ w),
    "axpy": ef.implicit(lambda g, w: jnp.einsum("mn,kn->mk", g, w)),
}


def make_x(rng: np.random.Generator, kind: str, m: int, deep: int) -> np.ndarray:
    x = rng.standard_normal((m, deep))
    if kind == "positive":
        return np.abs(x)
    if kind == "constant":
        return np.full_like(x, 0.7)
    return x * np.where(rng.random(x.shape) < 1e-3, 1000, 1) if kind == "outliers" else x


def errors(found: list[Any], dense: list[Any], expected: list[np.ndarray]) -> list[tuple[float, float]]:
    def error(y: Any, wanted: np.ndarray) -> float:
        return float(np.linalg.norm(np.asarray(y, np.float64) - wanted) / np.linalg.norm(wanted))

    return [(error(y, z), error(d, z)) for y, d, z in zip(found, dense, expected, strict=True)]


def weights(deep: int, outs: int, form: str, dtype: str) -> jax.Array:
    shape = (deep, outs) if form == "dot" else (outs, deep)
    return (0.02 * jax.random.normal(jax.random.key(deep), shape)).astype(dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", ENCODERS)
def test_products_are_as_accurate_as_dense_ones(fmt: str, form: str) -> None:
    rng = np.random.default_rng(7)
    product = FORMS[form]
    for (x_dtype, dtype), deep in itertools.product(TYPES, (4096, 28672) if fmt == "nf4" else (8192,)):
        w = weights(deep, 768, form, dtype)
        q, exact = ENCODERS[fmt](w), np.asarray(ENCODERS[fmt](w.astype(jnp.float32)).materialize(), np.float64)
        with jax.enable_x64(True):  # pyright: ignore[reportCallIssue]
            values = jnp.asarray(exact)
        both = jax.jit(lambda xs, q, d: ([product(x, q) for x in xs], [product(x, d) for x in xs]))
        for kind in ("both signs", "positive", "constant", "outliers"):
            xs = [jnp.asarray(make_x(rng, kind, m, deep), x_dtype) for m in ROWS]
            with jax.enable_x64(True):  # pyright: ignore[reportCallIssue]
                wide = [jnp.asarray(np.asarray(x, np.float64)) for x in xs]
                expected = [np.asarray(x @ (values if form == "dot" else values.T)) for x in wide]
            found, dense = both(xs, q, q.materialize())
            for m, (mine, theirs) in zip(ROWS, errors(found, dense, expected), strict=True):
                assert mine <= LIMIT * theirs, (x_dtype, dtype, deep, kind, m, mine, theirs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", ENCODERS)
def test_an_infinity_gives_what_the_dense_product_gives(fmt: str, form: str) -> None:
    product = FORMS[form]
    both = jax.jit(lambda xs, q, d: ([product(x, q) for x in xs], [product(x, d) for x in xs]))
    for x_dtype in ("float32", "bfloat16", "float16"):
        q = ENCODERS[fmt](weights(1024, 320, form, x_dtype))
        x = np.array(np.random.default_rng(8).standard_normal((300, 1024)))
        x[0, 17], x[1, 300], x[2, 5], x[3, 900] = np.inf, -np.inf, np.nan, 1e-3 * float(jnp.finfo(x_dtype).max)
        found, dense = both([jnp.asarray(x[:m], x_dtype) for m in (1, 8, 12, 40, 300)], q, q.materialize())
        for y, d in zip(found, dense, strict=True):
            mine, theirs = (np.asarray(v, np.float64) for v in (y, d))
            finite = np.isfinite(theirs)
            np.testing.assert_array_equal(np.isfinite(mine), finite)
            np.testing.assert_array_equal(mine[~finite], theirs[~finite])  # NaN equals NaN there
