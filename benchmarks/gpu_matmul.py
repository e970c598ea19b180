"""Time of products with quantized matrices on a GPU, against dense bfloat16 in JAX and the kernels of PyTorch.

    python benchmarks/gpu_matmul.py [--quick] [--json PATH] [--seconds N] [--rows M ...] [--forms dot axpy]
        [--formats F ...] [--shapes N] [--activations] [--no-torch]

"dot" is x @ w, "axpy" its gradient's form, `einsum("mk,nk->mn", x, w)`; dense matrices are laid out alike.
With --activations, formats that have such a product are timed with x rounded to 8 bits, too; rounding is in the time.
Every product is timed over several matrices inside one compiled program, so that no matrix comes from the cache.
Formats take turns, as a warm chip is slower. TB/s counts codes, scales, x and y; the percentage is of a copy on the
device measured in the same run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import importlib
import itertools
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from _gpu import BLOCK, IN_BLOCKS, PER_BYTE, code_bytes, corner_of, microseconds, storage

from eformer._kernels import qmatmul

SHAPES = (
    (4096, 14336), (4096, 4096), (14336, 4096), (8192, 8192), (8192, 28672), (5120, 13824), (2880, 2880), (1000, 3001),
)  # K, N  # fmt: skip
ROWS = (1, 16, 64, 256, 1024, 4096, 4, 32, 128, 512, 2048, 8, 2)
LIMIT = 1.10  # no product may take more than this, relative to dense
CACHE = 160 << 20  # bytes that the matrices of a program must exceed together
LONG = 800.0  # microseconds that a program should take at least: a call costs 25 to 60 besides what it computes
ROUNDED = {"int8": "int8", "fp8_e4m3": "fp8"}  # what x is rounded to
# (what x is rounded to, M) -> the ratio to dense to be reached on an H200
ROUNDED_TARGETS = {("int8", 4096): 0.62, ("fp8", 4096): 0.60} | {
    (to, m): t for to in ROUNDED.values() for m, t in ((1024, 0.72), (256, 0.95))
}


def copy_bandwidth() -> float:
    """TB/s of a large copy, bytes read plus bytes written."""
    block = jnp.ones((1 << 28,), jnp.float32)
    return 2 * block.nbytes / microseconds(jax.jit(lambda v: v + 1), block, calls=5) / 1e6


class Cell(NamedTuple):
    """A product: of dense matrices ("dense"), or of a format whose x may be rounded."""

    m: int
    format: str
    rounded: str | None

    def __str__(self) -> str:
        return self.format if self.rounded is None else f"{self.format} x {self.rounded}"


class Matrices:
    """Random matrices of one shape, enough of them that none stays in the cache, made when they are first asked for."""

    def __init__(self, k: int, n: int, form: str):
        self.k, self.n, self.form = k, n, form
        self.made: dict[str, list[Any]] = {}

    def count(self, fmt: str, m: int) -> int:
        held = 2 * self.k * self.n if fmt == "dense" else code_bytes(fmt, self.n, self.k)
        guess = max(3.5, held / 4e6, 2 * m * self.k * self.n / 7e8)  # microseconds of one product
        return max(2, -(-CACHE // held), min(128, int(LONG / guess)))

    def of(self, fmt: str, m: int) -> list[Any]:
        made, count = self.made.setdefault(fmt, []), self.count(fmt, m)
        made += [self._one(jax.random.key(number), fmt) for number in range(len(made), count)]
        return made[:count]

    def _one(self, key: Any, fmt: str) -> Any:
        shape = (self.n, self.k) if self.form == "dot" else (self.k, self.n)
        if fmt == "dense":
            return jax.random.normal(key, shape[::-1], jnp.bfloat16)
        codes, scale = storage(key, fmt, *shape)
        if self.form == "axpy" and fmt not in IN_BLOCKS:  # a scale for every result
            scale = jnp.ones((1, self.n)) + scale[0, 0]
        return codes, scale

    def program(self, cell: Cell) -> tuple[Any, tuple[Any, Any]]:
        """A compiled program with one product per matrix, and its arguments."""
        form, fmt, stored = self.form, cell.format, self.of(cell.format, cell.m)
        x = jax.random.normal(jax.random.key(cell.m), (cell.m, self.k), jnp.bfloat16)

        def products(x: Any, stored: Any) -> Any:
            if fmt == "dense":
                return corner_of([jnp.einsum("mk,kn->mn" if form == "dot" else "mk,nk->mn", x, w) for w in stored])
            cols, block = self.k if form == "dot" else self.n, BLOCK if fmt in IN_BLOCKS else None
            how = {"fmt": fmt, "form": form, "cols": cols, "block": block, "activations": cell.rounded}
            return corner_of([qmatmul(x, codes, scale, **how) for codes, scale in stored])

        return jax.jit(products).lower(x, stored).compile(), (x, stored)


def measure(k: int, n: int, form: str, cells: list[Cell], bandwidth: float) -> list[dict[str, Any]]:
    """All programs are compiled first, several at a time: XLA tries its own kernels on the GPU meanwhile."""
    matrices = Matrices(k, n, form)
    for cell in cells:
        matrices.of(cell.format, cell.m)
    jax.block_until_ready(matrices.made)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        programs = list(threads.map(matrices.program, cells))
    times = interleaved(dict(zip(cells, programs, strict=True)))
    rows = []
    for cell, us in times.items():
        row = {"k": k, "n": n, "m": cell.m, "form": form, "format": str(cell), "us": us}
        if cell.format != "dense":
            speed = (code_bytes(cell.format, n, k) + 2 * cell.m * (n + k)) / us / 1e6
            target = ROUNDED_TARGETS.get((cell.rounded, cell.m)) if cell.rounded else LIMIT
            row |= {
                "ratio": us / times[Cell(cell.m, "dense", None)],
                "tb_s": speed,
                "percent_of_copy": 100 * speed / bandwidth,
                "target": target,
            }
        rows.append(row)
    return rows


def interleaved(programs: dict[Cell, Any]) -> dict[Cell, float]:
    """Microseconds of one product of each. Those of equally many rows take turns: a chip that is warm is slower."""
    found: dict[Cell, float] = {}
    for m in dict.fromkeys(cell.m for cell in programs):
        some = {cell: program for cell, program in programs.items() if cell.m == m}
        times: dict[Cell, list[float]] = {cell: [] for cell in some}
        for _ in range(5):
            for cell, (program, arguments) in some.items():
                us = microseconds(program, *arguments, calls=8 if m <= 256 else 3, rounds=1)
                times[cell].append(us / len(arguments[1]))
        found |= {cell: statistics.median(values) for cell, values in times.items()}
    return found


def with_torch(k: int, n: int, m: int) -> list[dict[str, Any]]:
    """PyTorch's int4 product and that of bitsandbytes, where they can be imported."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return []
    count, group = 16, 64
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    packed = [
        torch.ops.aten._convert_weight_to_int4pack(
            torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda"), 8
        )
        for _ in range(count)
    ]
    zeros = torch.randn(k // group, n, 2, dtype=torch.bfloat16, device="cuda")
    calls = {"torch int4": lambda i: torch.ops.aten._weight_int4pack_mm(x, packed[i], group, zeros)}
    try:
        bnb = importlib.import_module("bitsandbytes").functional
    except ImportError:
        pass
    else:
        weights = [
            bnb.quantize_4bit(torch.randn(n, k, dtype=torch.bfloat16, device="cuda"), quant_type="nf4")
            for _ in range(count)
        ]
        if m == 1:
            calls["bitsandbytes nf4"] = lambda i: bnb.gemv_4bit(x, weights[i][0].t(), state=weights[i][1])
        else:
            calls["bitsandbytes nf4"] = lambda i: x @ bnb.dequantize_4bit(*weights[i]).t()
    return [
        {"k": k, "n": n, "m": m, "form": "dot", "format": name, "us": _graph_time(torch, call, count)}
        for name, call in calls.items()
    ]


def _graph_time(torch: Any, call: Any, count: int) -> float:
    for i in range(count):
        call(i)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            call(i)
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    return sorted(times)[3]


def show(row: dict[str, Any]) -> str:
    text = f"{row['k']:>6}x{row['n']:<6} M={row['m']:<5} {row['form']:<4} {row['format']:<17} {row['us']:9.1f} us"
    if "ratio" in row:
        goal = "" if row["target"] is None else f"  target {row['target']:.2f}"
        text += f" {row['tb_s']:6.2f} TB/s {row['percent_of_copy']:4.0f}% of copy  {row['ratio']:5.2f} of dense{goal}"
    return text


def summary(rows: list[dict[str, Any]]) -> str:
    """How many products there are of every format, and the worst of those above the limit."""
    found = []
    for form, fmt in dict.fromkeys((row["form"], row["format"]) for row in rows if "ratio" in row):
        mine = [row for row in rows if (row["form"], row["format"]) == (form, fmt)]
        over = sorted((row for row in mine if row["ratio"] > LIMIT), key=lambda row: -row["ratio"])
        worst = ", ".join(f"{row['ratio']:.2f} at {row['k']}x{row['n']} M={row['m']}" for row in over[:4])
        found.append(f"{form:<4} {fmt:<15} {len(over):3} of {len(mine):3} above {LIMIT:.2f} of dense: {worst}")
    return "\n".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no measurement after so many seconds")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, help="rows of x")
    parser.add_argument("--formats", choices=PER_BYTE, nargs="*", default=tuple(PER_BYTE))
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes")
    parser.add_argument("--forms", choices=("dot", "axpy"), nargs="*", default=("dot", "axpy"))
    parser.add_argument("--commit", help="of the tree that is measured, for the file")
    parser.add_argument("--activations", action="store_true", help="round x to 8 bits, too")
    parser.add_argument("--no-torch", action="store_true", help="leave PyTorch and bitsandbytes out")
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        print("no GPU: nothing to measure")
        return
    begin, bandwidth = time.monotonic(), copy_bandwidth()
    device = jax.devices()[0]
    versions = {"jax": jax.__version__, "cuda": getattr(device.client, "platform_version", "")}
    result = {"date": str(datetime.date.today()), "commit": options.commit, "device": device.device_kind,
              "versions": versions, "copy_tb_s": bandwidth, "rows": []}  # fmt: skip
    print(f"{device.device_kind}, copy {bandwidth:.2f} TB/s")
    shapes, some = (SHAPES[:1], options.rows[:2]) if options.quick else (SHAPES[: options.shapes], options.rows)
    cells = [Cell(m, "dense", None) for m in some] + [Cell(m, fmt, None) for fmt in options.formats for m in some]
    if options.activations:
        cells += [Cell(m, fmt, ROUNDED[fmt]) for fmt in options.formats if fmt in ROUNDED for m in some]
    for (k, n), form in itertools.product(shapes, options.forms):
        if time.monotonic() - begin > options.seconds:
            break
        rows = measure(k, n, form, cells, bandwidth)
        if form == "dot" and not options.no_torch:
            rows += [row for m in some if m <= 64 for row in with_torch(k, n, m)]
        result["rows"] += rows
        print("\n".join(map(show, rows)), flush=True)
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(summary(result["rows"]))


if __name__ == "__main__":
    main()
