"""What the benchmarks share: interleaved timing, random packed matrices, and the facts that go with every result."""

from __future__ import annotations

import datetime
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

import eformer
from eformer._kernels import cpu
from eformer._kernels.formats import FORMATS as STORED

FORMATS = ("nf4", "int8", "ternary", "binary")
MORE = ("int4", "fp4", "int8_block", "fp8_e4m3", "fp8_e4m3_block", "int2", "int3", "int5", "int6")
BLOCK = 64
Call = tuple[Callable[..., Any], tuple[Any, ...]]


def random_storage(rng: np.random.Generator, fmt: str, rows: int, cols: int) -> tuple[jax.Array, jax.Array]:
    """Codes and scales of a random matrix; the values do not influence the time."""
    row = STORED[fmt]
    codes = rng.integers(0, 120, row.stored_shape(rows, cols, BLOCK), dtype=np.uint8).view(row.code_dtype)
    scales = (rows, cols // BLOCK) if row.blocked else (rows, 1)
    return jnp.asarray(codes), jnp.asarray(rng.random(scales, dtype=np.float32))


def random_offset(rng: np.random.Generator, fmt: str, kind: str, shape: tuple[int, ...]) -> jax.Array:
    """Zero points or biases of a random matrix of integers."""
    if kind == "zeros":
        return jnp.asarray(rng.integers(0, 2 ** STORED[fmt].bits, shape, dtype=np.uint8))
    return jnp.asarray(rng.standard_normal(shape, dtype=np.float32))


def interleaved(
    calls: dict[str, Call],
    rounds: int,
    *,
    at_most: float = float("inf"),
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of every call, all timed once per round, so that a busy machine slows all of them alike.

    The order changes from round to round: who always follows the same call finds the caches, and the sleeping threads,
    that one leaves behind. Rounds stop early once they have taken `at_most` seconds, but not before the third.
    """
    for function, operands in calls.values():
        jax.block_until_ready(function(*operands))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    begin, order = time.perf_counter(), random.Random(0)
    for done in range(rounds):
        if done >= 3 and time.perf_counter() - begin > at_most:
            break
        for name, (function, operands) in order.sample(list(calls.items()), len(calls)):
            start = clock()
            jax.block_until_ready(function(*operands))
            seconds[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def facts() -> dict[str, Any]:
    """Date, versions and machine."""
    return {
        "date": datetime.date.today().isoformat(),
        "eformer": eformer.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
        "machine": _cpu_name(),
        "cores": os.cpu_count(),
        "kernels": cpu.isa_name() if cpu.loaded().reason is None else cpu.loaded().reason,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def write_json(path: Path | None, **results: Any) -> None:
    if path is not None:
        path.write_text(json.dumps({**facts(), **results}, indent=2) + "\n")
