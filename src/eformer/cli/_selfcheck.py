"""The checks of `doctor`: products of random packed matrices, compared with float64 and timed against dense ones."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
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


def timings(size: int = 2048, rows_of_x: tuple[int, ...] = (1, 16), rounds: int = 9) -> list[dict[str, Any]]:
    """Medians of interleaved rounds, so that a busy machine slows all candidates alike."""
    found = []
    storage = {fmt: tuple(map(jnp.asarray, random_storage(fmt, size, size))) for fmt in FORMATS}
    dense = jnp.ones((size, size), jnp.float32)
    for m in rows_of_x:
        x = jnp.ones((m, size), jnp.float32)
        calls: dict[str, Callable[[], Any]] = {"dense": bound(jax.jit(jnp.matmul), x, dense)}
        for fmt, (codes, scale) in storage.items():
            calls[fmt] = bound(_jitted(fmt, size), x, codes, scale)
        seconds = medians(calls, rounds)
        for fmt in FORMATS:
            kernel = _kernel(x, *storage[fmt], fmt=fmt, form="dot", cols=size)
            facts = {"format": fmt, "m": m, "size": size, "kernel": kernel, "ms": 1e3 * seconds[fmt]}
            found.append({**facts, "dense_ms": 1e3 * seconds["dense"], "ratio": seconds[fmt] / seconds["dense"]})
    return found


def _jitted(fmt: str, cols: int) -> Any:
    return jax.jit(lambda x, codes, scale: qmatmul(x, codes, scale, fmt=fmt, form="dot", cols=cols))


def bound(function: Any, *operands: Any) -> Callable[[], Any]:
    return lambda: jax.block_until_ready(function(*operands))


def medians(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}
