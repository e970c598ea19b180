"""Weights that MLX quantized, and exports that MLX decodes, bit for bit where its scales are float32.

Needs the `oracle` extra: `make oracle`.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import eformer as ef

mx = pytest.importorskip("mlx.core", reason="needs the oracle extra: make oracle")

KINDS = [("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)]
KINDS += [("affine", 4, 32), ("affine", 4, 128), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_both_ways(kind: tuple[str, int, int], tmp_path: Path):
    mode, bits, group = kind
    stated = {"mode": mode, "bits": bits, "group_size": group}
    w = np.random.default_rng(bits + group).standard_normal((24, 256)).astype(np.float32)
    stored = mx.quantize(mx.array(w), **stated)
    names = ("weight", "scales", "biases")[: len(stored)]
    wanted = np.array(mx.dequantize(*stored, **stated).astype(mx.float32))
    folder = tmp_path / "m"
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), {f"q.{n}": a for n, a in zip(names, stored, strict=True)})
    (folder / "config.json").write_text(json.dumps({"quantization": stated, "torch_dtype": "float32"}))
    found = ef.load_checkpoint(folder)["q.weight"]
    np.testing.assert_array_equal(np.asarray(found.materialize()), wanted)
    assert jnp.abs(found.materialize() - w).max() < np.abs(w).max()
    exported = mx.load(str(ef.serialization.export(folder, tmp_path / "out", "mlx") / "model.safetensors"))
    for name, array in zip(names, stored, strict=True):
        assert np.array_equal(np.array(exported[f"q.{name}"]), np.array(array)), name
