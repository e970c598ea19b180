"""Small floats against tables written from their specifications, against ml_dtypes, and against readable twins."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from eformer._formats.floating import codec
from eformer._kernels import formats
from tests.formats import references
from tests.formats.contract import seeded

TINY = np.finfo(np.float32).tiny
ELEMENTS = {
    "fp4": ml_dtypes.float4_e2m1fn,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}
MX = ("mxfp4", "mxfp8", "mxfp8_e5m2")


def rounded(exact: np.ndarray) -> np.ndarray:
    """f64 rounded to f32, what is not normal flushed to zero as processors do."""
    with np.errstate(over="ignore"):
        small = exact.astype(np.float32)
    return np.where(np.abs(exact) < TINY, np.float32(0) * np.sign(exact), small)


def same(found: jax.Array, wanted: np.ndarray) -> None:
    assert found.dtype == jnp.float32
    a, b = np.asarray(found), wanted.astype(np.float32)
    a = np.where(np.abs(a) < TINY, 0, a)  # a processor may keep what another flushes
    np.testing.assert_array_equal(a, np.where(np.abs(b) < TINY, 0, b))


def special(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Rows of all magnitudes, some of them zeros, ties, extremes, and some with NaN or an infinity."""
    w = rng.standard_normal((rows, columns)) * 2.0 ** rng.integers(-110, 110, (rows, 1))
    w[0], w[1], w[2, 3], w[3, 4], w[4, -1] = 0, -0.0, np.nan, np.inf, -np.inf
    w[5] = rng.integers(-48, 49, columns) / 8  # ties of e2m1
    w[6], w[7] = 3.0e38 * rng.choice([-1, 1], columns), 2.0**-126 * rng.integers(-4, 5, columns)
    w[8] = 2.0**-149 * rng.integers(-4, 5, columns)
    return w.astype(np.float32)


@pytest.mark.parametrize("element", [*ELEMENTS, "iq4_nl"])
def test_every_code_is_what_the_specification_says(element):
    table = references.element_table(element)
    found = codec.element_values(jnp.arange(table.size, dtype=jnp.uint8), element)
    np.testing.assert_array_equal(np.asarray(found), table.astype(np.float32))
    assert np.array_equal(np.signbit(found), np.signbit(table)) or np.isnan(table).any()
    if element in ELEMENTS:
        bits = np.arange(table.size, dtype=np.uint8)
        numbers = (
            bits.view(ELEMENTS[element]) if table.size == 256 else np.array([ml_dtypes.float4_e2m1fn(v) for v in table])
        )
        np.testing.assert_array_equal(np.asarray(found), numbers.astype(np.float32))


def test_every_scale_is_what_the_specification_says():
    codes = np.arange(256, dtype=np.uint8)
    found = np.asarray(formats.scale_values(jnp.asarray(codes)))
    np.testing.assert_array_equal(found, references.e8m0_table().astype(np.float32))
    np.testing.assert_array_equal(found, codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    e4m3 = formats.scale_values(jnp.asarray(codes.view(ml_dtypes.float8_e4m3fn)))
    np.testing.assert_array_equal(np.asarray(e4m3), references.element_table("fp8_e4m3").astype(np.float32))


@pytest.mark.parametrize("kind", MX)
def test_every_code_with_every_scale(kind):
    element = codec.KINDS[kind].element
    table = references.element_table(element)
    codes = jnp.tile(jnp.arange(table.size, dtype=jnp.uint8), (256, 2 if kind == "mxfp4" else 1))  # whole blocks
    stored = codec.pack(codes, axis=-1, block=32, per_byte=codec.KINDS[kind].per_byte)
    scales = formats.scale_values(jnp.arange(256, dtype=jnp.uint8))
    scales = jnp.broadcast_to(scales[:, None], stored.shape[:2])
    found = codec.decode(stored, scales, element=element, axis=-1, size=codes.shape[1], dtype=jnp.float32)
    with np.errstate(invalid="ignore"):
        exact = np.tile(table, codes.shape[1] // table.size) * references.e8m0_table()[:, None]
    same(found, rounded(exact))


def test_nvfp4_with_every_scale():
    codes = jnp.tile(jnp.arange(16, dtype=jnp.uint8), (256, 1))
    stored = codec.pack(codes, axis=-1, block=16, per_byte=2)
    blocks = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), jnp.float8_e4m3fn)
    for tensor in (1.0, 0.1, 3e-5):
        scale = formats.scale_values(blocks)[:, None] * jnp.float32(tensor)
        found = codec.decode(stored, scale, element="fp4", axis=-1, size=16, dtype=jnp.float32)
        one = references.element_table("fp8_e4m3").astype(np.float32) * np.float32(tensor)
        same(found, references.element_table("fp4").astype(np.float32) * one[:, None])


