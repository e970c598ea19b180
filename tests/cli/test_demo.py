"""`eformer demo`, as quick as it can be, and what it promises of the model that comes with the package."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from eformer.cli import demo, main
from eformer.demo import formats, run_char, text


def test_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "new"
    assert main(["demo", "--quick", "--out", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["format"]: row for row in found["rows"]}
    assert tuple(rows) == run_char.QUICK.formats
    assert set(run_char.Plan().formats) == set(formats.FORMATS) > set(rows)
    assert found["parameters"] == 1_353_024
    assert rows["f32"]["nbytes"] == 4 * found["parameters"]
    assert 4.5 < rows["nf4"]["bits_per_weight"] < 4.6
    assert all(row["bit_equal"] and row["materializations"] == 0 and row["speed"] > 0 for row in rows.values())
    assert set(found["text"]) == {"f32", "nf4"}
    assert all(len(written) == run_char.QUICK.tokens for written in found["text"].values())
    assert found["training"]["steps"] == run_char.QUICK.steps
    assert rows["f32"]["quality"] < 1.9
    assert rows["int8"]["change"] < 0.005
    assert 0 < rows["nf4"]["change"] < 0.06  # 8 windows; within 5 % on the 32 of a full run
    assert rows["ternary"]["change"] > 1  # which is why it is trained
    if importlib.util.find_spec("matplotlib") is None:
        assert found["picture"] is None
    else:
        assert (folder / "eformer_demo.png").read_bytes().startswith(b"\x89PNG")
    demo.show(found)
    said = capsys.readouterr().out
    for word in ("tokens/s", "made dense", "steps of training", "bit-equal after save and load", run_char.PROMPT):
        assert word in said


def test_a_check_that_fails_is_an_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    row = formats.Row("nf4", 10, 4.5, 2.0, 3.0, 5.0, 0, True)
    found = {"model": "m", "parameters": 1, "quality": "q", "change": "perplexity", "speed": "s"}
    found |= {"rows": [vars(row)], "checks": {"it is good": False}, "picture": None}
    monkeypatch.setattr(run_char, "run", lambda plan, folder, tell: found)
    assert main(["demo"]) == 1
    said = capsys.readouterr().out
    assert "FAILED it is good" in said
    assert "× 4" in said
    assert "eformer[plot]" in said
    assert main(["demo", "--json"]) == 1


def test_text_is_split_once_and_for_all():
    train, held_out = text.topics(held_out=False), text.topics(held_out=True)
    lines = [line for line in held_out.splitlines() if len(line) > 30]
    shared = np.mean([line in set(train.splitlines()) for line in lines[::7]])
    assert shared < 0.05
    assert len(held_out) > 40_000
    assert text.decode(text.encode("a\n~é")) == "a\n~�"
