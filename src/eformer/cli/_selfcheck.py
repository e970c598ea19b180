"""The checks of `doctor`: products of random packed matrices, compared with float64."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from eformer._kernels import qmatmul
from eformer._kernels.platforms import default_platform
from eformer._kernels.problem import FORMATS, FORMS, PER_CODE, problem_of, spec_of
from eformer._kernels.reference import decode
from eformer._kernels.select import explain

BLOCK = 64
# Accelerators multiply in 16 bits where nothing else is asked for.
LIMIT, LIMIT_16_BITS = 2e-6, 5e-3


def random_storage(fmt: str, rows: int, cols: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scale of a random matrix; any bytes are valid codes, except the ternary 3."""
    rng = np.random.default_rng(seed)
    if fmt == "nf4":
        codes = rng.integers(0, 256, (rows, cols // BLOCK, BLOCK // 2), dtype=np.uint8)
        return codes, rng.uniform(0.5, 2, (rows, cols // BLOCK)).astype(np.float32)
    if fmt == "int8":
        codes = rng.integers(-127, 128, (rows, cols), dtype=np.int8)
    else:
        codes = rng.integers(0, 256, (rows, cols // PER_CODE[fmt]), dtype=np.uint8)
    if fmt == "ternary":
        codes &= ~((codes >> 1) & codes & 0x55)  # two bits that are both set lose the lower one: 3 becomes 2
    return codes, rng.uniform(0.5, 2, (rows, 1)).astype(np.float32)


def _kernel(x: Any, codes: Any, scale: Any, **options: Any) -> str:
    return explain(problem_of(spec_of(x, codes, scale, **options), default_platform(), x, codes, scale)).name


def errors(rows: int = 192, cols: int = 320) -> list[dict[str, Any]]:
    """One product per format and form against numpy in float64."""
    found, limit = [], LIMIT if default_platform() == "cpu" else LIMIT_16_BITS
    for fmt in FORMATS:
        codes, scale = random_storage(fmt, rows, cols)
        dense = np.asarray(decode(jnp.asarray(codes), jnp.asarray(scale), fmt=fmt, cols=cols), np.float64)
        for form in FORMS:
            matrix = dense.T if form == "dot" else dense
            x = np.random.default_rng(1).standard_normal((5, matrix.shape[0])).astype(np.float32)
            options = {"fmt": fmt, "form": form, "cols": cols}
            y, expected = np.asarray(qmatmul(x, codes, scale, **options), np.float64), x.astype(np.float64) @ matrix
            error = float(np.abs(y - expected).max() / np.abs(expected).max())
            kernel = _kernel(x, codes, scale, **options)
            facts = {"format": fmt, "form": form, "kernel": kernel, "error": error, "limit": limit}
            found.append({**facts, "ok": error <= limit})
    return found
