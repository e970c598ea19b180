"""The NF4 codec: equal to bitsandbytes, to its readable twin, and to itself after a round trip."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eformer._formats.nf4 import codec

from . import references
from .references import assert_same, normal

GOLDEN = dict(np.load(Path(__file__).parent / "golden" / "nf4.npz"))
CASES = sorted({name.split("/")[0] for name in GOLDEN if name.endswith("/packed")})
NESTED = sorted({name.split("/")[0] for name in GOLDEN if name.startswith("nested_")})
HALF = {"bfloat16": jnp.bfloat16, "float16": jnp.float16}
SHAPES = [(1,), (130, 3), (128, 1), (1, 5, 66), (2, 3, 34, 5), (2, 1, 3, 70, 2), (0,), (3, 0)]


def round_trip(w, axis: int, block_size: int, dtype=jnp.float32) -> np.ndarray:
    packed, absmax = codec.encode(w, axis=axis, block_size=block_size)
    return np.asarray(codec.decode(packed, absmax, axis=axis, size=np.shape(w)[axis], dtype=dtype))


@pytest.mark.parametrize("name", CASES)
def test_bytes_equal_bitsandbytes(name):
    w, block = GOLDEN[f"{name}/w"], int(GOLDEN[f"{name}/block"])
    w = jnp.asarray(w, HALF.get(name, jnp.float32))
    packed, absmax = codec.encode(w, axis=-1, block_size=block)
    want = GOLDEN[f"{name}/packed"]
    np.testing.assert_array_equal(np.asarray(packed).reshape(-1)[: want.size], want)
    np.testing.assert_array_equal(np.asarray(packed).reshape(-1)[want.size :], 0x77)  # the padding
    np.testing.assert_array_equal(np.asarray(absmax), GOLDEN[f"{name}/absmax"])
    decoded = codec.decode(packed, absmax, axis=-1, size=w.size, dtype=w.dtype)
    np.testing.assert_array_equal(np.asarray(decoded, np.float32), GOLDEN[f"{name}/decoded"])


def test_golden_vectors_are_many_and_ragged():
    assert len(CASES) >= 20
    assert sum(GOLDEN[f"{n}/w"].size % int(GOLDEN[f"{n}/block"]) != 0 for n in CASES) >= 8


def test_codebook_is_sorted_and_has_an_exact_zero():
    assert codec.CODEBOOK.dtype == np.float32
    assert codec.CODEBOOK.shape == (16,)
    assert (np.diff(codec.CODEBOOK) > 0).all()
    assert (codec.CODEBOOK[[0, 7, 15]] == [-1, 0, 1]).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block_size", [6, 64])
def test_fast_equals_reference_on_every_axis(shape, block_size):
    w = normal(shape, seed=sum(shape) + block_size)
    for axis in range(-len(shape), 0):
        got = codec.encode(w, axis=axis, block_size=block_size)
        assert_same(got, references.nf4_encode(w, axis=axis, block_size=block_size))
        arguments = {"axis": axis, "size": shape[axis], "dtype": jnp.float32}
        dense = codec.decode(*got, **arguments)
        assert dense.shape == shape
        assert_same([dense], [references.nf4_decode(*got, **arguments)])


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e30])
def test_fast_equals_reference_on_many_values(scale):
    w = normal((512, 520), seed=3, scale=scale)
    for axis in (-1, -2):
        got = codec.encode(w, axis=axis, block_size=64)
        assert_same(got, references.nf4_encode(w, axis=axis, block_size=64))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 31, 64, 130]),
    st.sampled_from([2, 64]),
    st.floats(-30, 30),
    st.booleans(),
)
def test_round_trip_is_idempotent_and_bounded(seed, size, block_size, exponent, column):
    rng = np.random.default_rng(seed)
    w = (rng.standard_normal((3, size)) * rng.choice([0, 1, 1, 1], (3, size)) * 10.0**exponent).astype(np.float32)
    w, axis = (w.T, -2) if column else (w, -1)
    q = codec.encode(w, axis=axis, block_size=block_size)
    dense = codec.decode(*q, axis=axis, size=size, dtype=jnp.float32)
    assert_same(codec.encode(dense, axis=axis, block_size=block_size), [np.asarray(a) for a in q])
    absmax = np.repeat(np.asarray(q[1]), block_size, axis=-1)[:, :size]
    half_gap = np.diff(codec.CODEBOOK.astype(np.float64)).max() / 2
    error = np.abs(np.moveaxis(np.asarray(dense, np.float64) - w, axis, -1))
    assert (error <= absmax * half_gap * (1 + 1e-6)).all()
    assert (np.asarray(dense)[w == 0] == 0).all()


def test_error_is_what_theory_allows():
    w = normal((256, 1024), seed=11)
    error = np.linalg.norm(round_trip(w, -1, 64) - w) / np.linalg.norm(w)
    assert 0.085 < error < 0.095


def test_ties_take_the_lower_code():
    middles = codec.THRESHOLDS
    w = np.concatenate([[1.0], middles, np.nextafter(middles, np.float32(2)), [0.0]]).astype(np.float32)
    packed, _ = codec.encode(w, axis=-1, block_size=32)
    codes = np.stack([np.asarray(packed)[0] >> 4, np.asarray(packed)[0] & 15], -1).reshape(-1)
    assert codes.tolist() == [15, *range(15), *range(1, 16), 7]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_value_that_is_not_finite_makes_its_block_nan(bad, axis, dtype):
    w = normal((192, 192), seed=5)
    w[70, 70] = bad
    dense = np.asarray(round_trip(jnp.asarray(w, dtype), axis, 64), np.float32)
    bad_block = np.zeros(w.shape, bool)
    bad_block[(70, slice(64, 128)) if axis == -1 else (slice(64, 128), 70)] = True
    assert (np.isnan(dense) == bad_block).all()
    q = codec.encode(dense, axis=axis, block_size=64)
    again = codec.encode(np.asarray(codec.decode(*q, axis=axis, size=192, dtype=jnp.float32)), axis=axis, block_size=64)
    assert_same(again, [np.asarray(a) for a in q])


def test_zero_and_subnormal_blocks_decode_to_zero():
    w = np.zeros((2, 64), np.float32)
    w[1] = 1e-39
    packed, absmax = codec.encode(w, axis=-1, block_size=64)
    assert (np.asarray(packed) == 0x77).all()
    assert (np.asarray(absmax) == 0).all()
    assert not round_trip(w, -1, 64).any()


def test_the_largest_and_smallest_blocks_keep_their_precision():
    largest, smallest = np.finfo(np.float32).max, np.float32(2.0**-122)
    for absmax in (largest, largest / 3, np.float32(2.0**120), smallest):
        w = (codec.CODEBOOK * absmax).astype(np.float32)
        np.testing.assert_array_equal(round_trip(w, -1, 16), w)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_encoded_as_its_f32_value(dtype):
    w = jnp.asarray(normal((100, 70), seed=9), dtype)
    got = codec.encode(w, axis=-2, block_size=32)
    assert_same(got, references.nf4_encode(np.asarray(w, np.float32), axis=-2, block_size=32))
    dense = codec.decode(*got, axis=-2, size=100, dtype=dtype)
    assert dense.dtype == dtype
    assert_same([dense], [references.nf4_decode(*got, axis=-2, size=100, dtype=dtype)])


def test_f64_is_rounded_to_f32_first():
    w = np.random.default_rng(1).standard_normal((64, 10))
    with jax.enable_x64(True):
        got = codec.encode(jnp.asarray(w), axis=-2, block_size=64)
        dense = codec.decode(*got, axis=-2, size=64, dtype=jnp.float64)
    assert_same(got, references.nf4_encode(w, axis=-2, block_size=64))
    assert dense.dtype == np.float64


@pytest.mark.parametrize("axis", [-1, -2])
def test_vmap_equals_loop(axis):
    w = normal((4, 70, 33), seed=2)
    encode = lambda x: codec.encode(x, axis=axis, block_size=32)  # noqa: E731
    looped = [encode(x) for x in w]
    batched = jax.vmap(encode)(w)
    assert_same(batched, [np.stack([np.asarray(q[i]) for q in looped]) for i in (0, 1)])
    dense = jax.vmap(lambda *q: codec.decode(*q, axis=axis, size=w.shape[axis], dtype=jnp.float32))(*batched)
    assert_same([dense], [round_trip(w, axis, 32)])


def test_eval_shape():
    packed, absmax = jax.eval_shape(
        lambda w: codec.encode(w, axis=-2, block_size=64), jax.ShapeDtypeStruct((5, 130, 7), "bfloat16")
    )
    assert (packed.shape, packed.dtype) == ((5, 7, 3, 32), jnp.uint8)
    assert (absmax.shape, absmax.dtype) == ((5, 7, 3), jnp.float32)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("shape", [(4096, 4096), (4090, 4100)])
def test_quantizing_needs_little_memory(axis, shape):
    w = jax.ShapeDtypeStruct(shape, jnp.float32)
    compiled = codec.encode.lower(w, axis=axis, block_size=64).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= w.size * 4 // 4


@pytest.mark.parametrize("axis", [-1, -2])
def test_decoding_needs_no_memory(axis):
    arguments = jax.ShapeDtypeStruct((1024, 16, 32), jnp.uint8), jax.ShapeDtypeStruct((1024, 16), jnp.float32)
    compiled = codec.decode.lower(*arguments, axis=axis, size=1024, dtype=jnp.float32).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 1024 * 1024 * 4 // 8


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (ValueError, "positive even", {"axis": -1, "block_size": 7}),
        (ValueError, "positive even", {"axis": -1, "block_size": 0}),
        (ValueError, "positive even", {"axis": -1, "block_size": -2}),
        (ValueError, "rank 2", {"axis": -3, "block_size": 64}),
        (ValueError, "rank 2", {"axis": 0, "block_size": 64}),
    ],
)
def test_bad_arguments(error, match, arguments):
    with pytest.raises(error, match=match):
        codec.encode(np.ones((4, 4), np.float32), **arguments)


@pytest.mark.parametrize("dtype", ["int32", "int8", "complex64", "bool"])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(TypeError, match=f"{dtype}.*Allowed: bfloat16"):
        codec.encode(np.ones(4, dtype), axis=-1, block_size=2)


def test_scalars_are_refused():
    with pytest.raises(ValueError, match="no axes"):
        codec.encode(np.float32(1), axis=-1, block_size=2)


def test_storage_that_disagrees_is_refused():
    packed, absmax = codec.encode(np.ones((3, 130), np.float32), axis=-1, block_size=64)
    with pytest.raises(ValueError, match="129 to 192"):
        codec.decode(packed, absmax, axis=-1, size=128, dtype=jnp.float32)
    with pytest.raises(ValueError, match="belong together"):
        codec.decode(packed, absmax[:2], axis=-1, size=130, dtype=jnp.float32)
    with pytest.raises(TypeError, match="uint8"):
        codec.decode(packed.astype(jnp.int8), absmax, axis=-1, size=130, dtype=jnp.float32)


def test_dynamic_map_equals_bitsandbytes():
    np.testing.assert_array_equal(codec.DYNAMIC_MAP, GOLDEN["dynamic_map"], strict=True)


@pytest.mark.parametrize("name", NESTED)
def test_double_quantization_equals_bitsandbytes(name):
    golden = {key: GOLDEN[f"{name}/{key}"] for key in ("absmax", "codes", "scale", "offset", "expanded")}
    codes, scale, offset = codec.compress_absmax(golden["absmax"])
    # Only the order of summation of the mean differs, so the statistics may be off by an ulp of the mean.
    ulp = 2 * np.spacing(golden["offset"])
    np.testing.assert_allclose(offset, golden["offset"], atol=ulp, rtol=0)
    np.testing.assert_allclose(scale, golden["scale"], atol=2 * ulp, rtol=0)
    np.testing.assert_array_equal(np.asarray(codes), golden["codes"])
    exact = references.nf4_compress(golden["absmax"], golden["offset"])
    assert_same(exact, [golden["codes"], golden["scale"]])
    expanded = codec.expand_absmax(golden["codes"], golden["scale"], golden["offset"])
    np.testing.assert_array_equal(np.asarray(expanded), golden["expanded"], strict=True)


@pytest.mark.parametrize(("shape", "core_ndim"), [((4, 3, 100), 2), ((2, 2, 7, 5), 2), ((5, 300), 1), ((6,), None)])
def test_double_quantization_keeps_batch_axes(shape, core_ndim):
    absmax = np.abs(normal(shape, seed=4)) + 1
    codes, scale, offset = codec.compress_absmax(absmax, core_ndim=core_ndim)
    batch = shape[: len(shape) - (core_ndim or len(shape))]
    core = int(np.prod(shape[len(batch) :]))
    assert codes.shape == shape
    assert scale.shape == (*batch, -(-core // 256))
    assert offset.shape == batch
    expanded = np.asarray(codec.expand_absmax(codes, scale, offset, core_ndim=core_ndim))
    for index in np.ndindex(batch):
        one = codec.compress_absmax(absmax[index])
        np.testing.assert_array_equal(codes[index], one[0])
        want, scales = references.nf4_compress(absmax[index].reshape(-1), np.asarray(offset[index]))
        assert_same([codes[index].reshape(-1), scale[index]], [want, scales])
        np.testing.assert_array_equal(expanded[index], codec.expand_absmax(*one))
    # The widest gap between two entries of the map is 0.0141 of the scale.
    assert np.abs(expanded - absmax).max() <= 0.0071 * np.asarray(scale).max()


def test_double_quantization_contains_nan_and_keeps_constants():
    absmax = np.full((2, 300), 3.0, np.float32)
    np.testing.assert_array_equal(codec.expand_absmax(*codec.compress_absmax(absmax)), absmax)
    absmax[0, 5] = np.nan
    got = np.asarray(codec.expand_absmax(*codec.compress_absmax(absmax)))
    assert np.isnan(got.reshape(-1)[:256]).all()
    assert (got.reshape(-1)[256:] == 3).all()


def test_double_quantization_of_nothing():
    codes, scale, offset = codec.compress_absmax(np.zeros((2, 0, 3), np.float32), core_ndim=2)
    assert (codes.shape, scale.shape, offset.shape) == ((2, 0, 3), (2, 0), (2,))
    assert codec.expand_absmax(codes, scale, offset, core_ndim=2).shape == (2, 0, 3)


def test_double_quantization_refuses_wrong_shapes():
    codes, scale, offset = codec.compress_absmax(np.ones((2, 3), np.float32))
    with pytest.raises(ValueError, match="core_ndim"):
        codec.compress_absmax(np.ones((2, 3), np.float32), core_ndim=3)
    with pytest.raises(ValueError, match="need scales of shape"):
        codec.expand_absmax(codes, scale[None], offset)
