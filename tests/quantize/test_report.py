"""`report`: bytes, bits and errors of every leaf, as a table, as JSON and as a picture."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

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


def test_errors_of_extreme_values_and_of_none():
    """Energies neither overflow nor vanish, and what cannot be measured is not called perfect."""
    base = np.random.default_rng(5).standard_normal((64, 128)).astype(np.float32)
    original = {f"w{power}": base * np.float32(2.0**power) for power in (0, 80, -80, 120)}
    hole = base.copy()
    hole[3, 5] = np.nan
    original |= {"nan": hole, "inf": np.where(np.isnan(hole), np.inf, base), "tiny": base * np.float32(1e-40)}
    original |= {"off": base}
    made = quantize_tree(original, donate=False)
    made["off"] = made["w80"]
    found: Any = {leaf.path: (leaf.relative_error, leaf.sqnr_db) for leaf in report(made, original).leaves}
    for name in ("w80", "w-80", "w120"):
        np.testing.assert_allclose(found[name], found["w0"], rtol=1e-4)
    assert 0.05 < found["w0"][0] < 0.15
    assert all(np.isnan(found[name]).all() for name in ("nan", "inf"))
    assert found["tiny"][0] > 0.05
    assert found["off"] == (np.inf, -np.inf) or found["off"][0] > 2**70

    def refused(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    read = json.loads(report(made, original).to_json(), parse_constant=refused)
    by_path = {leaf["path"]: leaf for leaf in read["leaves"]}
    assert by_path["nan"]["relative_error"] is by_path["nan"]["sqnr_db"] is None
    assert by_path["w0"]["relative_error"] == found["w0"][0]
    assert (
        "nan" in next(line for line in str(report(made, original)).splitlines() if line.startswith("nan ")).split()[5:]
    )


def test_plot(tmp_path: Path):
    made, original = models()
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(ImportError, match=r"eformer\[plot\]"):
            report(made, original).plot(tmp_path / "report.png")
    else:
        report(made, original).plot(tmp_path / "report.png")
        assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
