"""Products on the CPU: native kernels and the tiled path, as ratios to XLA's dense float32 product of the same run.

    python benchmarks/cpu_matmul.py [--quick] [--json PATH] [--plot PATH] [--isa avx2|avx512|...] [--activations int8]
    python benchmarks/cpu_matmul.py --read PATH ... --plot PATH

All candidates take turns, round after round; figures are ratios of medians, below 1 is faster than dense float32. With
`--rivals` the products of PyTorch and bitsandbytes take part too. Then one decode step of a small LLaMA-shaped model.
A long run can be cut into pieces and joined with `--read`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _llama import Shape, decode_step, make_cache, make_params
from _rivals import rivals
from _timing import FORMATS, MORE, Call, interleaved, random_offset, random_storage, write_json

from eformer import implicit
from eformer._kernels import cpu, qmatmul
from eformer._kernels.cpu import ISAS
from eformer._kernels.parameters import product_problem
from eformer.ops.quantization import quantize

SIZES = ("4096x4096", "4096x14336", "14336x4096")
ROWS_OF_X = (1, 2, 4, 8, 16, 32, 64, 128, 512)
# (format, M) -> the ratio not to exceed: 4096 x 4096, float32 activations, AVX-512, two threads, dot form. The axpy
# form may take AXPY times as long.
LIMITS = {
    (fmt, m): limit
    for fmt, limits in {
        "nf4": (0.17, 0.24, 0.60, 0.95),
        "int8": (0.24, 0.24, 0.55, 0.95),
        "ternary": (0.13, 0.24, 0.58, 0.95),
        "binary": (0.08, 0.16, 0.38, 0.65),
    }.items()
    for m, limit in zip((1, 4, 16, 128), limits, strict=True)
}
AXPY = 1.4
BFLOAT16_LIMITS = {(fmt, 128): 0.6 for fmt in FORMATS}
AVX2_LIMITS = {("nf4", 1): 0.45, ("nf4", 16): 1.0}
# With int8 activations; those of INT8 are for machines with AMX.
BYTE_LIMITS = {
    (fmt, m): limit
    for fmt, limits in {
        "int8": (0.20, 0.17, 0.12, 0.12, 0.12),
        "nf4": (0.15, 0.13, 0.15, 0.20),
        "int4": (0.15, 0.13, 0.15, 0.20),
        "ternary": (0.09, None, None, 0.15),
        "binary": (0.09, None, None, 0.15),
    }.items()
    for m, limit in zip((1, 4, 16, 128, 512), limits, strict=False)
}
VNNI_LIMITS = {case: limit for case, limit in BYTE_LIMITS.items() if case[0] != "int8"} | {("int8", 128): 0.30}


def product(fmt: str, form: str, cols: int, preference: str, activations: str | None) -> Any:
    options: Any = {"fmt": fmt, "form": form, "cols": cols, "preference": preference, "activations": activations}
    return jax.jit(lambda x, codes, scale, offset=None: qmatmul(x, codes, scale, offset=offset, **options))


def forced(fmt: str, form: str, cols: int, isa: int, activations: str | None, threads: int | None) -> Any:
    """The kernel of one instruction set, perhaps on one thread."""

    def run(x: jax.Array, codes: jax.Array, scale: jax.Array, offset: Any = None) -> jax.Array:
        options: Any = {"fmt": fmt, "form": form, "cols": cols, "activations": activations}
        problem = product_problem(x, codes, scale, "cpu", offset=offset, **options)
        how = {"isa": isa, "threads": threads, **({} if offset is None else {"offset": offset})}
        return (cpu.byte_matmul if activations else cpu.qmatmul)(problem, x, codes, scale, **how)

    return jax.jit(run)


def formats_of(options: argparse.Namespace, form: str) -> list[str]:
    """With activations those for which there are kernels."""
    bits = ("int2", "int3", "int4", "int5", "int6", "int8_block", "nf4", "fp4", "ternary", "binary")
    have = ("int8",) if form == "axpy" else ("int8", *bits)
    return [fmt for fmt in options.formats if options.activations is None or fmt in have]


def candidates(options: argparse.Namespace, k: int, n: int, m: int, form: str, dtype: str) -> dict[str, Call]:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((m, k), dtype=np.float32))
    dense = jnp.asarray(rng.standard_normal((k, n), dtype=np.float32))
    rows, cols = (n, k) if form == "dot" else (k, n)
    matmul = jax.jit(jnp.matmul)
    calls: dict[str, Call] = {"dense f32": (matmul, (x, dense))}
    if not options.no_bf16:
        calls["dense bf16"] = (matmul, (x.astype(jnp.bfloat16), dense.astype(jnp.bfloat16)))
    for fmt in formats_of(options, form):
        what, a = (fmt, form, cols), options.activations
        codes, scale = random_storage(rng, fmt, rows, cols)
        scale = scale.reshape(1, -1)[:, :cols] if a and form == "axpy" else scale  # one for every sum
        one = 1 if options.processor_time else None
        isa = -1 if options.isa is None and one else options.isa
        native = product(*what, "native", a) if isa is None else forced(*what, isa, a, one)
        calls[f"{fmt} native"] = (native, (x.astype(dtype), codes, scale))
        if not options.no_tiled:
            calls[f"{fmt} tiled"] = (product(*what, "xla", a), (x.astype(dtype), codes, scale))
        for kind in options.offsets if fmt.startswith("int") and fmt != "int8" and not a else ():
            offset = random_offset(rng, fmt, kind, scale.shape)
            calls[f"{fmt} with {kind}"] = (native, (x.astype(dtype), codes, scale, offset))
    for fmt in options.arrays if form == "dot" and not options.activations else ():
        w = quantize(jnp.asarray(rng.standard_normal((n, k), dtype=np.float32)), dtype=fmt, axis=-1)
        # Not `x @ w.T`: one byte a value, the codes would be turned in every call.
        calls[f"array {fmt}"] = (jax.jit(implicit(lambda x, w: jnp.einsum("mk,nk->mn", x, w))), (x.astype(dtype), w))
    if options.rivals:
        threads = 1 if options.processor_time else os.cpu_count() or 1
        calls |= {name: (thunk, ()) for name, thunk in rivals(rng, k, n, m, dtype, threads).items()}
    return calls


def measure(options: argparse.Namespace, size: str, m: int, form: str, dtype: str) -> dict[str, Any]:
    k, n = map(int, size.split("x"))
    clock = time.process_time if options.processor_time else time.perf_counter
    calls, load = candidates(options, k, n, m, form, dtype), os.getloadavg()[0]
    seconds = interleaved(calls, options.rounds, at_most=options.seconds, clock=clock)
    dense = seconds["dense f32"]
    ratios = {name: value / dense for name, value in seconds.items()}
    facts = {"k": k, "n": n, "m": m, "form": form, "dtype": dtype, "isa": ISAS.get(options.isa)}
    if options.activations:
        facts["activations"] = options.activations
    if options.processor_time:
        facts["clock"] = "processor time, native kernels on one thread"
    return {**facts, "load_before": load, "dense_ms": 1e3 * dense, "ratios": ratios}


def limit_of(result: dict[str, Any], fmt: str) -> float | None:
    if (result["k"], result["n"]) != (4096, 4096):
        return None
    case = fmt, result["m"]
    if result.get("activations"):
        with_amx = (result.get("isa") or cpu.isa_name()) == "amx"
        return (BYTE_LIMITS if with_amx else VNNI_LIMITS).get(case)
    if result.get("isa") is not None:
        return AVX2_LIMITS.get(case) if (result["isa"], result["form"]) == ("avx2", "dot") else None
    if result["dtype"] == "bfloat16":
        return BFLOAT16_LIMITS.get(case)
    return LIMITS[case] * (AXPY if result["form"] == "axpy" else 1) if case in LIMITS else None


def verdict(result: dict[str, Any], name: str) -> str:
    """Is a native product within its limit, and no slower than the tiled path?"""
    fmt, _, path = name.partition(" ")
    if path != "native":
        return ""
    ratio, tiled, limit = result["ratios"][name], result["ratios"].get(f"{fmt} tiled"), limit_of(result, fmt)
    words = [] if limit is None else [f"<= {limit:.2f} {'ok' if ratio <= limit else 'OVER'}"]
    return " ".join([*words, *(["SLOWER THAN TILED"] if tiled is not None and ratio > tiled else [])])


def table(results: list[dict[str, Any]]) -> str:
    """One Markdown table per size, form and dtype: a line per candidate, a column per M."""
    lines: list[str] = []
    key = lambda r: (r["k"], r["n"], r["form"], r["dtype"], r.get("activations"), r.get("isa"))  # noqa: E731
    for (k, n, form, dtype, activations, isa), group in itertools.groupby(results, key):
        runs = list(group)
        x = f"{dtype} x{f' rounded to {activations}' if activations else ''}{', ' + isa if isa else ''}"
        lines += [f"\n{k} x {n}, {form} form, {x}: time / dense f32\n"]
        lines += ["| | " + " | ".join(f"M={r['m']}" for r in runs) + " |", "|---" * (len(runs) + 1) + "|"]
        for name in runs[0]["ratios"]:
            cells = [f"{r['ratios'][name]:.2f}" if name != "dense f32" else f"{r['dense_ms']:.1f} ms" for r in runs]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# What `quantize` calls the formats that kernels call otherwise.
QUANTIZE: dict[str, dict[str, Any]] = {
    "fp4": {"dtype": "mxfp4"},
    "int8_block": {"dtype": "int8", "block_size": 64},
    "fp8_e4m3": {"dtype": "fp8"},
    "fp8_e4m3_block": {"dtype": "mxfp8"},
}


def decode(formats: tuple[str, ...], rounds: int, tokens: int = 8) -> dict[str, float]:
    """Tokens per second: every kind of weights makes `tokens` of them, one after another as in use, then the next."""
    shape = Shape()
    kinds: dict[str, tuple[Any, Any]] = {
        "f32": (lambda w: w, jnp.float32),
        "bf16": (lambda w: w.astype(jnp.bfloat16), jnp.bfloat16),
        **{fmt: (functools.partial(quantize, **QUANTIZE.get(fmt, {"dtype": fmt})), jnp.float32) for fmt in formats},
    }
    step = jax.jit(functools.partial(decode_step, shape), donate_argnums=1)

    def generate(params: Any, dtype: Any) -> Any:
        token, cache = jnp.asarray(7), make_cache(shape, dtype)
        for position in range(tokens):
            token, cache = step(params, cache, token, jnp.asarray(100 + position))
        return token

    calls: dict[str, Call] = {
        name: (functools.partial(generate, dtype=dtype), (make_params(shape, convert, dtype),))
        for name, (convert, dtype) in kinds.items()
    }
    return {name: tokens / seconds for name, seconds in interleaved(calls, rounds).items()}


def style(name: str) -> dict[str, Any]:
    """Formats have a colour each, solid when native and dotted when tiled; what they are compared with is grey."""
    fmt, _, path = name.partition(" ")
    if fmt in (*FORMATS, *MORE):
        return {
            "color": f"C{(*FORMATS, *MORE).index(fmt)}",
            "ls": "-" if path == "native" else ":",
            "marker": "o",
            "ms": 3,
        }
    others = ("dense f32", "dense bf16", "torch int8pack", "torch int4pack", "bitsandbytes nf4")
    place = others.index(name) if name in others else 0
    return {"color": str(0.15 * place), "ls": ("-", "--", "-.", (0, (1, 1)), (0, (5, 1)))[place], "lw": 1}


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Ratio over M for the first size, form and dtype measured; needs matplotlib (the extra `plot`)."""
    import matplotlib.pyplot as plt

    first = results[0]
    same = [r for r in results if all(r[f] == first[f] for f in ("k", "n", "form", "dtype", "isa"))]
    figure, axes = plt.subplots(figsize=(8, 4))
    for name in first["ratios"]:
        axes.plot([r["m"] for r in same], [r["ratios"][name] for r in same], label=name, **style(name))
    axes.set(xscale="log", yscale="log", xlabel="rows of x", ylabel="time / dense float32 (lower is faster)")
    axes.set_xticks([r["m"] for r in same], [str(r["m"]) for r in same])
    ticks = [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_title(f"{first['k']} x {first['n']}, {first['dtype']} activations")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    # Text stays text, and the same results give the same file.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "eformer"})
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else None)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one size, four M, float32, fewer rounds")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results to this file")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw the first table (needs matplotlib)")
    parser.add_argument("--read", type=Path, nargs="+", metavar="PATH", help="results of earlier runs: measure nothing")
    parser.add_argument("--sizes", nargs="+", metavar="KxN")
    parser.add_argument("--m", type=int, nargs="+")
    parser.add_argument("--forms", nargs="+", choices=("dot", "axpy"))
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), help="of the activations")
    parser.add_argument("--formats", nargs="+", choices=(*FORMATS, *MORE), default=(*FORMATS, *MORE))
    parser.add_argument("--arrays", nargs="*", default=(), help="of `quantize`: time all of a product")
    parser.add_argument(
        "--offsets", nargs="*", choices=("zeros", "biases"), default=("zeros",), help="of integers in blocks"
    )
    parser.add_argument("--isa", choices=[name for name in ISAS.values() if name != "none"], help="force one")
    parser.add_argument("--activations", choices=("int8",), help="round x; formats and forms with such kernels only")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, default=10.0, help="stop the rounds of one table cell after these")
    parser.add_argument(
        "--processor-time", action="store_true", help="of one thread, where the machine does other things meanwhile"
    )
    parser.add_argument("--no-decode", action="store_true", help="leave out the decode step")
    parser.add_argument("--no-tiled", action="store_true", help="leave out the tiled path")
    parser.add_argument("--no-bf16", action="store_true", help="leave out the dense bf16 product")
    parser.add_argument("--rivals", action="store_true", help="time other libraries that are installed, too")
    options = parser.parse_args()
    options.sizes = options.sizes or (SIZES[:1] if options.quick else SIZES)
    options.m = options.m or ((1, 4, 16, 128) if options.quick else ROWS_OF_X)
    options.forms = options.forms or (("dot",) if options.quick else ("dot", "axpy"))
    options.dtypes = options.dtypes or (("float32",) if options.quick else ("float32", "bfloat16"))
    options.rounds = options.rounds or (7 if options.quick else 21)
    options.no_decode |= options.activations is not None
    options.isa = next((number for number, name in ISAS.items() if name == options.isa), None)
    return options


