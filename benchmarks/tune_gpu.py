"""Times every way to cut a product up for csrc/cuda/dot.cuh, next to the one the table of the GPU kernels chooses.

    python benchmarks/tune_gpu.py [--quick] [--json PATH]

Where the choice is far from the best, correct the costs of the generation in _kernels/cuda/tuning.py.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from _gpu import BLOCK, IN_BLOCKS, PER_BYTE, corner_of, microseconds, storage

from eformer._kernels import cuda, qmatmul
from eformer._kernels.cuda import tuning

SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192))  # K, N
ROWS = (1, 16, 32, 64)


def time_of(fmt: str, k: int, n: int, m: int, tiles: int, splits: int, count: int = 16) -> float:
    keys = jax.random.split(jax.random.key(0), count)
    stored = [storage(key, fmt, n, k) for key in keys]
    x = jax.random.normal(keys[0], (m, k), jnp.bfloat16)
    cuda.cut, cuda.is_skinny = (lambda *sizes: (tiles, splits)), (lambda *sizes: False)
    try:
        block = BLOCK if fmt in IN_BLOCKS else None
        program = jax.jit(
            lambda x, stored: corner_of([qmatmul(x, c, s, fmt=fmt, form="dot", cols=k, block=block) for c, s in stored])
        )
        jax.clear_caches()
        return microseconds(program, x, stored, calls=5, rounds=5) / count
    finally:
        cuda.cut, cuda.is_skinny = tuning.cut, tuning.is_skinny


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        print("no GPU: nothing to measure")
        return
    rows: list[dict[str, Any]] = []
    for fmt in ("nf4",) if options.quick else tuple(PER_BYTE):
        for k, n in SHAPES[:1] if options.quick else SHAPES:
            for m in ROWS[:1] if options.quick else ROWS:
                chosen = tuning.cut(fmt, 1, m, n, k)
                tried = {(t, s): time_of(fmt, k, n, m, t, s) for t in (1, 2, 4, 7, 8) for s in (1, 2, 4)}
                tried.setdefault(chosen, time_of(fmt, k, n, m, *chosen))
                best = min(tried, key=lambda cut: tried[cut])
                rows.append({"format": fmt, "k": k, "n": n, "m": m, "chosen": chosen, "us": tried[chosen],
                             "best": best, "best_us": tried[best]})  # fmt: skip
                print(f"{fmt} {k}x{n} M={m}: chosen {chosen} {tried[chosen]:.1f} us, best {best} {tried[best]:.1f} us")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
