"""What interception costs: the same work with implicit arrays and in plain JAX, timed in turn, as ratios.

    python benchmarks/core_overhead.py [--quick] [--json PATH]

The implicit type stores the dense matrix and a scalar it never uses, and its handler does the very `dot_general` plain
JAX does. The arithmetic is therefore identical, and whatever exceeds 1 is Python: tracing, dispatch, flattening.

Each round times both sides back to back, in alternating order, so that a busy machine slows both alike. A figure is the
median over rounds of ours / plain; the spread is the quartiles of that ratio. Eager calls and tracing are Python on one
thread: their clock is the CPU time of the process, which other processes do not disturb. A compiled program has several
threads, so warm calls are timed by the wall clock, each alone: most samples then escape the scheduler.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

import eformer
from eformer.jaximus import ImplicitArray, implicit, register
from eformer.ops.quantization import ArrayNF4

Thunk = Callable[[], Any]
MATMUL = (((1,), (0,)), ((), ()))


@dataclasses.dataclass
class Carried(ImplicitArray):
    """Stands for `w`; `scale` is there because real types have a second child."""

    w: jax.Array
    scale: jax.Array

    core_ndim: ClassVar[int] = 2
    compiles_products: ClassVar[bool] = True  # as quantized arrays do

    def compute_shape(self) -> tuple[int, ...]:
        return tuple(self.w.shape)

    def compute_dtype(self) -> Any:
        return self.w.dtype

    def materialize(self) -> jax.Array:
        return self.w


@register("dot_general")
def _(x: jax.Array, q: Carried, **params: Any) -> jax.Array:
    return jax.lax.dot_general(x, q.w, **params)


@register("dot_general")
def _(q: Carried, x: jax.Array, **params: Any) -> jax.Array:
    return jax.lax.dot_general(q.w, x, **params)


@dataclasses.dataclass(frozen=True)
class Case:
    """One comparison: two thunks that do `work` units of the same work each."""

    name: str
    ours: Thunk
    plain: Thunk
    work: int
    target: float | None = None
    clock: Callable[[], float] = time.process_time


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table; times are medians in µs per unit of work."""

    name: str
    ours_us: float
    plain_us: float
    ratio: float
    ratio_q1: float
    ratio_q3: float
    target: float | None

    @property
    def verdict(self) -> str:
        if self.target is None:
            return "-"
        return "met" if self.ratio <= self.target else "MISSED"


# -- timing ----------------------------------------------------------------------------------------------------------


def seconds(thunk: Thunk, clock: Callable[[], float]) -> float:
    start = clock()
    thunk()
    return clock() - start


def compare(case: Case, rounds: int) -> Row:
    case.ours(), case.plain()  # compile, fill caches
    pairs: list[tuple[float, float]] = []
    for i in range(rounds):
        if i % 2:
            plain, ours = seconds(case.plain, case.clock), seconds(case.ours, case.clock)
        else:
            ours, plain = seconds(case.ours, case.clock), seconds(case.plain, case.clock)
        pairs.append((ours, plain))
    ratios = [ours / plain for ours, plain in pairs]
    q1, median, q3 = statistics.quantiles(ratios, n=4, method="inclusive")
    ours_us, plain_us = (statistics.median(side) * 1e6 / case.work for side in zip(*pairs, strict=True))
    return Row(case.name, ours_us, plain_us, median, q1, q3, case.target)


def repeat(f: Callable[..., Any], *args: Any, times: int) -> Thunk:
    """`f(*args)`, `times` times, then wait for the last result."""

    def thunk() -> None:
        out = None
        for _ in range(times):
            out = f(*args)
        jax.block_until_ready(out)

    return thunk


# -- cases -----------------------------------------------------------------------------------------------------------


def carried(w: jax.Array) -> Carried:
    return Carried(w, jnp.ones((), w.dtype))


def random(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape, dtype=np.float32) / np.sqrt(shape[-1]))


def eager_cases(rng: np.random.Generator, times: int) -> list[Case]:
    x, w = random(rng, 64, 64), random(rng, 64, 64)
    q = carried(w)

    def adds(x: jax.Array) -> jax.Array:
        for _ in range(times):
            y = jax.lax.add(x, x)
        return y

    def dots(x: jax.Array, w: Any) -> jax.Array:
        for _ in range(times):
            y = jax.lax.dot_general(x, w, MATMUL)
        return y

    def thunk(f: Callable[..., Any], *args: Any) -> Thunk:
        return repeat(f, *args, times=1)

    return [
        Case("eager: dense add inside implicit", thunk(implicit(adds), x), thunk(adds, x), times),
        Case("eager: dot_general with a handler", thunk(implicit(dots), x, q), thunk(dots, x, w), times, 1.6),
        Case("eager: x @ q outside any scope", _matmuls(x, q, times), _matmuls(x, w, times), times, 4.5),
    ]


def _matmuls(x: jax.Array, w: Any, times: int) -> Thunk:
    return repeat(lambda: x @ w, times=times)


