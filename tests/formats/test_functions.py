"""`eformer.ops.quantization.functions` against what MLX computed (golden/make_mlx.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._formats.words import bit_stream, to_words
from eformer.ops.quantization import Array8B, ArrayInt, ArrayNF4, functions

GOLD = dict(np.load(Path(__file__).parent / "golden" / "mlx.npz"))
AFFINE = sorted({key.rpartition("-")[0] for key in GOLD if key.startswith("affine")})
DTYPES = ("float32", "bfloat16", "float16")
RNG = np.random.default_rng(3)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def test_affine_is_that_of_mlx_bit_for_bit() -> None:
    assert len(AFFINE) == 30
    for case in AFFINE:
        _, dtype, bits, group = case.split("-")
        w = jnp.asarray(GOLD["w"]).astype(dtype)
        codes, scales, biases = functions.quantize(w, int(group), int(bits))
        np.testing.assert_array_equal(codes, GOLD[f"{case}-q"], case, strict=True)
        assert scales.dtype == biases.dtype == dtype
        np.testing.assert_array_equal(scales.astype(jnp.float32), GOLD[f"{case}-s"], case, strict=True)
        np.testing.assert_array_equal(biases.astype(jnp.float32), GOLD[f"{case}-b"], case, strict=True)
        if dtype == "float32":
            dense = functions.dequantize(codes, scales, biases, int(group), int(bits))
            np.testing.assert_array_equal(dense, GOLD[f"{case}-d"], case, strict=True)


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_floats_are_those_of_mlx(mode: str, dtype: str) -> None:
    """Scales and values, but for values in the middle between two: MLX takes the smaller here, we the even code."""
    case = f"{mode}-{dtype}"
    words, scales = functions.quantize(jnp.asarray(GOLD["w"]).astype(dtype), mode=mode)
    np.testing.assert_array_equal(scales, GOLD[f"{case}-s"], strict=True)
    theirs = functions.dequantize(jnp.asarray(GOLD[f"{case}-q"]), jnp.asarray(GOLD[f"{case}-s"]), mode=mode)
    np.testing.assert_array_equal(theirs, GOLD[f"{case}-d"], strict=True)
    ours = np.asarray(functions.dequantize(words, scales, mode=mode))
    w = np.asarray(jnp.asarray(GOLD["w"]).astype(dtype), np.float64)
    other = ours != GOLD[f"{case}-d"]
    np.testing.assert_allclose(np.abs(ours - w)[other], np.abs(np.asarray(theirs) - w)[other], rtol=1e-6)
    assert other.mean() < 0.1
    if mode == "mxfp8":
        np.testing.assert_array_equal(words, GOLD[f"{case}-q"], strict=True)


@pytest.mark.parametrize("mode", ["affine", "nf4", "mxfp4", "mxfp8", "nvfp4"])
def test_products_and_axes(mode: str) -> None:
    w, x, y = normal(24, 128), normal(3, 128), normal(3, 24)
    stored = functions.quantize(w, mode=mode)
    dense = functions.dequantize(*stored, mode=mode)
    assert dense.shape == w.shape
    assert stored[0].dtype == jnp.uint32
    q = functions.as_array(*stored, mode=mode)
    for found in (functions.quantized_matmul(x, *stored, mode=mode), functions.quantized_matmul(x, q)):
        np.testing.assert_allclose(found, x @ dense.T, rtol=1e-4, atol=1e-4)
    found = functions.quantized_matmul(y, *stored, transpose=False, mode=mode)
    np.testing.assert_allclose(found, y @ dense, rtol=1e-4, atol=1e-4)
    for a, b in zip(functions.quantize(w.T, mode=mode, axis=0), stored, strict=True):
        np.testing.assert_array_equal(a, b)
    experts = [jnp.stack([a, a]) for a in stored]
    found = jax.jit(lambda x, *stored: functions.quantized_matmul(x, *stored, mode=mode))(jnp.stack([x, -x]), *experts)
    np.testing.assert_allclose(found[1], -(x @ dense.T), rtol=1e-4, atol=1e-4)
    assert functions.quantized_matmul(x.astype(jnp.bfloat16), *stored, mode=mode).dtype == jnp.bfloat16


def test_arrays_of_the_functions_are_the_usual_ones() -> None:
    w = normal(8, 128)
    assert type(functions.as_array(*functions.quantize(w, 32, 3), 32, 3)) is ArrayInt
    nf4 = functions.as_array(*functions.quantize(w, mode="nf4"), mode="nf4")
    np.testing.assert_array_equal(nf4.packed, ArrayNF4.quantize(w, axis=-1).packed)
    np.testing.assert_array_equal(nf4.absmax, ArrayNF4.quantize(w, axis=-1).absmax)


def test_not_finite_values() -> None:
    w = np.ones((1, 256), np.float32)
    w[0, 3], w[0, 130] = np.nan, np.inf
    for mode in ("affine", "mxfp4", "mxfp8", "nvfp4"):
        found = np.asarray(functions.dequantize(*functions.quantize(jnp.asarray(w), mode=mode), mode=mode))
        assert np.isnan(found[0, [3, 130]]).all(), mode
        assert np.isfinite(found[0, 192:]).all(), mode


def test_bad_input() -> None:
    w, stored = normal(4, 128), functions.quantize(normal(4, 128))
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: functions.quantize(w, mode="nf3"), ValueError, "mode='nf3' is unknown; allowed values are 'affine'"),
        (
            lambda: functions.quantize(w, 48),
            ValueError,
            "group_size=48 is not allowed for mode='affine': use 32, 64, 128",
        ),
        (lambda: functions.quantize(w, bits=7), ValueError, "bits=7 is not allowed"),
        (lambda: functions.quantize(w, 64.0), TypeError, "group_size=64.0 is of type float"),  # pyright: ignore[reportArgumentType]
        (lambda: functions.quantize(w, bits=4.0), TypeError, "bits=4.0 is of type float"),  # pyright: ignore[reportArgumentType]
        (lambda: functions.quantize(w, mode="afine"), ValueError, r"Did you mean 'affine'\?"),
        (
            lambda: functions.quantize(w, bits=8, mode="mxfp4"),
            ValueError,
            "bits=8 is not allowed for mode='mxfp4': use 4",
        ),
        (lambda: functions.quantize(w[:, :100]), ValueError, "groups of 64 do not divide an axis of 100"),
        (lambda: functions.quantize(w.astype(int)), TypeError, "quantizes floating-point arrays"),
        (lambda: functions.dequantize(*stored[:2]), ValueError, "mode='affine' needs biases"),
        (lambda: functions.dequantize(*stored, mode="nf4"), ValueError, "mode='nf4' has no biases"),
        (lambda: functions.dequantize(stored[0].astype(int), *stored[1:]), ValueError, "w must be uint32 words"),
        (lambda: functions.dequantize(*stored, bits=8), ValueError, r"scale has shape \[4, 2\]; .*need \[4, 1\]"),
        (lambda: functions.quantized_matmul(w, stored[0]), TypeError, "scales are missing"),
        (lambda: functions.dequantize(None, *stored[1:]), TypeError, "w takes an array, got None"),  # pyright: ignore[reportArgumentType]
    ]
    for mode, own in (("mxfp4", "float8_e8m0fnu"), ("nvfp4", "float8_e4m3fn")):
        words, scales = functions.quantize(w, mode=mode)
        call = lambda a=words, b=scales, mode=mode: functions.dequantize(a, b.astype(jnp.float32), mode=mode)  # noqa: E731
        cases.append((call, TypeError, f"scales of mode='{mode}' must be uint8 or {own}, got float32"))
    for call, error, words in cases:
        with pytest.raises(error, match=words):
            call()
    plain = Array8B.quantize(w)
    assert functions.quantized_matmul(w, plain).shape == (4, 4)


@pytest.mark.parametrize("mode", ["affine", "nf4", "mxfp4", "mxfp8", "nvfp4"])
def test_nothing_at_all(mode: str) -> None:
    for shape in ((0, 64), (3, 0), (2, 0, 64)):
        stored = functions.quantize(jnp.zeros(shape), mode=mode)
        assert functions.dequantize(*stored, mode=mode).shape == shape
        assert functions.quantized_matmul(jnp.ones((5, shape[-1])), *stored, mode=mode).shape == (
            *shape[:-2],
            5,
            shape[-2],
        )


def test_what_is_multiplied_may_be_numbers_of_any_kind() -> None:
    w = normal(8, 64)
    stored = functions.quantize(w)
    dense = functions.dequantize(*stored)
    for x in (np.ones((2, 64), np.int32), [[1.0] * 64] * 2):
        np.testing.assert_allclose(
            functions.quantized_matmul(x, *stored), np.asarray(x, np.float32) @ dense.T, rtol=1e-5
        )  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_codes_in_words_are_a_row_of_bits(bits: int) -> None:
    """Of any length, against NumPy's own bits."""
    for size in (1, 7, 16, 21, 32, 45, 96):
        codes = RNG.integers(0, 2**bits, (3, size), dtype=np.uint8)
        stream = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits].reshape(3, -1)
        stream = np.pad(stream, ((0, 0), (0, -stream.shape[-1] % 32)))
        expected = np.packbits(stream, axis=-1, bitorder="little").view("<u4")
        found = to_words(jnp.asarray(codes), bits)
        np.testing.assert_array_equal(found, expected, strict=True)
        np.testing.assert_array_equal(bit_stream(found, bits)[:, :size], codes, strict=True)
    for shape in ((0, 64), (3, 0), (2, 0, 64)):
        assert bit_stream(to_words(jnp.zeros(shape, jnp.uint8), bits), bits).shape == shape
