"""Products with quantized matrices on the tiled path, as ratios to the dense float32 product of the same run.

    python benchmarks/arrays.py [--quick] [--json PATH] [--form dot|axpy] [--dtype float32|bfloat16]

All candidates are timed in turn, round after round, so that a busy machine slows all of them alike; the figures are
ratios of medians. Below 1 is faster than dense.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _timing import BLOCK, FORMATS, Call, interleaved, random_storage

from eformer._kernels import qmatmul

# (format, M) -> the ratio the tiled path must not exceed in the dot form with float32 activations
LIMITS = {
    **dict(zip([("nf4", m) for m in (1, 16, 128)], (1.6, 1.0, 1.1), strict=True)),
    **dict(zip([("int8", m) for m in (1, 16, 128)], (1.0, 0.8, 1.1), strict=True)),
    ("ternary", 1): 0.7,
    ("binary", 1): 0.7,
}


def quantized_call(fmt: str, form: str, cols: int, x: jax.Array, storage: tuple[jax.Array, jax.Array]) -> Call:
    block = BLOCK if fmt == "nf4" else None
    options: Any = {"fmt": fmt, "form": form, "cols": cols, "block": block, "preference": "xla"}
    product = jax.jit(lambda x, codes, scale: qmatmul(x, codes, scale, **options))
    return product, (x, *storage)


def measure(
    k: int, n: int, m: int, form: str, dtype: str, formats: tuple[str, ...], rounds: int
) -> list[dict[str, Any]]:
    """Ratios for x (m, k) times a matrix of k inputs and n outputs."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((m, k), dtype=np.float32))
    dense = jnp.asarray(rng.standard_normal((k, n), dtype=np.float32))
    rows, cols = (n, k) if form == "dot" else (k, n)
    calls: dict[str, Call] = {"dense": (jax.jit(jnp.matmul), (x, dense))}
    for fmt in formats:
        calls[fmt] = quantized_call(fmt, form, cols, x.astype(dtype), random_storage(rng, fmt, rows, cols))
    seconds = interleaved(calls, rounds)
    common = {"k": k, "n": n, "m": m, "form": form, "dtype": dtype, "dense_ms": 1e3 * seconds["dense"]}
    limited = form == "dot" and dtype == "float32"
    return [
        {
            **common,
            "format": fmt,
            "ms": 1e3 * seconds[fmt],
            "ratio": seconds[fmt] / seconds["dense"],
            "limit": LIMITS.get((fmt, m)) if limited else None,
        }
        for fmt in formats
    ]


def table_row(result: dict[str, Any]) -> str:
    limit = result["limit"]
    verdict = "" if limit is None else f"<= {limit:.1f} {'ok' if result['ratio'] <= limit else 'OVER'}"
    shape = f"{result['k']}x{result['n']}"
    return (
        f"{shape:>12} {result['form']:>5} {result['dtype']:>9} M={result['m']:<4} {result['format']:<8}"
        f"{result['ms']:9.2f} ms {result['ratio']:6.2f}  {verdict}"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one size, fewer rounds")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results to this file")
    parser.add_argument("--form", choices=("dot", "axpy"), default="dot")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the activations")
    parser.add_argument("--m", type=int, nargs="+", default=(1, 16, 128))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--sizes", nargs="+", default=None, metavar="KxN")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    sizes = args.sizes or (["4096x4096"] if args.quick else ["4096x4096", "4096x14336"])
    results: list[dict[str, Any]] = []
    for size in sizes:
        k, n = map(int, size.split("x"))
        for m in args.m:
            found = measure(k, n, m, args.form, args.dtype, tuple(args.formats), 7 if args.quick else 21)
            print(*map(table_row, found), sep="\n", flush=True)
            results += found
    if args.json:
        args.json.write_text(json.dumps({"jax": jax.__version__, "results": results}, indent=2))


if __name__ == "__main__":
    main()
