"""`python -m eformer doctor`: its data, its tables with and without rich, and its verdict."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from eformer._kernels.formats import FORMATS
from eformer.cli import doctor, main


def test_no_command_prints_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "doctor" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["surgeon"])
    assert "doctor" in capsys.readouterr().err


def test_it_is_a_module() -> None:
    found = subprocess.run([sys.executable, "-m", "eformer", "--version"], capture_output=True, text=True, check=False)
    assert found.returncode == 0
    assert found.stdout.startswith("eformer ")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--no-timing"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert report["timings"] == []
    assert {"python", "eformer", "jax", "jaxlib"} <= set(report["versions"])
    assert {"cpu", "tpu"} <= {kernels["backend"] for kernels in report["kernels"]}
    assert [(check["format"], check["form"]) for check in report["checks"]] == [
        (fmt, form) for fmt in FORMATS for form in ("dot", "axpy")
    ]
    assert all(0 < check["error"] <= check["limit"] for check in report["checks"])


def test_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EFORMER_KERNELS", "0")
    report = doctor.report(timing=False)
    assert "EFORMER_KERNELS" in report["kernels"][0]["state"]
    assert {check["kernel"] for check in report["checks"]} == {"xla"}


@pytest.mark.parametrize("rich", [True, False])
@pytest.mark.thorough
def test_tables(rich: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: real(name) if rich or name != "rich" else None)
    few = doctor.timings(size=128, rounds=1)
    monkeypatch.setattr(doctor, "timings", lambda: few)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in ("installation", "native kernels", "self-check", "timings", "nf4", "binary", "jaxlib", "dense ms"):
        assert word in text
    assert ("│" in text) == rich


def test_a_wrong_result_is_an_exit_status(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LIMIT", 1e-12)
    assert main(["doctor", "--no-timing"]) == 1
    assert "WRONG" in capsys.readouterr().out
