"""Speed and extra memory of the codecs, as ratios to copying and scaling the array once.

    python benchmarks/codecs.py [--quick] [--json PATH]

Every figure is the best of several rounds in which all candidates take turns with the copy, so a busy machine slows
both alike.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from eformer._formats.int8 import codec as int8
from eformer._formats.nf4 import codec as nf4
from eformer._formats.onebit import codec as onebit

Case = tuple[str, Callable[..., Any], tuple[jax.Array, ...]]


def cases(w: jax.Array) -> list[Case]:
    """Name, function and arguments; the first is the copy all others are compared with."""
    found: list[Case] = [("copy and scale", lambda x: x * jnp.asarray(1.5, x.dtype), (w,))]
    for axis in (-1, -2):
        size = w.shape[axis]
        nf4_encode = functools.partial(nf4.encode, axis=axis, block_size=64)
        nf4_decode = functools.partial(nf4.decode, axis=axis, size=size, dtype=w.dtype)
        int8_encode = functools.partial(int8.encode, axes=axis)
        found += [
            (f"nf4 encode axis={axis}", nf4_encode, (w,)),
            (f"nf4 decode axis={axis}", nf4_decode, nf4_encode(w)),
            (f"int8 encode axis={axis}", int8_encode, (w,)),
            (f"int8 decode axis={axis}", functools.partial(int8.decode, dtype=w.dtype), int8_encode(w)),
        ]
        for kind, bits in onebit.BITS.items():
            encode = functools.partial(onebit.encode, kind=kind, axis=axis)
            decode = functools.partial(onebit.decode, axis=axis, bits=bits, size=size, dtype=w.dtype)
            found += [(f"{kind} encode axis={axis}", encode, (w,)), (f"{kind} decode axis={axis}", decode, encode(w))]
    return found


def measure(w: jax.Array, rounds: int) -> list[dict[str, Any]]:
    programs = []
    for name, function, arguments in cases(w):
        compiled = jax.jit(function).lower(*arguments).compile()
        jax.block_until_ready(compiled(*arguments))
        programs.append((name, compiled, arguments))
    best = {name: float("inf") for name, _, _ in programs}
    for _ in range(rounds):
        for name, compiled, arguments in programs:
            start = time.perf_counter()
            jax.block_until_ready(compiled(*arguments))
            best[name] = min(best[name], time.perf_counter() - start)
    copy = best[programs[0][0]]
    return [
        {
            "case": name,
            "shape": list(w.shape),
            "dtype": w.dtype.name,
            "ms": 1e3 * best[name],
            "ratio_to_copy": best[name] / copy,
            "temp_over_input": compiled.memory_analysis().temp_size_in_bytes / w.nbytes,
        }
        for name, compiled, _ in programs
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small array and few rounds")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    shapes = [((1024, 1024), "float32")]
    if not options.quick:
        shapes = [((4096, 4096), "float32"), ((4096, 4096), "bfloat16"), ((4090, 4100), "float32")]
    rows = []
    for shape, dtype in shapes:
        w = jax.random.normal(jax.random.key(0), shape, jnp.float32).astype(dtype)
        print(f"\n{shape[0]}×{shape[1]} {dtype}\n{'case':26} {'ms':>8} {'/ copy':>8} {'temp / input':>13}")
        for row in measure(w, rounds=3 if options.quick else 8):
            rows.append(row)
            print(f"{row['case']:26} {row['ms']:8.2f} {row['ratio_to_copy']:8.2f} {row['temp_over_input']:13.3f}")
    if options.json:
        options.json.write_text(
            json.dumps({"jax": jax.__version__, "platform": jax.default_backend(), "rows": rows}, indent=2)
        )


if __name__ == "__main__":
    main()
