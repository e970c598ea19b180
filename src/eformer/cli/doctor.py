"""`python -m eformer doctor`: what is installed, which kernels run here, whether they are right, and how fast."""

from __future__ import annotations

import argparse
import os
import platform
from typing import Any

import jax

from eformer.ops.quantization.kernels import kernels

from . import _selfcheck, bench
from ._fail import FAILED, OK
from ._text import add_json, print_json, print_table
from ._versions import version

DISTRIBUTIONS = ("eformer", "jax", "jaxlib", "numpy", "plum-dispatch")
SIZE = 2048


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
    checks = _selfcheck.errors()
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
    print_table(
        "native kernels",
        ["platform", "state", "instructions", "file"],
        [[k["backend"], k["state"], k["instructions"] or "-", k["path"] or "-"] for k in found["kernels"]],
    )
    print_table(
        "self-check (largest error / largest value, against float64)",
        ["format", "product", "kernel", "error", "allowed", "verdict"],
        [
            [
                c["format"],
                c["form"],
                c["kernel"],
                f"{c['error']:.1e}",
                f"{c['limit']:.0e}",
                "ok" if c["ok"] else "WRONG",
            ]
            for c in found["checks"]
        ],
    )
    if found["timings"]:
        bench.show_rows(f"timings ({SIZE} × {SIZE} weights; below 1 is faster than dense float32)", found["timings"])
