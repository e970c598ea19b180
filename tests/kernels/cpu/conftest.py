"""Tests of the native CPU kernels need the library. `make test` builds it and then insists on it."""

from __future__ import annotations

import os

import pytest

from eformer._kernels import cpu


@pytest.fixture(autouse=True, scope="session")
def library() -> None:
    reason = cpu.loaded().reason
    if reason is None:
        return
    if os.environ.get("EFORMER_TEST_NATIVE") == "1":
        pytest.fail(f"EFORMER_TEST_NATIVE=1, but {reason}")
    pytest.skip(f"{reason}; build them with `make test`, or name a library in EFORMER_CPU_LIBRARY")
