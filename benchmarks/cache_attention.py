"""Attention of one new token per text over a long cache: dense bfloat16 against INT8 and INT4.

    python benchmarks/cache_attention.py [--quick] [--json PATH] [--positions 8192] [--batch 8] [--rounds N] [--chain N]

The program is two einsums and a softmax. "heads" caches are (batch, heads, positions, size), "positions" caches
(batch, positions, heads, size). Temporaries are those of the compiled program. On a GPU the products are measured as
they are chosen there and without the library of kernels ("xla").

With --chain it is the operation that decode steps of `eformer.models` use, so many times in a row, each over a "heads"
cache of its own; times are those of one.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from _gpu import microseconds
from _timing import interleaved, write_json

import eformer as ef
from eformer._kernels.attention import attend as attend_at_once

LAYOUTS = {"heads": "bksd", "positions": "bskd"}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the cache, and how many queries share a head of it."""

    batch: int
    positions: int
    heads: int = 8
    group: int = 4
    size: int = 128


def attend(axes: str, q: Any, keys: Any, values: Any) -> Any:
    scores = jnp.einsum(f"bkgd,{axes}->bkgs", q, keys.astype(q.dtype)).astype(jnp.float32) * q.shape[-1] ** -0.5
    odds = jax.nn.softmax(scores).astype(q.dtype)
    return jnp.einsum(f"bkgs,{axes}->bkgd", odds, values.astype(q.dtype))


def caches(sizes: Sizes, layout: str, kinds: list[str], seed: int = 0) -> dict[str, Any]:
    """Keys and values of random numbers, the same in every format ("int8+int4": keys and values)."""
    lengths = {"b": sizes.batch, "k": sizes.heads, "s": sizes.positions, "d": sizes.size}
    shape = [lengths[axis] for axis in LAYOUTS[layout]]
    both = [jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(jax.random.key(seed))]
    found: dict[str, Any] = {}
    for kind in kinds:
        name, _, how = kind.partition(" ")
        formats = (name.split("+") * 2)[:2]
        made = both if name == "bf16" else list(map(ef.QuantizedCache.quantize, both, formats))
        found[kind] = [part.replaced(use_kernel=False) for part in made] if how == "xla" else made
    return found


def measure_chain(sizes: Sizes, kinds: list[str], length: int, rounds: int) -> list[dict[str, Any]]:
    q = jax.random.normal(jax.random.key(1), (sizes.batch, sizes.heads, sizes.group, sizes.size), jnp.bfloat16)

    @jax.jit
    @ef.implicit
    def run(q: Any, layers: Any) -> Any:
        for keys, values in layers:
            q = attend_at_once(q, keys, values, sizes.positions - 1, factor=sizes.size**-0.5)
        return q

    rows = []
    for kind in kinds:
        layers = [caches(sizes, "heads", [kind], seed)[kind] for seed in range(length)]
        rows.append({"cache": kind, "us": microseconds(run, q, layers, rounds=rounds) / length})
        print(f"{kind:9} {rows[-1]['us']:9.1f} us")
    return rows


def measure(sizes: Sizes, layout: str, dtype: Any, kinds: list[str], rounds: int) -> list[dict[str, Any]]:
    q = jax.random.normal(jax.random.key(1), (sizes.batch, sizes.heads, sizes.group, sizes.size), dtype)
    calls, temporaries, held, results = {}, {}, {}, {}
    for kind, both in caches(sizes, layout, kinds).items():
        run = jax.jit(ef.implicit(lambda *operands: attend(LAYOUTS[layout], *operands)))
        calls[kind] = run, (q, *both)
        held[kind] = sum(part.nbytes for part in both)
        temporaries[kind] = run.lower(q, *both).compile().memory_analysis().temp_size_in_bytes
        results[kind] = run(q, *both).astype(jnp.float32)
    if jax.default_backend() == "gpu":
        seconds = {kind: microseconds(run, *operands) / 1e6 for kind, (run, operands) in calls.items()}
    else:
        seconds = interleaved(calls, rounds)
    exact, dense = results[kinds[0]], seconds[kinds[0]]
    return [
        {
            "layout": layout,
            "x": jnp.dtype(dtype).name,
            "cache": kind,
            "ms": 1e3 * seconds[kind],
            "ratio": seconds[kind] / dense,
            "cache_mb": held[kind] / 1e6,
            "temporary_mb": temporaries[kind] / 1e6,
            "error": float(jnp.linalg.norm(results[kind] - exact) / jnp.linalg.norm(exact)),
        }
        for kind in calls
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--positions", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--chain", type=int, metavar="N")
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layouts", choices=LAYOUTS, nargs="*", default=tuple(LAYOUTS))
    parser.add_argument("--dtypes", choices=("float32", "bfloat16"), nargs="*")
    options = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    lengths = (2, 256) if options.quick else (options.batch, options.positions)
    sizes = Sizes(*lengths, options.heads, options.group)
    kinds = ["bf16", "int8", "int4", *(["int8 xla", "int4 xla"] if on_gpu else [])]
    about = {"device": jax.devices()[0].device_kind, "sizes": dataclasses.asdict(sizes)}
    print(f"{about['device']}: {sizes}")
    rounds = 2 if options.quick else options.rounds
    if options.chain:
        kinds.insert(2, "int8+int4")
        write_json(options.json, **about, chain=options.chain, rows=measure_chain(sizes, kinds, options.chain, rounds))
        return
    rows = []
    for dtype in options.dtypes or (["bfloat16"] if on_gpu else ["float32", "bfloat16"]):
        for layout in options.layouts:
            for row in measure(sizes, layout, jnp.dtype(dtype), kinds, rounds):
                rows.append(row)
                print(
                    f"{row['layout']:10} {row['x']:9} {row['cache']:9} {row['ms']:9.3f} ms {row['ratio']:5.2f} of bf16 "
                    f"{row['cache_mb']:8.1f} MB, temporary {row['temporary_mb']:8.1f} MB, error {row['error']:.4f}"
                )
    write_json(options.json, **about, rows=rows)


if __name__ == "__main__":
    main()
