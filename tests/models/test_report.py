"""`report`: bytes, bits and errors of every leaf, as a table, as JSON and as a picture."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.ops.quantization import LoraArray, quantize_tree, report


def models():
    k1, k2 = jax.random.split(jax.random.key(3))
    tied = jax.random.normal(k2, (96, 64))
    original = {
        "a": {"kernel": jax.random.normal(k1, (128, 64)), "bias": jnp.zeros(64)},
        "embed": tied,
        "out": {"embedding": tied},
        "zero": jnp.zeros((64, 64)),
    }
    return quantize_tree(original, {"a*": "int8"}, donate=False), original


def test_figures():
    made, original = models()
    found = {leaf.path: leaf for leaf in report(made, original).leaves}
    assert [leaf.format for leaf in found.values()] == ["float32", "int8", "nf4", "nf4", "nf4"]
    for path, leaf in (("a/kernel", made["a"]["kernel"]), ("embed", made["embed"])):
        dense = original["a"]["kernel"] if path.startswith("a") else original["embed"]
        error = float(jnp.linalg.norm(leaf.materialize() - dense) / jnp.linalg.norm(dense))
        assert found[path].nbytes == leaf.nbytes
        assert found[path].bits_per_weight == pytest.approx(leaf.bits_per_weight)
        assert found[path].relative_error == pytest.approx(error, rel=1e-4)
        assert found[path].sqnr_db == pytest.approx(-20 * np.log10(error), rel=1e-4)
    assert found["out/embedding"].tied_to == "embed"
    assert (found["zero"].relative_error, found["zero"].sqnr_db) == (0.0, float("inf"))
    assert found["a/bias"].relative_error is None
    whole = report(made, original)
    held = [leaf for path, leaf in found.items() if path != "out/embedding"]
    assert whole.nbytes == sum(leaf.nbytes for leaf in held)
    assert whole.dense_nbytes == 4 * sum(leaf.size for leaf in held)
    assert [leaf.path for leaf in report({"key": jax.random.key(0), "f": jax.nn.relu, "n": np.ones(2)}).leaves] == ["n"]
    shapes = quantize_tree(original, {"a*": "int8"}, abstract=True)
    assert [leaf.nbytes for leaf in report(shapes).leaves] == [leaf.nbytes for leaf in report(made).leaves]


def test_table_and_json():
    made, original = models()
    made["lora"] = LoraArray(made["a"]["kernel"], jnp.ones((128, 2)), jnp.ones((2, 64)))
    table = str(report(made, original)).splitlines()
    assert len(table) == len(report(made).leaves) + 3
    assert table[2].split()[:3] == ["a/kernel", "int8", "(128,64)"]
    assert "as embed" in next(line for line in table if line.startswith("out/embedding"))
    assert "int8 + lora 2" in str(report(made))
    read = json.loads(report(made, original).to_json())
    assert read["nbytes"] == report(made).nbytes
    assert read["leaves"][1]["format"] == "int8"
    with pytest.raises(ValueError, match=r"'a/kernel' has shape \(128, 64\), but the original has \(64, 128\)"):
        report(made, {"a": {"kernel": jnp.ones((64, 128))}})


def test_plot(tmp_path: Path):
    made, original = models()
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(ImportError, match=r"eformer\[plot\]"):
            report(made, original).plot(tmp_path / "report.png")
    else:
        report(made, original).plot(tmp_path / "report.png")
        assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
