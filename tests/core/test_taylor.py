"""`jax.experimental.jet` on packed arrays: the Taylor series of the dense program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.jet import jet

import eformer as ef

X = jax.random.normal(jax.random.key(1), (3, 64)) / 8
W = jax.random.normal(jax.random.key(0), (64, 32))
MORE = ("mxfp4", "ternary")
TERMS = [jax.random.normal(jax.random.key(i), X.shape) / 8 for i in (2, 3)]


def _check(f: Any, q: Any) -> None:
    found = jet(lambda x: f(x, q), (X,), (TERMS,))
    want = jet(lambda x: f(x, ef.dequantize(q)), (X,), (TERMS,))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, 2e-4, 2e-5)


@pytest.mark.parametrize("dtype", ["nf4", "int8", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in MORE)])
def test_a_product(dtype):
    q = ef.quantize(W, dtype=dtype)
    _check(lambda x, w: jnp.sin(x @ w), q)
    _check(jax.jit(ef.implicit(lambda x, w: jnp.tanh(jnp.dot(x, w)) * w[jnp.array([0, 3, 5])])), q)


def test_scales_and_adapters():
    q = ef.quantize(W, dtype="nf4")
    _check(ef.implicit(lambda x, w: jnp.exp(x @ (w * x[0, 0]))), q)  # x and the scale move
    _check(lambda x, w: x @ w, ef.LoraArray(q, W[:, :4] / 8, W[:4] / 8))
    with ef.materialization_policy("allow"):
        _check(lambda x, w: jnp.sin(jnp.dot(x, w)), q)
