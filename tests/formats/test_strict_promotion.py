"""`jax_numpy_dtype_promotion="strict"`: what a program may do with a dense array it may do with a quantized one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from eformer.jaximus import implicit
from eformer.ops.quantization import LoraArray, quantize

FORMATS = ("nf4", "int8", "ternary", "binary")


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_arrays_are_quantized_and_scaled(fmt: str, dtype, key: jax.Array):
    q = quantize(jax.random.normal(key, (64, 32), dtype), dtype=fmt)
    assert q.dtype == q.materialize().dtype == dtype
    for f in (lambda q: q * 2, lambda q: q / 3, lambda q: -q):
        out = implicit(f)(q)
        assert type(out) is type(q)
        assert out.dtype == dtype


@pytest.mark.parametrize("base", [None, "nf4"])
def test_adapters(base: str | None, key: jax.Array):
    w = jax.random.normal(key, (64, 32), jnp.bfloat16)
    q = LoraArray(
        w if base is None else quantize(w, dtype=base), jnp.ones((64, 3), w.dtype), jnp.ones((3, 32), w.dtype)
    )
    x = jnp.ones((5, 64), jnp.bfloat16)
    for out in (x @ q, q.materialize(), q[jnp.array([1, 2])], jax.grad(lambda x: jnp.sum(x @ q))(x)):
        assert out.dtype == jnp.bfloat16
