"""Products on a TPU: Pallas kernels, the tiled path and dense bfloat16, beside a roofline estimate of each.

    python benchmarks/tpu_matmul.py [--chip v5e] [--sizes 4096x4096 ...] [--m 1 16 256] [--json PATH]

Prints one table. The estimate is the larger of the time to move every byte once and the time to multiply; decoding is
not in it. Without a TPU the table has the estimates alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _timing import BLOCK, STORED, random_storage, write_json

from eformer._kernels import qmatmul, tpu

SIZES = ("4096x4096", "4096x14336", "14336x4096")
ROWS_OF_X = (1, 8, 32, 128, 512, 4096)
FORMATS = ("bf16", *tpu.TAKES)
BITS = {"bf16": 16.0} | {fmt: STORED[fmt].bits + 32 / BLOCK * STORED[fmt].blocked for fmt in tpu.TAKES}
# Products in a row before the clock is read: one alone is shorter than starting it from the host.
REPEATS = 32


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published figures of one chip: bytes per second from HBM, bfloat16 operations per second."""

    bandwidth: float
    flops: float


CHIPS = {
    "v4": Chip(1228e9, 275e12),
    "v5e": Chip(819e9, 197e12),
    "v5p": Chip(2765e9, 459e12),
    "v6e": Chip(1640e9, 918e12),
}
KINDS = {
    "TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
}  # fmt: skip


def roofline(chip: Chip, fmt: str, m: int, k: int, n: int) -> float:
    """Seconds, at least."""
    moved = k * n * BITS[fmt] / 8 + 2 * m * (k + n)
    return max(moved / chip.bandwidth, 2 * m * k * n / chip.flops)


def seconds(product: Any, x: jax.Array, weights: list[Any]) -> float:
    """Median time of one product. Several weights take turns, so that none of them stays in a cache."""

    @jax.jit
    def many(x: jax.Array, weights: list[Any]) -> jax.Array:
        total = jnp.zeros((), jnp.float32)
        for i in range(REPEATS):
            # Each product needs the one before it, or XLA could drop or merge them.
            y = product(x + (total * 0).astype(x.dtype), weights[i % len(weights)])
            total = total + y[0, 0].astype(jnp.float32)
        return total

    jax.block_until_ready(many(x, weights))
    times = []
    for _ in range(9):
        start = time.perf_counter()
        jax.block_until_ready(many(x, weights))
        times.append(time.perf_counter() - start)
    return statistics.median(times) / REPEATS


def measure(fmt: str, form: str, m: int, k: int, n: int) -> dict[str, float]:
    """Seconds by path."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((m, k)), jnp.bfloat16)
    copies = 4
    if fmt == "bf16":
        dense = [jnp.asarray(rng.standard_normal((k, n)), jnp.bfloat16) for _ in range(copies)]
        return {"dense": seconds(jnp.matmul, x, dense)}
    rows, cols = (n, k) if form == "dot" else (k, n)
    weights = [random_storage(rng, fmt, rows, cols) for _ in range(copies)]

    def path(preference: str) -> Any:
        options: Any = {"fmt": fmt, "form": form, "cols": cols, "preference": preference}
        return lambda x, w: qmatmul(x, *w, **options)

    return {"kernel": seconds(path("native"), x, weights), "tiled": seconds(path("xla"), x, weights)}


def cell(value: float | None) -> str:
    return "-" if value is None else f"{1e6 * value:.1f}"


def table(results: list[dict[str, Any]]) -> str:
    lines = ["| K x N | M | form | format | roofline us | kernel us | tiled us | of roofline |", "|---" * 8 + "|"]
    for r in results:
        best = r["seconds"].get("kernel", r["seconds"].get("dense"))
        share = "-" if best is None else f"{100 * r['roofline'] / best:.0f}%"
        cells = (cell(r["roofline"]), cell(best), cell(r["seconds"].get("tiled")), share)
        lines.append(f"| {r['size']} | {r['m']} | {r['form']} | {r['fmt']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", choices=CHIPS, help="for the estimates; found by itself on a TPU, else v5e")
    parser.add_argument("--sizes", nargs="+", metavar="KxN", default=SIZES)
    parser.add_argument("--m", type=int, nargs="+", default=ROWS_OF_X)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--forms", nargs="+", choices=("dot", "axpy"), default=("dot",))
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results to this file")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    kind = jax.devices()[0].device_kind if jax.default_backend() == "tpu" else None
    name = options.chip or KINDS.get(kind or "", "v5e")
    print(f"{kind or 'no TPU here, so there are estimates only'}; roofline of {name}, bfloat16 activations")
    results: list[dict[str, Any]] = []
    for size, m, form, fmt in itertools.product(options.sizes, options.m, options.forms, options.formats):
        k, n = map(int, size.split("x"))
        found = measure(fmt, form, m, k, n) if kind else {}
        estimate = roofline(CHIPS[name], fmt, m, k, n)
        results.append({"size": size, "m": m, "form": form, "fmt": fmt, "roofline": estimate, "seconds": found})
    print(table(results))
    write_json(options.json, device=kind, chip=name, results=results)


if __name__ == "__main__":
    main()
