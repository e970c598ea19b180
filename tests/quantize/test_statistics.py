"""Containers of statistics: shapes, sums, files."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from eformer._quantize.statistics import LeafStatistics, Statistics
from eformer.errors import CalibrationError


def leaf(rng, shape=(3, 4, 5), axes=(1,), stack=(0,), whole=True):
    lead = tuple(shape[a] for a in stack)
    k = int(np.prod([shape[a] for a in axes]))
    x = rng.standard_normal((*lead, 7, k))
    moment = np.swapaxes(x, -1, -2) @ x
    return LeafStatistics(
        shape, axes, stack, moment if whole else None, (x**2).sum(-2), abs(x).max(-2), np.full(lead, 7.0)
    )


def equal(a: LeafStatistics, b: LeafStatistics) -> bool:
    same = (a.shape, a.axes, a.stack, len(a.uses)) == (b.shape, b.axes, b.stack, len(b.uses))
    parts = [
        (getattr(u, p), getattr(v, p)) for u, v in zip(a.uses, b.uses, strict=True) for p in ("moment", "diagonal")
    ]
    parts += [(getattr(u, p), getattr(v, p)) for u, v in zip(a.uses, b.uses, strict=True) for p in ("absmax", "count")]
    return same and all((x is None and y is None) or np.array_equal(x, y) for x, y in parts)


@pytest.fixture
def rng():
    return np.random.default_rng(5)


@pytest.fixture
def stats(rng):
    tied = leaf(rng, (6, 4), (0,), ())
    tied = LeafStatistics(**{**vars(tied), "others": (leaf(rng, (6, 4), (1,), ()),)})
    return Statistics({"layers/w": leaf(rng), "embed": tied, "out": leaf(rng, (2, 3, 4), (0, 1), ())})


def test_a_file_holds_everything(stats, tmp_path):
    stats.save(tmp_path / "s.safetensors")
    back = Statistics.load(tmp_path / "s.safetensors")
    assert list(back) == list(stats)
    assert all(equal(back[path], stats[path]) for path in stats)
    assert repr(back) == repr(stats) == f"Statistics(3 leaves, whole moments, 7 tokens, {stats.nbytes:,} bytes)"
    assert not back["layers/w"].moment.flags.writeable  # it is the file
    others = load_file(tmp_path / "s.safetensors")  # any reader of the format can open it
    assert np.array_equal(others["0/moment"], stats["layers/w"].moment)


def test_diagonals_alone_are_kept_alone(rng, tmp_path):
    stats = Statistics({"w": leaf(rng, whole=False)})
    stats.save(tmp_path / "s.safetensors")
    back = Statistics.load(tmp_path / "s.safetensors")
    assert back.diagonal_only
    assert equal(back["w"], stats["w"])


def test_sums(stats, rng):
    other = Statistics({"layers/w": leaf(rng), "new": leaf(rng)})
    total = stats + other
    assert list(total) == ["layers/w", "embed", "out", "new"]
    a, b, c = stats["layers/w"], other["layers/w"], total["layers/w"]
    assert np.array_equal(c.moment, a.moment + b.moment)
    assert np.array_equal(c.diagonal, a.diagonal + b.diagonal)
    assert np.array_equal(c.absmax, np.maximum(a.absmax, b.absmax))
    assert np.array_equal(c.count, a.count + b.count)
    assert equal(total["embed"], stats["embed"])


def test_uses_are_added_by_their_axes(stats):
    twice = stats["embed"] + stats["embed"]
    assert [use.axes for use in twice.uses] == [(0,), (1,)]
    assert np.array_equal(twice.along(-1).moment, 2 * stats["embed"].along(1).moment)
    assert twice.along((0, 1)) is None
    assert twice.tokens == 14
    assert twice.channels == 6


def test_what_does_not_fit_is_refused(stats, rng, tmp_path):
    with pytest.raises(CalibrationError, match=r"shapes \(3, 4, 5\) and \(3, 4, 6\)") as caught:
        stats + Statistics({"layers/w": leaf(rng, (3, 4, 6))})
    assert "'layers/w'" in caught.value.__notes__[0]
    with pytest.raises(CalibrationError, match="diagonals only"):
        stats + Statistics({"layers/w": leaf(rng, whole=False)})
    with pytest.raises(CalibrationError, match=r"diagonal has shape \(3,\).*need \(4,\)"):
        LeafStatistics((4, 2), (0,), (), None, np.zeros(3), np.zeros(3), np.zeros(()))
    (tmp_path / "s.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(CalibrationError, match="holds no statistics that can be read"):
        Statistics.load(tmp_path / "s.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CalibrationError, match="no statistics in this folder"):
        Statistics.load(tmp_path / "empty")