def measured(options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, float]]:
    results: list[dict[str, Any]] = []
    for size, form, dtype in itertools.product(options.sizes, options.forms, options.dtypes):
        for m in options.m:
            results.append(measure(options, size, m, form, dtype))
            for name in results[-1]["ratios"]:
                line = f"{size:>11} {form:>4} {dtype:>8} M={m:<4} {name:<16} {results[-1]['ratios'][name]:6.3f}"
                print(line, verdict(results[-1], name), flush=True)
    return results, {} if options.no_decode else decode(tuple(options.formats), 3 if options.quick else 9)


def read(paths: list[Path]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Earlier results, joined: of two for one case the later file's counts."""
    runs = [json.loads(path.read_text()) for path in paths]
    key = lambda r: tuple(r.get(name) for name in ("k", "n", "form", "dtype", "activations", "isa", "m"))  # noqa: E731
    results = {key(r): r for run in runs for r in run["results"]}
    tokens = [run["tokens_per_second"] for run in runs if run["tokens_per_second"]]
    return list(results.values()), tokens[-1] if tokens else {}


def main() -> None:
    options = arguments()
    results, tokens = read(options.read) if options.read else measured(options)
    print(table(results))
    for name, rate in tokens.items():
        print(f"decode step, 8 layers of width 1024, {name:<8} {rate:7.1f} tokens/s  {rate / tokens['f32']:5.2f} x f32")
    write_json(options.json, results=results, tokens_per_second=tokens)
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
