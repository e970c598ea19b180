"""`eformer tune` without a GPU: what it measures, what it keeps, and how products use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eformer._kernels.cuda import _wide, tuning, ways
from eformer.cli import tune
from eformer.cli._commands import main


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ways, "capability", lambda: "9.0")
    monkeypatch.setattr(_wide, "has_wgmma", lambda: True)
    monkeypatch.setattr(tuning, "capability", lambda: "9.0")
    ways.table.cache_clear()
    yield
    ways.table.cache_clear()


def by_rows(problems: list) -> list[dict[str, float]]:
    """A GPU on which decoding first is the quickest from 64 rows on, and never before."""
    rank = {"decode": 1.0, "wide": 2.0, "odd": 2.5, "few": 3.0}
    return [{way: rank[way] if p.m >= 64 else 1 / rank[way] for way in ways.possible(p)} for p in problems]


def test_what_is_measured_is_what_products_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    measured = tune.measure(["nf4", "int8"], [1, 64, 256], 1e9, by_rows, lambda found: told.append(len(found)))
    assert told == [12 * (i + 1) for i in range(len(tune.SHAPES))]
    path = tmp_path / "table.json"
    tune._write(path, {"capability": "9.0"}, measured)
    monkeypatch.setenv("EFORMER_GPU_TABLE", str(path))
    for problem, times in measured:
        assert ways.chosen(problem) == min(times, key=lambda way: times[way]), problem
    similar = tune.problem_of("nf4", "dot", 5120, 4352, 40)
    assert ways.chosen(similar) == "decode"  # as 4096 x 4096 with 64 rows
    # Nothing like these was measured: the rules decide.
    for other in (tune.problem_of("nf4", "dot", 64, 512, 64), tune.problem_of("binary", "dot", 4096, 4096, 64)):
        assert ways.chosen(other) == ways._by_rule(other, ways.possible(other))
    path.write_text(json.dumps({"capability": "8.0", "quickest": {}}))
    ways.table.cache_clear()
    assert ways.table(str(path), "9.0") == {}
    with pytest.raises(FileNotFoundError, match=r"EFORMER_GPU_TABLE is .*nowhere"):
        ways.table(str(tmp_path / "nowhere"), "9.0")


def test_a_table_of_the_package_names_ways_that_there_are() -> None:
    for path in Path(ways.__file__).parent.glob("quickest_*.json"):
        found = json.loads(path.read_text())
        assert path.name == f"quickest_{found['capability']}.json"
        named = {way for shapes in found["quickest"].values() for rows in shapes.values() for way in rows.values()}
        assert named <= set(ways.WAYS)


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["tune", str(tmp_path / "table.json")]) == 1
    assert "there is no GPU here" in capsys.readouterr().err
    assert main(["tune", "--formats", "int9"]) == 2
    assert "allowed are nf4" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
