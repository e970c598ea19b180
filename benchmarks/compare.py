"""Two trees of eformer, say before and after a change, on the same work: processor time, in turn, and their ratios.

    python benchmarks/compare.py OLD_TREE NEW_TREE [--rounds 5] [--only gpu] [--json PATH] [--markdown]

Each tree runs in processes of its own, old and new by turns, with the Python that runs this script. Native kernels are
those of `build/native` in each tree (csrc/README.md), or those that EFORMER_OLD_LIBRARY and EFORMER_NEW_LIBRARY name;
where a tree has none, both are measured on the tiled path only. Only names that both trees document are used.

The clock is the processor time of the process, all threads together, which other processes disturb least. With
`--only gpu`, which takes the libraries of `build/cuda`, it is time on the wall. A figure is the median over rounds; in
a round, the median over repetitions.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FORMATS = ("nf4", "int8", "ternary", "binary")
SIZE, ROWS = 4096, (1, 4, 16, 128)
GPU_SHAPES, GPU_ROWS = ((4096, 4096), (4096, 14336)), (1, 16, 64, 256)
LIBRARIES = {
    "cpu": Path("build/native/csrc/cpu/libeformer_cpu.so"),
    "cuda": Path("build/cuda/csrc/cuda/libeformer_cuda.so"),
}


# -- in a process of one tree ------------------------------------------------------------------------------------------


def microseconds(call: Callable[[], Any], *, times: int = 1, enough: float = 0.3) -> float:
    """Median processor time of one of `times` calls that `call` makes, once it is warm."""
    import jax

    jax.block_until_ready(call())
    found: list[float] = []
    while len(found) < 5 or (sum(found) < enough and len(found) < 100):
        start = time.process_time()
        jax.block_until_ready(call())
        found.append(time.process_time() - start)
    return statistics.median(found) / times * 1e6


def overhead() -> dict[str, float]:
    """Python around small programs: dispatch, tracing, transformations."""
    import jax
    import jax.numpy as jnp

    from eformer.jaximus import implicit
    from eformer.ops.quantization import quantize, quantize_tree

    x, w = jnp.ones((4, 64)), jnp.ones((64, 64))
    q = quantize(w, dtype="nf4")
    layers = [quantize(w * i, dtype="nf4") for i in range(1, 17)]

    def mlp(x: jax.Array, layers: Any) -> jax.Array:
        for layer in layers:
            x = jax.nn.relu(x @ layer)
        return x.sum()

    def traced(make: Callable[[Any], Any]) -> Callable[[], Any]:
        return lambda: jax.jit(make(lambda x, layers: mlp(x, layers))).trace(x, layers) and None

    def many(f: Callable[[], Any], times: int = 50) -> Callable[[], Any]:
        return lambda: [f() for _ in range(times)][-1]

    compiled = jax.jit(implicit(mlp))
    turn, cut, sine = map(implicit, (jnp.transpose, lambda q: q[:, :8], jnp.sin))
    found = {
        "eager x @ q": microseconds(many(lambda: x @ q), times=50),
        "eager q.T": microseconds(many(lambda: turn(q)), times=50),
        "eager q[:, :8]": microseconds(many(lambda: cut(q)), times=50),
        "eager sin(q), which makes q dense": microseconds(many(lambda: sine(q)), times=50),
        "flatten and unflatten": microseconds(many(lambda: jax.tree.map(lambda a: a, layers), 20), times=20),
        "call of a compiled model": microseconds(many(lambda: compiled(x, layers)), times=50),
        "trace of 16 layers": microseconds(traced(implicit)),
        "trace of their gradient": microseconds(traced(lambda f: jax.grad(implicit(f)))),
    }
    model = {f"layer{i}": {"kernel": jnp.ones((128, 128))} for i in range(8)}
    quantized = lambda: jax.tree.leaves(quantize_tree(model, min_size=0, donate=False))  # noqa: E731
    return {**found, "quantize_tree, 8 matrices": microseconds(quantized)}


def products(rows: tuple[int, ...]) -> dict[str, float]:
    """x @ w for a square w, packed along its inputs (dot) or outputs (axpy)."""
    import jax
    import numpy as np

    from eformer.jaximus import implicit
    from eformer.ops.quantization import quantize

    rng, found = np.random.default_rng(0), {}
    w = jax.numpy.asarray(rng.standard_normal((SIZE, SIZE), dtype=np.float32))
    for fmt in FORMATS:
        for form, axis in (("dot", 0), ("axpy", 1)):
            q = quantize(w, dtype=fmt, axis=axis)
            product = jax.jit(implicit(lambda x, q: x @ q))
            for m in rows:
                x = jax.numpy.asarray(rng.standard_normal((m, SIZE), dtype=np.float32))
                found[f"{fmt}, {form}, M={m}"] = microseconds(lambda p=product, x=x, q=q: p(x, q))
    return found


def codecs() -> dict[str, float]:
    """Quantizing and decoding a 2048 x 2048 matrix."""
    import jax

    from eformer.ops.quantization import quantize

    w, found = jax.random.normal(jax.random.key(0), (2048, 2048)), {}
    for fmt in FORMATS:
        encode = jax.jit(lambda w, fmt=fmt: quantize(w, dtype=fmt))
        decode = jax.jit(lambda q: q.materialize())
        q = encode(w)
        found[f"{fmt}, quantize"] = microseconds(lambda f=encode: f(w))
        found[f"{fmt}, decode"] = microseconds(lambda f=decode, q=q: f(q))
    return found


def gpu_products() -> dict[str, float]:
    """bfloat16 x @ w on a GPU, over so many matrices in one program that none comes from its cache."""
    import jax
    import jax.numpy as jnp
    from _gpu import corner_of
    from _gpu import microseconds as on_the_wall

    from eformer.jaximus import implicit
    from eformer.ops.quantization import quantize

    found = {}
    for k, n in GPU_SHAPES:
        dense = [jax.random.normal(jax.random.key(i), (k, n), jnp.bfloat16) for i in range(40 if n == k else 20)]
        for form, axis in (("dot", 0), ("axpy", 1)):
            kinds = {fmt: [quantize(w, dtype=fmt, axis=axis) for w in dense] for fmt in FORMATS}
            for fmt, ws in {"dense": dense, **kinds}.items():
                for m in GPU_ROWS:
                    x = jax.random.normal(jax.random.key(m), (m, k), jnp.bfloat16)
                    call = jax.jit(implicit(lambda x, ws: corner_of([x @ w for w in ws])))
                    found[f"{k}x{n}, {fmt}, {form}, M={m}"] = on_the_wall(call, x, ws, calls=5, rounds=5) / len(ws)
    return found


KINDS: dict[str, Callable[[], dict[str, float]]] = {
    "overhead": overhead,
    "products": lambda: products(ROWS),
    "tiled": lambda: products(ROWS[:1]),
    "codecs": codecs,
    "gpu": gpu_products,
}


# -- both trees --------------------------------------------------------------------------------------------------------


def backend(kind: str) -> str:
    return "cuda" if kind == "gpu" else "cpu"


def measured(kind: str, tree: Path, library: Path | None) -> dict[str, float]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "JAX_PLATFORMS": backend(kind),
        "EFORMER_MATERIALIZE": "allow",
    }
    environment["EFORMER_KERNELS"] = "0" if kind == "tiled" or library is None else "1"
    if library is not None:
        environment[f"EFORMER_{backend(kind).upper()}_LIBRARY"] = str(library)
    command = [sys.executable, __file__, "--measure", kind]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compared(trees: dict[str, tuple[Path, Path | None]], kinds: list[str], rounds: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for kind in kinds:
        figures: dict[str, dict[str, list[float]]] = {name: {} for name in trees}
        for turn in range(rounds):
            for name in list(trees)[:: 1 if turn % 2 else -1]:
                for case, value in measured(kind, *trees[name]).items():
                    figures[name].setdefault(case, []).append(value)
        for case in figures["old"]:
            old, new = (statistics.median(figures[name][case]) for name in ("old", "new"))
            rows.append({"kind": kind, "case": case, "old_us": old, "new_us": new, "ratio": new / old})
            print(f"{kind:9} {case:28} {old:12.1f} {new:12.1f} {new / old:6.2f}", file=sys.stderr, flush=True)
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = ["| what | case | before, µs | after, µs | ratio |", "|---|---|---:|---:|---:|"]
    figures = "| {kind} | {case} | {old_us:,.1f} | {new_us:,.1f} | {ratio:.2f} |"
    return "\n".join([*lines, *(figures.format(**row) for row in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trees", type=Path, nargs="*", metavar="TREE", help="the old one and the new one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=tuple(KINDS), nargs="+", default=[kind for kind in KINDS if kind != "gpu"])
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--markdown", action="store_true", help="print a table for a page")
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--measure", choices=tuple(KINDS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(KINDS[options.measure]()))
        return
    if len(options.trees) != 2:
        print("nothing to compare: give two trees, OLD_TREE NEW_TREE")
        return
    if len(backends := {backend(kind) for kind in options.only}) != 1:
        parser.error("--only gpu cannot be combined with other kinds: they take other libraries")
    trees: dict[str, tuple[Path, Path | None]] = {}
    for name, tree in zip(("old", "new"), options.trees, strict=True):
        library = Path(os.environ.get(f"EFORMER_{name.upper()}_LIBRARY") or tree / LIBRARIES[min(backends)]).resolve()
        trees[name] = (tree.resolve(), library if library.exists() else None)
    if any(library is None for _, library in trees.values()):
        trees = {name: (tree, None) for name, (tree, _) in trees.items()}
    rows = compared(trees, options.only, 1 if options.quick else options.rounds)
    if options.markdown:
        print(markdown(rows))
    if options.json:
        native = trees["new"][1] is not None
        options.json.write_text(json.dumps({"native": native, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
