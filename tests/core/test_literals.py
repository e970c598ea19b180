"""Numbers that JAX keeps as literals of a program, as operands and as results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.jaximus import implicit
from eformer.ops.quantization import Array1B, LoraArray

CODES = np.array([[1, 0, -1, 1], [0, 1, 1, -1]], np.int8)


@pytest.mark.parametrize("f", [lambda w: w / 2.0, lambda w: w * 0.5, jax.nn.leaky_relu], ids=["div", "mul", "leaky"])
def test_integers_times_literals(f):
    q = Array1B.quantize(jnp.asarray(CODES))
    for run in (implicit(f), jax.jit(f), jax.jit(implicit(f))):
        out = run(q)
        assert out.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(out), f(jnp.asarray(CODES)))


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_shapes_of_adapters(wrap):
    q = LoraArray(jnp.ones((6, 4)), jnp.ones((6, 2)), jnp.ones((2, 4)))
    assert tuple(map(int, implicit(wrap(jnp.shape))(q))) == (6, 4)
    assert int(wrap(implicit(jnp.ndim))(q)) == 2
