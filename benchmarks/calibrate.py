"""What calibration costs beside the forward passes it runs, on the demo's character model.

    python benchmarks/calibrate.py [--quick] [--json PATH]

Times are of processor time per batch, once everything is compiled: the difference between a run on many batches and one
on few. A figure is the median over rounds of calibration / forward passes, both taken in every round.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import eformer as ef
from eformer.models import forward

sys.path.insert(0, str(Path(__file__).parents[1]))
from demo.char import CONFIG, LENGTH, load_params

MANY = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    figures = measure(rounds=2 if options.quick else 5)
    for name, value in figures.items():
        print(f"{name:<32}{value:8.2f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


def measure(rounds: int) -> dict[str, float]:
    params, call = load_params(), functools.partial(forward, CONFIG)
    rng = np.random.default_rng(0)
    batches = [rng.integers(0, CONFIG.vocabulary, (8, LENGTH)).astype("int32") for _ in range(MANY)]
    dense = jax.jit(call)
    runs: dict[str, Callable[[list[Any]], Any]] = {
        "forward": lambda xs: [jax.block_until_ready(dense(params, x)) for x in xs],
        "diagonal": lambda xs: ef.calibrate(call, params, xs, diagonal_only=True),
        "whole": lambda xs: ef.calibrate(call, params, xs),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            few, many = (_seconds(run, batches[:count]) for count in (1, MANY))
            seconds[name].append((many - few) / (MANY - 1))
    ratios = {
        name: statistics.median(a / b for a, b in zip(seconds[name][1:], seconds["forward"][1:], strict=True))
        for name in ("diagonal", "whole")
    }
    per_batch = {f"{name}, ms per batch": 1e3 * statistics.median(seconds[name][1:]) for name in runs}
    return {**per_batch, **{f"{name} / forward": ratio for name, ratio in ratios.items()}}


def _seconds(run: Callable[[list[Any]], Any], batches: list[Any]) -> float:
    start = time.process_time()
    run(batches)
    return time.process_time() - start


if __name__ == "__main__":
    main()
