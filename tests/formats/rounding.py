"""Rows rounded to 8 bits, as the definition says."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

LARGEST = {"int8": 127, "fp8": 448}


def rounded(x: Any, axes: tuple[int, ...], kind: str, scale: Any = None) -> np.ndarray:
    """What rows of x along these axes are rounded to, in float64."""
    x = np.asarray(x, np.float32)
    if scale is None:
        scale = np.maximum(np.abs(x).max(axes, keepdims=True) / np.float32(LARGEST[kind]), np.finfo(np.float32).tiny)
    codes = np.clip(x / scale, -LARGEST[kind], LARGEST[kind])
    codes = codes.astype(ml_dtypes.float8_e4m3fn) if kind == "fp8" else np.rint(codes)
    return codes.astype(np.float64) * np.asarray(scale, np.float64)


def error(found: Any, expected: Any) -> float:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())
