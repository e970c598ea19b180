"""`eformer bench`: products with quantized matrices against dense ones, on this machine."""

from __future__ import annotations

import argparse
import functools
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from eformer._core import explain, implicit
from eformer.ops.quantization import QuantizationType, quantize

from ._commands import OK, WrongUse, add_json, names, numbers, print_json, print_table

FORMATS = tuple(map(str, QuantizationType))
_DEFAULT = "nf4,int4,int8,ternary,binary"
_DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="2048x2048", metavar="KxN", help="of the matrix (default: 2048x2048)")
    parser.add_argument("--rows", default="1,16", metavar="M,M", help="rows of x (default: 1,16)")
    parser.add_argument("--formats", default=_DEFAULT, help=f"which of {', '.join(FORMATS)} (default: {_DEFAULT})")
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="of x and of the dense matrix")
    parser.add_argument("--rounds", type=int, default=15, help="of interleaved runs; medians are shown (default: 15)")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Time every format and print the table."""
    if not (size := re.fullmatch(r"(\d+)x(\d+)", options.size)) or "0" in size.groups():
        raise WrongUse(f"--size {options.size!r} is not of the form 4096x14336.")
    rows, formats = numbers("--rows", options.rows), names("--formats", options.formats, FORMATS)
    if options.rounds < 1:
        raise WrongUse(f"--rounds {options.rounds} must be 1 or more.")
    k, n = map(int, size.groups())
    found = {
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "size": [k, n],
        "dtype": options.dtype,
        "rows": [line for m in rows for line in measure(k, n, m, formats, options.dtype, options.rounds)],
    }
    print_json(found) if options.json else show(found)
    return OK


def measure(k: int, n: int, m: int, formats: list[str], dtype: str, rounds: int) -> list[dict[str, Any]]:
    """One line per format for `m` rows of x."""
    key_w, key_x = jax.random.split(jax.random.key(0))
    dense = jax.random.normal(key_w, (k, n), jnp.dtype(dtype))
    x = jax.random.normal(key_x, (m, k), jnp.dtype(dtype))
    product = implicit(jnp.matmul)
    weights = {fmt: quantize(dense, dtype=fmt) for fmt in formats}
    kernels = {fmt: _kernel(product, x, w) for fmt, w in weights.items()}
    run = jax.jit(product)
    calls = {name: functools.partial(run, x, w) for name, w in {"dense": dense, **weights}.items()}
    seconds = _medians(calls, rounds)
    return [
        {
            "format": fmt,
            "m": m,
            "kernel": kernels[fmt],
            "ms": 1e3 * seconds[fmt],
            "dense_ms": 1e3 * seconds["dense"],
            "ratio": seconds[fmt] / seconds["dense"],
        }
        for fmt in formats
    ]


def _kernel(product: Any, x: Any, w: Any) -> str:
    """The kernel that is chosen; "dense" if the matrix is materialized first."""
    found = explain(lambda x, w: jax.eval_shape(product, x, w))(x, w)
    return ", ".join(dict.fromkeys(event.name for event in found.kernels)) or "dense"


def show(found: dict[str, Any]) -> None:
    k, n = found["size"]
    title = f"{k} × {n} weights, {found['dtype']} x, {found['device']} (ratios below 1 are faster than dense)"
    show_rows(title, found["rows"])


def show_rows(title: str, rows: list[dict[str, Any]]) -> None:
    print_table(
        title,
        ["format", "rows of x", "kernel", "ms", "dense ms", "ratio"],
        [
            [r["format"], str(r["m"]), r["kernel"], f"{r['ms']:.3f}", f"{r['dense_ms']:.3f}", f"{r['ratio']:.2f}"]
            for r in rows
        ],
    )


def _medians(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Seconds of each, in interleaved rounds: a busy machine slows all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}
