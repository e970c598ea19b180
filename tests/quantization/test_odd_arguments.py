"""Arguments out of the ordinary: what plain JAX makes of them, quantized arrays do too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eformer.jaximus import implicit, materialize
from eformer.ops.quantization import Array1B, Array8B, ArrayNF4

ARRAYS = {
    "nf4": lambda w: ArrayNF4.quantize(w, 8, axis=-1),
    "int8": Array8B.quantize,
    "ternary": lambda w: Array1B.quantize(jnp.sign(w), axis=-1),
}


@pytest.fixture(params=ARRAYS)
def q(request: pytest.FixtureRequest, key: jax.Array):
    return ARRAYS[request.param](jax.random.normal(key, (16, 32)))


def test_starts_outside_of_the_array(q) -> None:
    """A negative start counts from the end once, and is clamped then; so is one that is too large."""
    dense = q.materialize()
    programs = (
        lambda a, i: a[i],
        lambda a, i: lax.dynamic_index_in_dim(a, i, keepdims=False),
        lambda a, i: lax.dynamic_slice(a, (i, 0), (3, 32)),
        lambda a, i: lax.dynamic_slice_in_dim(a, i, 5),
    )
    for program in programs:
        mapped = jax.jit(implicit(program))
        for i in (-100, -17, -16, -15, -1, 0, 13, 15, 16, 100):
            np.testing.assert_array_equal(materialize(mapped(q, i)), jax.jit(program)(dense, i), err_msg=str(i))


def test_what_arrays_refuse_is_refused_alike(q) -> None:
    dense = q.materialize()
    for program in (
        lambda a: lax.transpose(a, (0, 0)),
        lambda a: lax.transpose(a, (0, 2)),
        lambda a: lax.concatenate([a, a], 3),
        lambda a: lax.broadcast_in_dim(a, (16, 32, 2), (0, 5)),
    ):
        with pytest.raises((TypeError, ValueError)) as plain:
            program(dense)
        with pytest.raises(plain.type) as ours:
            implicit(program)(q)
        assert str(ours.value).splitlines()[0] == str(plain.value).splitlines()[0]
    with pytest.raises(ValueError, match=r"512 values of shape \(16, 32\) cannot be reshaped to \(5, 5\)"):
        implicit(lambda a: lax.reshape(a, (5, 5)))(q)
