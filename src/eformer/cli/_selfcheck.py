"""The checks of `doctor`: products of random packed matrices, compared with float64."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from eformer._kernels import explain, qmatmul
from eformer._kernels.formats import FORMATS
from eformer._kernels.parameters import FORMS, product_problem
from eformer._kernels.reference import decode
from eformer._kernels.select import default_platform

BLOCK = 64
# Accelerators multiply in 16 bits unless told otherwise.
LIMIT, LIMIT_16_BITS = 2e-6, 5e-3


def random_storage(fmt: str, rows: int, cols: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scale of a random matrix; any bytes are valid codes, except the ternary 3."""
    rng, row = np.random.default_rng(seed), FORMATS[fmt]
    low, high = (-127, 128) if row.code_dtype == np.int8 else (0, 256)
    codes = rng.integers(low, high, row.stored_shape(rows, cols, BLOCK), dtype=row.code_dtype)
    if fmt == "ternary":
        codes &= ~((codes >> 1) & codes & 0x55)  # two bits that are both set lose the lower one: 3 becomes 2
    return codes, rng.uniform(0.5, 2, (rows, codes.shape[1] if row.blocked else 1)).astype(np.float32)


def _kernel(x: Any, codes: Any, scale: Any, **options: Any) -> str:
    return explain(product_problem(x, codes, scale, default_platform(), **options)).name


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
