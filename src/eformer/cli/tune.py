"""`eformer tune`: measure which way of computing a product is the quickest on this GPU, and keep it in a file."""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from eformer._kernels import cuda
from eformer._kernels.cuda import tuning, ways
from eformer._kernels.formats import FORMATS
from eformer._kernels.parameters import FORMS, Problem, product_problem

from ._commands import OK, Failure, names, numbers, print_table

# Rows and columns of stored matrices, and rows of x.
SHAPES = (
    (4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192), (8192, 28672), (2880, 2880), (1024, 3072),
)  # fmt: skip
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
KINDS = ("nf4", "int4", "int8", "fp8_e4m3", "ternary", "binary")
CACHE = 160 << 20  # bytes that the matrices of a program must exceed together
LONG = 800.0  # microseconds that a program should take at least: a call costs 25 to 60 besides what it computes
BLOCK = 64
Timer = Callable[[list[Problem]], list[ways.Times]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "output", type=Path, nargs="?", default=Path("gpu_table.json"), help="the file to write (default: %(default)s)"
    )
    parser.add_argument("--formats", default=",".join(KINDS), help=f"which of {', '.join(KINDS)} (default: all)")
    rows = ",".join(map(str, ROWS))
    parser.add_argument("--rows", default=rows, metavar="M,M", help="rows of x (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no new shape after this many seconds")


def run(options: argparse.Namespace) -> int:
    """Measure, and write what is the quickest. The file is written after every shape."""
    formats, rows = names("--formats", options.formats, KINDS), numbers("--rows", options.rows)
    why = "there is no GPU here" if jax.default_backend() != "gpu" else cuda.refuses_machine("cuda")
    if why:
        raise Failure(f"CUDA kernels cannot be measured: {why}.")
    device = jax.devices()[0]
    about = {
        "date": str(datetime.date.today()),
        "device": device.device_kind,
        "capability": tuning.capability(),
        "jax": jax.__version__,
    }
    measured = measure(formats, rows, options.seconds, time_of_ways, lambda found: _write(options.output, about, found))
    show(measured)
    print(f"written to {options.output}; EFORMER_GPU_TABLE={options.output.resolve()} uses it.")
    return OK


def measure(
    formats: list[str],
    rows: list[int],
    seconds: float,
    timer: Timer,
    tell: Callable[[list[tuple[Problem, ways.Times]]], None],
) -> list[tuple[Problem, ways.Times]]:
    """Every product with the microseconds of every way it can be computed; `tell` hears of all of them at times."""
    begun, found = time.monotonic(), list[tuple[Problem, ways.Times]]()
    for stored, columns in SHAPES:
        if time.monotonic() - begun > seconds:
            break
        problems = [problem_of(fmt, form, stored, columns, m) for fmt in formats for form in FORMS for m in rows]
        found += zip(problems, timer(problems), strict=True)
        tell(found)
    return found


def problem_of(fmt: str, form: str, rows: int, cols: int, m: int) -> Problem:
    """A product of bfloat16, with a scale for every result where there are no blocks."""
    row = FORMATS[fmt]
    x = jax.ShapeDtypeStruct((m, cols if form == "dot" else rows), jnp.bfloat16)
    codes = jax.ShapeDtypeStruct(row.stored_shape(rows, cols, BLOCK), row.code_dtype)
    shape = (rows, codes.shape[1]) if row.blocked else (rows, 1) if form == "dot" else (1, cols)
    scale = jax.ShapeDtypeStruct(shape, jnp.float32)
    return product_problem(x, codes, scale, "cuda", fmt=fmt, form=form, cols=cols, block=BLOCK if row.blocked else None)


def time_of_ways(problems: list[Problem]) -> list[ways.Times]:
    """On this GPU. All programs are compiled first, several at a time: XLA tries its kernels on the GPU meanwhile."""
    jobs = [(problem, way) for problem in problems for way in ways.possible(problem)]
    made: dict[Any, list[Any]] = {}
    for problem in problems:
        held = made.setdefault(_storage(problem), [])
        held += [_matrix(problem, number) for number in range(len(held), _count(problem))]
    jax.block_until_ready(list(made.values()))

    def program(job: tuple[Problem, str]) -> Any:
        problem, way = job
        stored = made[_storage(problem)][: _count(problem)]
        x = jax.random.normal(jax.random.key(1), (problem.m, problem.deep), jnp.bfloat16)

        def products(x: Any, stored: Any) -> Any:
            ys = [cuda.qmatmul(problem, x, codes, scale, way=way) for codes, scale in stored]
            return sum(y[0, :8].astype(jnp.float32) for y in ys)

        return jax.jit(products).lower(x, stored).compile(), x, stored

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        programs = list(threads.map(program, jobs))
    found: dict[Problem, dict[str, float]] = {problem: {} for problem in problems}
    for (problem, way), (call, x, stored) in zip(jobs, programs, strict=True):
        found[problem][way] = _microseconds(call, x, stored) / len(stored)
    return [found[problem] for problem in problems]


def _storage(problem: Problem) -> tuple[Any, ...]:
    """What products with the same matrices have in common."""
    return problem.fmt, problem.form, problem.rows, problem.cols


def _count(problem: Problem) -> int:
    """Matrices in a program: so many that none stays in the cache, and that the host does not matter."""
    held = math.prod(problem.format.stored_shape(problem.rows, problem.cols, BLOCK))
    guess = max(3.5, held / 4e6, 2 * problem.m * problem.rows * problem.cols / 7e8)  # microseconds of one product
    return max(2, -(-CACHE // held), min(128, int(LONG / guess)))


def _matrix(problem: Problem, number: int) -> tuple[jax.Array, jax.Array]:
    row, key = problem.format, jax.random.key(number)
    mask = {"ternary": 0x55, "fp8_e4m3": 0xBF}.get(problem.fmt, 0xFF)  # two bits are no 3, eight bits no NaN
    codes = jax.random.bits(key, row.stored_shape(problem.rows, problem.cols, BLOCK), jnp.uint8) & jnp.uint8(mask)
    scale = jax.random.uniform(key, problem.scale_shape or (1, 1), minval=0.5)
    return jax.lax.bitcast_convert_type(codes, row.code_dtype), scale


def _microseconds(call: Any, *arguments: Any) -> float:
    """Median of a few rounds. A result is dropped before the next call, so that it gets the same memory."""
    jax.block_until_ready([call(*arguments) for _ in range(2)])
    times = []
    for _ in range(5):
        start, result = time.perf_counter(), None
        for _ in range(3):
            result = None
            result = call(*arguments)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / 3)
    return statistics.median(times) * 1e6


def _write(path: Path, about: dict[str, Any], measured: list[tuple[Problem, ways.Times]]) -> None:
    path.write_text(json.dumps({**about, "quickest": ways.quickest(measured)}, indent=1) + "\n")


def show(measured: list[tuple[Problem, ways.Times]]) -> None:
    """Where the choice without this measurement is more than 5 % slower than the best."""
    rows = []
    for problem, times in measured:
        best, now = min(times, key=lambda way: times[way]), ways.chosen(problem)
        if times[now] > 1.05 * times[best]:
            rows.append([str(problem), now, f"{times[now]:.1f}", best, f"{times[best]:.1f}"])
    columns = ["product", "chosen until now", "µs", "quickest", "µs"]
    print_table(f"{len(rows)} of {len(measured)} products change by more than 5 %", columns, rows)
