"""Time of products with quantized matrices on a GPU, against dense bfloat16 in JAX and the kernels of PyTorch.

    python benchmarks/gpu_matmul.py [--quick] [--json PATH] [--seconds N] [--rows M ...] [--forms dot axpy]
        [--formats F ...] [--shapes N] [--activations] [--no-torch]

"dot" is x @ w, "axpy" its gradient's form, `einsum("mk,nk->mn", x, w)`; dense matrices are laid out alike.
With --activations, formats that have such a product are timed with x rounded to 8 bits, too; rounding is in the time.
Every product is timed over several matrices inside one compiled program, so that no matrix comes from the cache. TB/s
counts codes, scales, x and y; the percentage is of a device-to-device copy measured in the same run.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import itertools
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from _gpu import BLOCK, IN_BLOCKS, PER_BYTE, code_bytes, corner_of, microseconds, storage

from eformer._kernels import qmatmul

SHAPES = (
    (4096, 14336), (4096, 4096), (14336, 4096), (8192, 8192), (8192, 28672), (5120, 13824), (2880, 2880), (1000, 3001),
)  # K, N  # fmt: skip
ROWS = (1, 16, 64, 256, 1024, 4096, 4, 32, 128, 512, 2048, 8, 2)
# (format, M) -> the ratio to dense to be reached on an H200
TARGETS = {("nf4", 1): 0.40, ("nf4", 16): 0.48, ("nf4", 64): 0.75, ("int8", 1): 0.58, ("int8", 16): 0.60}
ROUNDED = {"int8": "int8", "fp8_e4m3": "fp8"}  # what x is rounded to
ROUNDED_TARGETS = {("int8", 4096): 0.62, ("fp8", 4096): 0.60} | {
    (to, m): t for to in ROUNDED.values() for m, t in ((1024, 0.72), (256, 0.95))
}
TARGETS |= {("ternary", 1): 0.25} | {(fmt, m): 1.10 for fmt in PER_BYTE for m in (256, 4096)}


def copy_bandwidth() -> float:
    """TB/s of a large copy, bytes read plus bytes written."""
    block = jnp.ones((1 << 28,), jnp.float32)
    return 2 * block.nbytes / microseconds(jax.jit(lambda v: v + 1), block, calls=5) / 1e6


def measure(
    k: int, n: int, m: int, bandwidth: float, formats: list[str], form: str = "dot", *, rounding: bool = False
) -> list[dict[str, Any]]:
    count = max(2, min(16, (2 << 30) // (2 * k * n)))
    calls = 10 if m < 1000 else 2
    keys = jax.random.split(jax.random.key(k + n + m), count)
    x = jax.random.normal(keys[0], (m, k), jnp.bfloat16)
    layout, product = ((k, n), "mk,kn->mn") if form == "dot" else ((n, k), "mk,nk->mn")
    dense = [jax.random.normal(key, layout, jnp.bfloat16) for key in keys]
    base = microseconds(
        jax.jit(lambda x, ws: corner_of([jnp.einsum(product, x, w) for w in ws])), x, dense, calls=calls
    )
    base /= count
    del dense
    rows = [{"k": k, "n": n, "m": m, "form": form, "format": "dense", "us": base}]
    for fmt in formats:
        stored = [storage(key, fmt, *((n, k) if form == "dot" else (k, n))) for key in keys]
        if form == "axpy" and fmt not in IN_BLOCKS:  # a scale for every result
            stored = [(codes, jnp.ones((1, n)) + scale[0, 0]) for codes, scale in stored]
        how = {
            "fmt": fmt,
            "form": form,
            "cols": k if form == "dot" else n,
            "block": BLOCK if fmt in IN_BLOCKS else None,
        }
        for activations in (None, ROUNDED[fmt]) if rounding and fmt in ROUNDED else (None,):

            def products(x: Any, stored: Any, how: Any = how, to: Any = activations) -> Any:
                return corner_of([qmatmul(x, c, s, activations=to, **how) for c, s in stored])

            us = microseconds(jax.jit(products), x, stored, calls=calls) / count
            moved = code_bytes(fmt, n, k) + 2 * m * (n + k)
            speed = moved / us / 1e6
            target = TARGETS.get((fmt, m)) if form == "dot" else None
            target = target if activations is None else ROUNDED_TARGETS.get((activations, m))
            name = fmt if activations is None else f"{fmt} x {activations}"
            rows.append({"k": k, "n": n, "m": m, "form": form, "format": name, "us": us, "ratio": us / base,
                         "tb_s": speed, "percent_of_copy": 100 * speed / bandwidth, "target": target})  # fmt: skip
    return rows


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
    for m, form in itertools.product(some, options.forms):
        for k, n in shapes:
            if time.monotonic() - begin > options.seconds:
                continue
            rows = measure(k, n, m, bandwidth, options.formats, form, rounding=options.activations)
            if m <= 64 and form == "dot" and not options.no_torch:
                rows += with_torch(k, n, m)
            result["rows"] += rows
            print("\n".join(map(show, rows)), flush=True)
            if options.json:
                options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
