"""The INT8 codec: equal to its readable twin, idempotent, bounded, and honest about what is not finite."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eformer._formats.int8 import codec

from . import references
from .references import assert_same, normal


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((5,), -1),
        ((130, 7), -1),
        ((130, 7), -2),
        ((33, 40), (-1, -2)),
        ((3, 4, 50), (-3, -1)),
        ((2, 3, 4, 5, 6), (-4, -2)),
        ((1, 1), -1),
        ((0, 3), -1),
        ((3, 0), -1),
    ],
)
def test_fast_equals_reference(shape, axes):
    w = normal(shape, seed=sum(shape))
    got = codec.encode(w, axes=axes)
    assert_same(got, references.int8_encode(w, axes=axes))
    dense = codec.decode(*got, dtype=jnp.float32)
    assert dense.shape == shape
    assert_same([dense], [references.int8_decode(*got, dtype=jnp.float32)])


def test_fast_equals_reference_on_many_values():
    # Enough rows to meet the mantissas for which dividing by 127 and multiplying by 1 / 127 differ.
    w = normal((4096, 70), seed=1)
    assert_same(codec.encode(w, axes=-1), references.int8_encode(w, axes=-1))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([-1, -2, (-1, -2)]), st.floats(-30, 30))
def test_round_trip_is_idempotent_and_bounded(seed, axes, exponent):
    rng = np.random.default_rng(seed)
    w = (rng.standard_normal((40, 40)) * rng.choice([0, 1, 1], (40, 40)) * 10.0**exponent).astype(np.float32)
    w[3] = 0
    weight, scale = codec.encode(w, axes=axes)
    dense = codec.decode(weight, scale, dtype=jnp.float32)
    assert_same(codec.encode(dense, axes=axes), [np.asarray(weight), np.asarray(scale)])
    error = np.abs(np.asarray(dense, np.float64) - w)
    assert (error <= 0.5 * np.asarray(scale, np.float64) * (1 + 1e-5)).all()
    assert (np.asarray(dense)[w == 0] == 0).all()
    assert np.abs(np.asarray(weight, np.int32)).max() == 127


def test_scale_survives_a_round_trip_for_every_kind_of_mantissa():
    w = np.linspace(1, 2, 100_001, dtype=np.float32)[:, None]
    weight, scale = codec.encode(w, axes=-1)
    again = codec.encode(codec.decode(weight, scale, dtype=jnp.float32), axes=-1)
    assert_same(again, [np.asarray(weight), np.asarray(scale)])


def test_error_is_what_theory_allows():
    w = normal((128, 4096), seed=2)
    dense = np.asarray(codec.decode(*codec.encode(w, axes=-1), dtype=jnp.float32))
    error = np.linalg.norm(dense - w) / np.linalg.norm(w)
    assert 0.005 < error < 0.012


def test_halves_round_to_even():
    w = np.array([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5], np.float32)
    weight, scale = codec.encode(w, axes=-1)
    assert scale.tolist() == [1.0]
    assert weight.tolist() == [127, 0, 2, 2, 0, -2, -126]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_value_that_is_not_finite_makes_its_scale_nan(bad, dtype):
    w = normal((50, 100), seed=3)
    w[20, 70] = bad
    for axes, index in ((-1, (20, slice(None))), (-2, (slice(None), 70)), ((-1, -2), (slice(None), slice(None)))):
        weight, scale = codec.encode(jnp.asarray(w, dtype), axes=axes)
        dense = np.asarray(codec.decode(weight, scale, dtype=jnp.float32))
        expected = np.zeros(w.shape, bool)
        expected[index] = True
        assert (np.isnan(dense) == expected).all()
        assert not np.asarray(weight)[index].any()


def test_zeros_and_tiny_values_decode_to_zero():
    w = np.array([[0.0, 0.0], [-0.0, 0.0], [1e-37, -1e-39]], np.float32)
    weight, scale = codec.encode(w, axes=-1)
    assert not np.asarray(weight).any() or not np.asarray(scale)[np.asarray(weight).any(axis=1)].any()
    assert not np.asarray(scale).any()
    assert not np.asarray(codec.decode(weight, scale, dtype=jnp.float32)).any()


def test_the_largest_values_are_kept():
    w = np.array([np.finfo(np.float32).max, -1e38, 0], np.float32)
    dense = np.asarray(codec.decode(*codec.encode(w, axes=-1), dtype=jnp.float32))
    np.testing.assert_allclose(dense, w, atol=np.finfo(np.float32).max / 253)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_has_an_f32_scale(dtype):
    w = jnp.asarray(normal((64, 48), seed=4), dtype)
    got = codec.encode(w, axes=-2)
    assert got[1].dtype == jnp.float32
    assert_same(got, references.int8_encode(np.asarray(w, np.float32), axes=-2))
    assert_same([codec.decode(*got, dtype=dtype)], [references.int8_decode(*got, dtype=dtype)])


def test_f64_has_an_f64_scale():
    w = np.random.default_rng(5).standard_normal((40, 30))
    with jax.enable_x64(True):
        got = codec.encode(jnp.asarray(w), axes=-1)
        assert_same(got, references.int8_encode(w, axes=-1))
        assert_same([codec.decode(*got, dtype=jnp.float64)], [references.int8_decode(*got, dtype=np.float64)])


def test_vmap_equals_loop():
    w = normal((4, 70, 33), seed=6)
    looped = [codec.encode(x, axes=-2) for x in w]
    batched = jax.vmap(lambda x: codec.encode(x, axes=-2))(w)
    assert_same(batched, [np.stack([np.asarray(q[i]) for q in looped]) for i in (0, 1)])


def test_eval_shape():
    w = jax.ShapeDtypeStruct((5, 130, 7), jnp.bfloat16)
    weight, scale = jax.eval_shape(lambda x: codec.encode(x, axes=(0, -1)), w)
    assert (weight.shape, weight.dtype) == ((5, 130, 7), jnp.int8)
    assert (scale.shape, scale.dtype) == ((1, 130, 1), jnp.float32)


@pytest.mark.parametrize("axes", [-1, -2, (-1, -2)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_quantizing_needs_little_memory(axes, dtype):
    w = jax.ShapeDtypeStruct((4096, 4096), dtype)
    compiled = jax.jit(lambda x: codec.encode(x, axes=axes)).lower(w).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= w.size * w.dtype.itemsize // 4


@pytest.mark.parametrize(
    ("axes", "match"), [(2, "out of range"), ((-1, 1), "twice"), ((), "at least one"), (-3, "rank 2")]
)
def test_bad_axes(axes, match):
    with pytest.raises(ValueError, match=match):
        codec.encode(np.ones((4, 4), np.float32), axes=axes)


@pytest.mark.parametrize("dtype", ["int32", "complex64", "bool"])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(TypeError, match=f"{dtype}.*Allowed: bfloat16"):
        codec.encode(np.ones(4, dtype), axes=-1)
