"""Shared by tests that run the kernels interpreted."""

from __future__ import annotations

import pytest

from eformer._kernels.tpu import tuning


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several steps along every axis of small problems; what lies behind the end of an array is NaN here."""
    monkeypatch.setattr(tuning, "TABLE", ((16, 128, 512),))
    monkeypatch.setattr(tuning, "LEAST_BYTES", 128)
