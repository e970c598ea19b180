"""`python -m demo.compare`: one row for each format, and a picture."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from demo import compare


@pytest.mark.thorough
def test_rows_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = importlib.util.find_spec("matplotlib") is not None
    out = ["--out", str(tmp_path / "formats.svg")] if drawn else []
    assert compare.main(["--formats", "iq4_nl;mxfp4", "--windows", "8", "--json", *out]) == 0
    better, worse = json.loads(capsys.readouterr().out)["rows"]
    assert (better["format"], better["bits"], worse["bits"]) == ("iq4_nl", 4.5, 4.25)
    assert 0.07 < better["normal"] < 0.08 < worse["normal"] < 0.12
    assert 0 < better["char"] < worse["char"] < 0.15
    if drawn:
        assert "iq4_nl" in (tmp_path / "formats.svg").read_text()
