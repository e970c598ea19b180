"""`python -m eformer doctor`: what is installed, which kernels run here, whether they are right, and how fast."""

from __future__ import annotations

import argparse
import os
import platform
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer._kernels import explain, qmatmul
from eformer._kernels.backends import COLUMNS, Kernels, kernels
from eformer._kernels.formats import FORMATS, decode
from eformer._kernels.parameters import FORMS, product_problem
from eformer._kernels.select import default_platform

from . import bench
from ._commands import FAILED, OK, add_json, print_json, print_table, version

DISTRIBUTIONS = ("eformer", "jax", "jaxlib", "numpy", "plum-dispatch")
SIZE, BLOCK = 2048, 64
# Accelerators multiply in 16 bits unless told otherwise.
LIMIT, LIMIT_16_BITS = 2e-6, 5e-3


def random_storage(fmt: str, rows: int, cols: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scale of a random matrix; any bytes are valid codes, except the ternary 3 and the NaNs of FP8."""
    rng, row = np.random.default_rng(seed), FORMATS[fmt]
    low, high = (-127, 128) if row.code_dtype == np.int8 else (0, 256)
    codes = rng.integers(low, high, row.stored_shape(rows, cols, BLOCK), dtype=row.code_dtype)
    if fmt == "ternary":
        codes &= ~((codes >> 1) & codes & 0x55)  # two bits that are both set lose the lower one: 3 becomes 2
    if row.bits_of is not None:
        codes &= 0xBF  # the highest bit of the exponent
    return codes, rng.uniform(0.5, 2, (rows, codes.shape[1] if row.blocked else 1)).astype(np.float32)


def _kernel(x: Any, codes: Any, scale: Any, **options: Any) -> str:
    return explain(product_problem(x, codes, scale, default_platform(), **options)).name


def self_check(rows: int = 192, cols: int = 320) -> list[dict[str, Any]]:
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-timing", action="store_true", help="leave out the timings (they take a few seconds)")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print the report; the exit status is 1 if a self-check failed."""
    found = report(timing=not options.no_timing)
    print_json(found) if options.json else show(found)
    return OK if found["ok"] else FAILED


def report(*, timing: bool = True) -> dict[str, Any]:
    """Everything the command knows, as plain data."""
    checks = self_check()
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in DISTRIBUTIONS}},
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cores": os.cpu_count(),
            "platform": jax.default_backend(),
            "devices": [str(device) for device in jax.devices()],
        },
        "kernels": kernels().states,
        "checks": checks,
        "timings": timings() if timing else [],
        "ok": all(check["ok"] for check in checks),
    }


def timings(size: int = SIZE, rounds: int = 9) -> list[dict[str, Any]]:
    """Products with one and with 16 rows of x, in every format."""
    rows = [row for m in (1, 16) for row in bench.measure(size, size, m, list(bench.FORMATS), "float32", rounds)]
    return [{**row, "size": size} for row in rows]


def show(found: dict[str, Any]) -> None:
    facts = {**found["versions"], **found["machine"], "devices": ", ".join(found["machine"]["devices"])}
    print_table("installation", ["what", "value"], [[name, str(value)] for name, value in facts.items()])
    print_table("native kernels", COLUMNS, Kernels(found["kernels"]).rows())
    verdict = {True: "ok", False: "WRONG"}
    print_table(
        "self-check (largest error / largest value, against float64)",
        ["format", "product", "kernel", "error", "allowed", "verdict"],
        [
            [c["format"], c["form"], c["kernel"], f"{c['error']:.1e}", f"{c['limit']:.0e}", verdict[c["ok"]]]
            for c in found["checks"]
        ],
    )
    if found["timings"]:
        bench.show_rows(f"timings ({SIZE} × {SIZE} weights; below 1 is faster than dense float32)", found["timings"])