def mlp(x: jax.Array, layers: list[Any]) -> jax.Array:
    for w in layers:
        x = jax.nn.relu(x @ w)
    return x


def loss(x: jax.Array, layers: list[Any]) -> jax.Array:
    return jnp.sum(mlp(x, layers) ** 2)


def warm_cases(rng: np.random.Generator) -> list[Case]:
    x, dense = random(rng, 32, 256), [random(rng, 256, 256) for _ in range(8)]
    layers = [carried(w) for w in dense]

    def case(name: str, ours: Callable[..., Any], target: float | None) -> Case:
        plain = repeat(jax.jit(mlp), x, dense, times=1)
        return Case(f"warm: {name}", repeat(ours, x, layers, times=1), plain, 1, target, time.perf_counter)

    return [
        case("jit(implicit f), MLP 8 x 256", jax.jit(implicit(mlp)), 1.1),
        case("implicit(jit f), MLP 8 x 256", implicit(jax.jit(mlp)), None),
    ]


def trace_cases(rng: np.random.Generator) -> list[Case]:
    x, dense = random(rng, 32, 64), [random(rng, 64, 64) for _ in range(32)]
    layers = [carried(w) for w in dense]

    def trace(make: Callable[[Any], Any], f: Callable[..., Any], layers: list[Any]) -> Thunk:
        # A new function every time: JAX remembers what it traced by identity.
        return lambda: jax.jit(make(lambda x, layers: f(x, layers))).trace(x, layers)

    def case(name: str, f: Callable[..., Any], ours: Callable[[Any], Any], plain: Callable[[Any], Any]) -> Case:
        return Case(f"trace: {name}", trace(ours, f, layers), trace(plain, f, dense), 1, 1.8)

    return [
        case("MLP of 32 layers", mlp, implicit, lambda f: f),
        case("its gradient, grad(implicit f)", loss, lambda f: jax.grad(implicit(f)), jax.grad),
        case("its gradient, implicit(grad f)", loss, lambda f: implicit(jax.grad(f)), jax.grad),
    ]


# -- counting --------------------------------------------------------------------------------------------------------


def functions_of_one_product() -> collections.Counter[str]:
    """The Python functions of eformer that one warm eager `x @ q` with NF4 calls, and how often each."""
    x = jnp.ones((4, 256))
    q = ArrayNF4.quantize(jnp.ones((256, 128)), 64)
    jax.block_until_ready((x @ q, x @ q))
    package = os.path.dirname(eformer.__file__) + os.sep
    calls: collections.Counter[str] = collections.Counter()

    def count(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls[f"{frame.f_code.co_filename.removeprefix(package)}:{frame.f_code.co_qualname}"] += 1

    sys.setprofile(count)
    try:
        y = x @ q
    finally:
        sys.setprofile(None)
    y.block_until_ready()
    return calls


# -- report ----------------------------------------------------------------------------------------------------------


def table(rows: list[Row]) -> str:
    head = f"{'':41} {'ours µs':>9} {'plain µs':>9} {'ratio':>6} {'quartiles':>12} {'target':>6}  verdict"
    lines = [
        f"{r.name:41} {r.ours_us:9.1f} {r.plain_us:9.1f} {r.ratio:6.2f} {r.ratio_q1:5.2f} - {r.ratio_q3:4.2f} "
        f"{'-' if r.target is None else f'{r.target:.1f}':>6}  {r.verdict}"
        for r in rows
    ]
    return "\n".join([head, *lines])


def report(rows: list[Row], rounds: dict[str, int]) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {
            "eformer": eformer.__version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "machine": platform.machine(),
        "backend": jax.default_backend(),
        "rounds": rounds,
        "rows": [{**dataclasses.asdict(row), "verdict": row.verdict} for row in rows],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a look, not a measurement")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures and the versions here")
    parser.add_argument("--functions", action="store_true", help="list the functions of eformer that a product calls")
    options = parser.parse_args()

    rounds = {"eager": 100, "warm": 200, "trace": 7} if options.quick else {"eager": 1000, "warm": 2000, "trace": 31}
    rng = np.random.default_rng(0)
    rows = [compare(case, rounds["eager"]) for case in eager_cases(rng, times=20)]
    rows += [compare(case, rounds["warm"]) for case in warm_cases(rng)]
    rows += [compare(case, rounds["trace"]) for case in trace_cases(rng)]

    print(f"eformer {eformer.__version__}, JAX {jax.__version__} on {jax.default_backend()}")
    print(table(rows))
    calls = functions_of_one_product()
    twice = sum(times > 1 for times in calls.values())
    print(
        f"one eager x @ q with NF4: {calls.total()} calls of {len(calls)} functions of eformer, {twice} more than once"
    )
    if options.functions:
        print("\n".join(f"{times:4} {name}" for name, times in calls.items()))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report(rows, rounds), indent=2) + "\n")


if __name__ == "__main__":
    main()