@pytest.mark.parametrize(
    ("kind", "dtype"), [("mxfp4", "float32"), ("mxfp8", "bfloat16"), ("mxfp8_e5m2", "float16"), ("mxfp4", "bfloat16")]
)
def test_mx_encoder_equals_its_twin(kind, dtype):
    row = codec.KINDS[kind]
    w = jnp.asarray(special(seeded(kind, dtype), 40, 70)).astype(dtype)
    for axis in (-1, -2):
        codes, scale, whole = codec.encode(w, kind=kind, axis=axis)
        wanted, scales = references.mx_encode(np.asarray(w), axis=axis, element=row.element)
        np.testing.assert_array_equal(np.asarray(scale), scales)
        bytes_ = wanted if row.per_byte == 1 else wanted[..., ::2] << 4 | wanted[..., 1::2]
        normal = scales > 30  # further down processors flush values to zero
        np.testing.assert_array_equal(np.asarray(codes)[normal], bytes_[normal])
        assert whole is None


@pytest.mark.parametrize("element", ELEMENTS)
def test_rounding_is_that_of_ml_dtypes(element):
    kind = next(name for name in MX if codec.KINDS[name].element == element)
    row, rng = codec.KINDS[kind], seeded(element)
    table = references.element_table(element)
    values = np.unique(table[np.isfinite(table)])
    middles = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    near = np.concatenate([values, middles, np.nextafter(middles, np.float32(9e9)), np.nextafter(middles, -9e9)])
    near = np.concatenate([near, rng.standard_normal(2000) * row.largest / 3]).astype(np.float32)
    near = np.clip(near, -row.largest, row.largest)
    codes = np.asarray(codec.nearest(jnp.asarray(near), row))
    wanted = near.astype(ELEMENTS[element])
    np.testing.assert_array_equal(table[codes].astype(np.float32), wanted.astype(np.float32))
    assert np.array_equal(np.signbit(table[codes]), np.signbit(near))
    np.testing.assert_array_equal(codes, references.nearest_code(near, element))


@pytest.mark.parametrize("kind", MX)
def test_encoding_what_was_decoded_changes_nothing(kind):
    w = jnp.asarray(special(seeded(kind), 40, 64))
    row = codec.KINDS[kind]
    codes, scale, _ = codec.encode(w, kind=kind, axis=-1)
    dense = codec.decode(codes, formats.scale_values(scale), element=row.element, axis=-1, size=64, dtype=jnp.float32)
    again, scales, _ = codec.encode(dense, kind=kind, axis=-1)
    whole = np.asarray(scale) > 30  # further down processors flush
    np.testing.assert_array_equal(np.asarray(scales)[whole], np.asarray(scale)[whole])
    np.testing.assert_array_equal(np.asarray(again)[whole], np.asarray(codes)[whole])


@pytest.mark.parametrize(("axis", "dtype"), [(-1, "float32"), (-2, "bfloat16")])
def test_nvfp4_encoder_equals_its_twin(axis, dtype):
    """bfloat16 has quotients near the middle between two scales, which a product with the inverse may miss."""
    rng = seeded("nvfp4", axis)
    w = rng.standard_normal((400, 140)) * 2.0 ** rng.integers(-6, 6, (400, 1))
    w[0], w[1, 3], w[2, 4], w[3] = 0, np.nan, -np.inf, 1e-9
    w[4, :16], w[5, :16] = 10.6875, 14.25  # 336 times what the tensor has, the middle between 320 and 352
    w = np.clip(w, -14.25, 14.25).astype(dtype).astype(np.float32)
    codes, scale, whole = codec.encode(jnp.asarray(w).astype(dtype), kind="nvfp4", axis=axis)
    wanted, scales, tensor = references.nvfp4_encode(w, axis=axis)
    np.testing.assert_array_equal(np.asarray(whole), np.full((1, 1), tensor))
    np.testing.assert_array_equal(np.asarray(jax.lax.bitcast_convert_type(scale, jnp.uint8)), scales)
    np.testing.assert_array_equal(np.asarray(codes), wanted[..., ::2] << 4 | wanted[..., 1::2])


def test_nvfp4_has_one_scale_for_each_matrix_of_a_stack():
    w = jax.random.normal(jax.random.key(0), (3, 32, 20)) * jnp.array([1.0, 8.0, 0.0])[:, None, None]
    *_, whole = codec.encode(w, kind="nvfp4", axis=-2)
    assert whole is not None
    assert whole.shape == (3, 1, 1)
    for i in range(2):
        assert whole[i, 0, 0] == jnp.max(jnp.abs(w[i])) / jnp.float32(6 * 448)
    assert whole[2, 0, 0] == TINY


