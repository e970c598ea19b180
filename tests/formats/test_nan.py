"""NaN stays NaN, in arrays of every size: XLA's maxima of floats may leave it out in large ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eformer as ef
from eformer.ops.quantization import functions

SHAPES = [(192, 64), (4096, 256), (64, 8192), (3, 512, 96)]


def spoilt(key: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, tuple[int, ...]]:
    place = tuple(size // 2 + 1 for size in shape)
    return jax.random.normal(key, shape).at[place].set(jnp.nan), place


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("axis", [None, -1, 0])
def test_in_every_format(key, shape, axis):
    w, place = spoilt(key, shape)
    lost = [kind for kind in ef.QuantizationType if not jnp.isnan(ef.quantize(w, dtype=kind, axis=axis)[place])]
    assert not lost


def test_with_one_scale_for_several_axes_and_with_compressed_scales(key):
    w, place = spoilt(key, (4096, 256))
    for kind in ("int8", "fp8"):
        assert jnp.isnan(ef.quantize(w, dtype=kind, axis=(-2, -1)).materialize()[place])
    assert jnp.isnan(ef.quantize(w, dtype="nf4", double_quant=True).materialize()[place])


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_in_caches(key, kind):
    rows, place = spoilt(key, (4, 512, 128))
    found = np.isnan(ef.QuantizedCache.zeros(rows.shape, format=kind).at[:].set(rows).materialize())
    assert found[place]
    assert not found[0].any()


@pytest.mark.parametrize("mode", ["affine", "nf4", "mxfp4", "nvfp4"])
def test_in_functions_on_plain_arrays(key, mode):
    w, place = spoilt(key, (1024, 512))
    assert jnp.isnan(functions.dequantize(*functions.quantize(w, mode=mode), mode=mode)[place])


def test_calibration_names_it(key):
    x, _ = spoilt(key, (64, 128))
    with pytest.raises(ef.errors.CalibrationError, match="NaN or infinity"):
        ef.calibrate(lambda p, x: x @ p["w"], {"w": jnp.ones((128, 8))}, [x])
