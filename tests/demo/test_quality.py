"""`benchmarks/quality.py --small`: every kind of row on a little of the character model."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "quality.py"


@pytest.fixture
def quality(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FILE.parent)
    spec = importlib.util.spec_from_file_location("quality", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "quality", module)  # where dataclasses look for annotations
    spec.loader.exec_module(module)
    return module


@pytest.mark.thorough
def test_the_small_form(quality: Any, tmp_path: Path) -> None:
    quality.main(["--small", "--json", str(tmp_path / "found.json")])
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]["char"]
    assert set(rows) == set(quality.SMALL)
    assert rows["f32"]["change"]["value"] == 0
    assert rows["mixed, 4.25 bits"]["bits_per_weight"] <= 4.25
    assert rows["nf4, gptq"]["bits_per_weight"] == rows["nf4"]["bits_per_weight"]
    found = {name: row["divergence"]["value"] for name, row in rows.items()}
    assert 0 < found["nf4, gptq"] < found["nf4"] < 0.2
    assert 0 < found["nf4, distilled"] < found["nf4"]