@pytest.mark.parametrize(("kind", "dtype"), [("fp8", "float32"), ("fp8_e5m2", "float32"), ("fp8", "bfloat16")])
def test_fp8_encoders_equal_their_twin(kind, dtype):
    row = codec.KINDS[kind]
    w = special(seeded(kind), 300, 140).astype(dtype).astype(np.float32)
    finite = np.where(np.isfinite(w), np.abs(w), 0)
    for axes in ((-1,), (-2,), (-2, -1)):
        codes, scale = codec.encode_whole(jnp.asarray(w).astype(dtype), kind=kind, axes=axes)
        wanted, scales = references.fp8_encode(w, finite.max(axis=axes, keepdims=True), element=row.element)
        largest = np.finfo(np.float32).max / np.float32(row.largest)
        np.testing.assert_array_equal(np.asarray(scale), np.minimum(scales, largest))
        alive = np.broadcast_to(scales > 0, w.shape)
        np.testing.assert_array_equal(np.asarray(codes)[alive], wanted[alive])
    tiles = np.pad(finite, ((0, 84), (0, 116))).reshape(3, 128, 2, 128).max(axis=(1, 3))
    for axis in (-1, -2):
        codes, scale = codec.encode_tiles(jnp.asarray(w).astype(dtype), kind=kind, axis=axis)
        ordered, flat = (tiles, w) if axis == -1 else (tiles.T, w.T)
        full = np.repeat(np.repeat(ordered, 128, 0), 128, 1)[: flat.shape[0], : flat.shape[1]]
        wanted, scales = references.fp8_encode(flat, full, element=row.element)
        np.testing.assert_array_equal(np.asarray(scale)[:, :], scales[::128, ::128])
        alive = scales > 0
        found = np.asarray(codes).reshape(flat.shape[0], -1)[:, : flat.shape[1]]
        np.testing.assert_array_equal(found[alive], wanted[alive])


def test_fp8_keeps_nan_alone():
    w = jnp.array([1.0, jnp.nan, jnp.inf, -jnp.inf, -2.0])
    for kind, infinite in (("fp8", jnp.nan), ("fp8_e5m2", jnp.inf)):
        codes, scale = codec.encode_whole(w, kind=kind, axes=(-1,))
        element = codec.KINDS[kind].element
        found = codec.decode(codes, scale, element=element, axis=None, size=0, dtype=jnp.float32)
        wanted = np.array([1.0, np.nan, infinite, -infinite, -2.0], np.float32)
        np.testing.assert_allclose(np.asarray(found), wanted, rtol=0.13)


def test_iq4_nl_decodes_as_ggml_does():
    """A block of a GGUF file: a scale in f16, then 16 bytes, the first 16 values in the low nibbles."""
    rng = seeded("ggml")
    scale, packed = rng.standard_normal(50).astype(np.float16), rng.integers(0, 256, (50, 16), np.uint8)
    codes = np.concatenate([packed & 15, packed >> 4], axis=-1)
    wanted = scale.astype(np.float32)[:, None] * references.element_table("iq4_nl").astype(np.float32)[codes]
    stored = codec.pack(jnp.asarray(codes), axis=-1, block=32, per_byte=2)
    found = codec.decode(stored, jnp.asarray(scale)[:, None], element="iq4_nl", axis=-1, size=32, dtype=jnp.float32)
    np.testing.assert_array_equal(np.asarray(found), wanted)


def test_iq4_nl_finds_the_best_of_16_scales():
    rng = seeded("iq4_nl")
    w = rng.standard_normal((30, 32)).astype(np.float32) * 10.0 ** rng.integers(-2, 4, (30, 1)).astype(np.float32)
    codes, scale, _ = codec.encode(jnp.asarray(w), kind="iq4_nl", axis=-1)
    dense = np.asarray(codec.decode(codes, scale, element="iq4_nl", axis=-1, size=32, dtype=jnp.float32), np.float64)
    for row, block in enumerate(w):
        wanted, best = references.iq4_nl_encode(block)
        values = references.element_table("iq4_nl")[wanted] * np.float64(best)
        assert np.sum((dense[row] - block) ** 2) <= np.sum((values - block) ** 2) * (1 + 1e-3)


def test_iq4_nl_at_its_limits():
    w = np.zeros((6, 32), np.float32)
    w[1, 5], w[2, 5], w[3], w[4], w[5, 0] = np.nan, np.inf, 1e30, 1e-12, 254
    codes, scale, _ = codec.encode(jnp.asarray(w), kind="iq4_nl", axis=-1)
    dense = np.asarray(codec.decode(codes, scale, element="iq4_nl", axis=-1, size=32, dtype=jnp.float32))
    assert (dense[0] == 0).all()
    assert (dense[4] == 0).all()
    assert np.isnan(dense[1]).all()
    assert np.isnan(dense[2]).all()
    assert (dense[3] == 65504 * 127).all()
    np.testing.assert_allclose(dense[5, 0], 254, rtol=0.01)
