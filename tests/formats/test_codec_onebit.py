"""Ternary and binary: packing is a bijection, scales are the least-squares ones, NaN does not vanish."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eformer._formats.onebit import codec
from eformer._formats.onebit.array import Array1B

from . import references
from .references import normal

SHAPES = [(1,), (9,), (33, 4), (4, 33), (1, 3, 20), (2, 3, 17, 5), (2, 1, 3, 10, 2), (0,), (3, 0)]


def values(shape: tuple[int, ...], bits: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).choice([-1, 0, 1] if bits == 2 else [-1, 1], shape).astype(np.int8)


def assert_same(got, want) -> None:
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want), strict=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [1, 2])
def test_pack_equals_reference_and_unpacks(shape, bits):
    codes = values(shape, bits, seed=sum(shape))
    for axis in range(-len(shape), 0):
        packed = codec.pack(codes, axis=axis, bits=bits)
        assert_same(packed, references.pack(codes, axis=axis, bits=bits))
        assert packed.shape[-1] == -(-shape[axis] * bits // 8)
        back = codec.unpack(packed, axis=axis, bits=bits, size=shape[axis])
        assert_same(back, codes)
        assert_same(back, references.unpack(packed, axis=axis, bits=bits, size=shape[axis]))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 15, 64, 77]), st.sampled_from([1, 2]), st.sampled_from([-1, -2]))
def test_packing_is_bijective(seed, size, bits, axis):
    codes = values((size, 3) if axis == -2 else (3, size), bits, seed)
    packed = codec.pack(codes, axis=axis, bits=bits)
    assert_same(codec.unpack(packed, axis=axis, bits=bits, size=size), codes)
    # And the other way: whole bytes of valid fields come back as they were.
    whole = values((3, 16), bits, seed + 1)
    stored = references.pack(whole, axis=-1, bits=bits)
    assert_same(codec.pack(codec.unpack(stored, axis=-1, bits=bits, size=16), axis=-1, bits=bits), stored)


def test_the_layout_is_the_documented_one():
    assert codec.pack(np.array([-1, 0, 1, 1], np.int8), axis=-1, bits=2).tolist() == [0b00_01_10_10]
    assert codec.pack(np.array([1], np.int8), axis=-1, bits=2).tolist() == [0b10_01_01_01]
    assert codec.pack(np.array([1, -1, 1, 1, -1], np.int8), axis=-1, bits=1).tolist() == [0b1011_0000]


@pytest.mark.parametrize("shape", [(7,), (40, 9), (3, 20, 17), (2, 2, 5, 6), (1, 1)])
@pytest.mark.parametrize("scale", ["channel", "tensor", None])
@pytest.mark.parametrize("kind", ["ternary", "binary"])
def test_fast_equals_reference(shape, scale, kind):
    w = normal(shape, seed=sum(shape)) + np.float32(0.1)
    fast, slow = getattr(codec, kind), getattr(references, kind)
    for axis in range(-len(shape), 0):
        codes, scales = fast(w, axis=axis, scale=scale)
        want, want_scales = slow(w, axis=axis, scale=scale)
        assert_same(codes, want)
        if scale is None:
            assert scales is None
            continue
        assert scales.dtype == jnp.float32
        moved = np.moveaxis(w, axis, -1).shape
        assert scales.shape == ((*moved[:-1], 1) if scale == "channel" else (1,) * len(shape))
        np.testing.assert_allclose(scales, want_scales, rtol=1e-6)


@pytest.mark.parametrize("kind", ["ternary", "binary"])
@pytest.mark.parametrize("scale", ["channel", "tensor"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_matrices_of_a_stack_are_independent(kind, scale, axis):
    w = normal((2, 3, 30, 21), seed=1) * np.arange(1, 7, dtype=np.float32).reshape(2, 3, 1, 1)
    w[1, 0, 3, 7] = np.nan
    codes, scales = jax.vmap(jax.vmap(lambda x: getattr(codec, kind)(x, axis=axis, scale=scale)))(w)
    assert scales.shape == ((2, 3, 1, 1) if scale == "tensor" else (2, 3, w.shape[-3 - axis], 1))
    for i in np.ndindex(2, 3):
        one, one_scale = getattr(codec, kind)(w[i], axis=axis, scale=scale)
        assert_same(codes[i], one)
        np.testing.assert_allclose(scales[i], one_scale, rtol=1e-6)
        assert np.isnan(scales[i]).any() == (i == (1, 0))


@pytest.mark.parametrize("kind", ["ternary", "binary"])
def test_the_scale_has_the_least_squared_error(kind):
    w = normal((50, 8), seed=2)
    codes, scales = getattr(codec, kind)(w, axis=-2)
    codes, scales = np.asarray(codes, np.float64), np.asarray(scales, np.float64)[:, 0]
    best = (codes * w).sum(axis=0) / np.square(codes).sum(axis=0)
    np.testing.assert_allclose(scales, best, rtol=1e-6)


@pytest.mark.parametrize(("kind", "low", "high"), [("ternary", 0.42, 0.46), ("binary", 0.59, 0.61)])
def test_error_is_what_theory_allows(kind, low, high):
    w = normal((1024, 256), seed=3)
    packed, scales = codec.encode(w, kind=kind, axis=-2)
    dense = np.asarray(codec.decode(packed, scales, axis=-2, bits=codec.BITS[kind], size=1024, dtype=jnp.float32))
    assert low < np.linalg.norm(dense - w) / np.linalg.norm(w) < high


@pytest.mark.parametrize("kind", ["ternary", "binary"])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_encode_is_the_two_steps_in_one(kind, axis, dtype):
    w = jnp.asarray(normal((45, 70), seed=4), dtype)
    codes, scales = getattr(codec, kind)(w, axis=axis)
    packed, packed_scales = codec.encode(w, kind=kind, axis=axis)
    bits = codec.BITS[kind]
    assert_same(packed, codec.pack(codes, axis=axis, bits=bits))
    np.testing.assert_allclose(packed_scales, scales, rtol=1e-6)
    dense = codec.decode(packed, packed_scales, axis=axis, bits=bits, size=w.shape[axis], dtype=dtype)
    want = np.asarray(codes, np.float32) * np.moveaxis(np.asarray(packed_scales), -1, axis)
    assert_same(dense, want.astype(dtype))
    bare = codec.decode(packed, None, axis=axis, bits=bits, size=w.shape[axis], dtype=dtype)
    assert_same(bare, codes.astype(dtype))


def test_a_given_threshold_is_absolute_and_strict():
    w = np.array([0.5, -0.5, 0.6, -0.7, 0.0], np.float32)
    codes, scale = codec.ternary(w, axis=-1, threshold=0.5)
    assert codes.tolist() == [0, 0, 1, -1, 0]
    np.testing.assert_allclose(scale, [0.65], rtol=1e-6)
    assert codec.ternary(w, axis=-1, threshold=0)[0].tolist() == [1, -1, 1, -1, 0]
    assert codec.ternary(w, axis=-1, threshold=9.0)[1].tolist() == [0.0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_reaches_the_scale(bad):
    w = normal((20, 40), seed=5)
    w[3, 7] = bad
    row = np.arange(20)[:, None] == 3
    assert_same(np.isnan(codec.binary(w, axis=-1)[1]), row)
    assert_same(np.isnan(codec.ternary(w, axis=-1, threshold=0.5)[1]), row)
    # The default threshold is a statistic of all values, so nothing can be said of any channel.
    assert np.isnan(codec.ternary(w, axis=-1)[1]).all()
    assert np.isnan(codec.ternary(w, axis=-1, scale="tensor", threshold=0.5)[1]).all()
    assert np.isnan(codec.binary(w, axis=-2, scale="tensor")[1]).all()


def test_zeros_and_constants():
    zeros, constant = np.zeros((4, 6), np.float32), np.full((4, 6), -2.5, np.float32)
    codes, scale = codec.ternary(zeros, axis=-1)
    assert not np.asarray(codes).any()
    assert not np.asarray(scale).any()
    codes, scale = codec.binary(np.array([0.0, -0.0], np.float32), axis=-1)
    assert (codes.tolist(), scale.tolist()) == ([1, 1], [0.0])
    codes, scale = codec.ternary(constant, axis=-1)
    np.testing.assert_array_equal(np.asarray(codes) * np.asarray(scale), constant)


@pytest.mark.parametrize("kind", ["ternary", "binary"])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_empty_arrays(kind, shape):
    packed, scale = codec.encode(np.zeros(shape, np.float32), kind=kind, axis=-1)
    assert packed.shape == (shape[0], -(-shape[1] * codec.BITS[kind] // 8))
    assert scale.shape == (shape[0], 1)
    assert not np.isnan(scale).any()


def test_f64_has_an_f64_scale():
    w = np.random.default_rng(7).standard_normal((40, 30))
    with jax.enable_x64(True):
        for kind in ("ternary", "binary"):
            codes, scale = getattr(codec, kind)(jnp.asarray(w), axis=-2)
            want, want_scale = getattr(references, kind)(w, axis=-2)
            assert_same(codes, want)
            assert scale.dtype == np.float64
            np.testing.assert_allclose(scale, want_scale, rtol=1e-13)


def test_eval_shape():
    w = jax.ShapeDtypeStruct((5, 130, 7), jnp.bfloat16)
    packed, scale = jax.eval_shape(lambda x: codec.encode(x, kind="ternary", axis=-2), w)
    assert (packed.shape, packed.dtype, scale.shape, scale.dtype) == ((5, 7, 33), jnp.uint8, (5, 7, 1), jnp.float32)


@pytest.mark.parametrize("kind", ["ternary", "binary"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_quantizing_needs_little_memory(kind, axis):
    w = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    for step in (lambda x: codec.encode(x, kind=kind, axis=axis), lambda x: getattr(codec, kind)(x, axis=axis)):
        compiled = jax.jit(step).lower(w).compile()
        assert compiled.memory_analysis().temp_size_in_bytes <= w.size * 4 // 4


def test_bad_arguments():
    w = np.ones((4, 4), np.float32)
    with pytest.raises(TypeError, match="int32"):
        codec.ternary(np.ones((4, 4), np.int32), axis=-1)
    with pytest.raises(TypeError, match="complex64"):
        codec.binary(np.ones((4, 4), np.complex64), axis=-1)
    with pytest.raises(TypeError, match="signed integers"):
        codec.pack(w, axis=-1, bits=2)
    with pytest.raises(TypeError, match="uint8"):
        codec.unpack(np.ones((4, 4), np.int8), axis=-1, bits=2, size=16)
    with pytest.raises(ValueError, match="rank 2"):
        codec.ternary(w, axis=-3)
    with pytest.raises(ValueError, match="'channel', 'tensor', None"):
        codec.ternary(w, axis=-1, scale="row")
    with pytest.raises(ValueError, match="at least 0"):
        Array1B.from_float(w, threshold=-1.0)
    with pytest.raises(ValueError, match="at least 0"):
        Array1B.from_float(w, threshold=float("nan"))
    with pytest.raises(ValueError, match="bits=3"):
        codec.pack(w.astype(np.int8), axis=-1, bits=3)
    with pytest.raises(ValueError, match="13 to 16"):
        codec.unpack(np.ones((4, 4), np.uint8), axis=-1, bits=2, size=12)
    with pytest.raises(ValueError, match="binary"):
        codec.encode(w, 0.5, kind="binary", axis=-1)


@pytest.mark.parametrize("kind", ["ternary", "binary"])
def test_decoded_arrays_may_be_multiplied_and_summed(kind):
    """XLA fuses decoding into the reduction, where its CPU backend gets 8-bit arithmetic wrong."""
    a, b = (Array1B.from_float(jnp.asarray(normal((128, 192), seed)), kind, axis=-2) for seed in (1, 2))
    rows = jnp.arange(2000) % 128
    for read in (lambda q: q.materialize(), lambda q: q[rows]):
        summed = jax.jit(lambda a, b, read=read: jnp.sum(read(a) * read(b)))
        want = np.sum(np.asarray(read(a), np.float64) * np.asarray(read(b), np.float64))
        np.testing.assert_allclose(summed(a, b), want, rtol=1e-4, atol=1e-2)
