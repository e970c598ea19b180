"""The compiled library, on a machine without a GPU: it loads, and has what the Python side calls."""

from __future__ import annotations

import ctypes
import os

import pytest

from eformer._kernels.cuda import LIBRARY

PATH = os.environ.get("EFORMER_TEST_CUDA_LIBRARY")


@pytest.mark.skipif(not PATH, reason="needs a CUDA compiler: `make compile-cuda` sets EFORMER_TEST_CUDA_LIBRARY")
def test_it_loads_without_a_gpu() -> None:
    library = ctypes.CDLL(str(PATH))
    version = getattr(library, LIBRARY.abi_symbol)
    version.restype = ctypes.c_int64
    assert version() == LIBRARY.abi
    for _, symbol in LIBRARY.targets:
        assert getattr(library, symbol)
