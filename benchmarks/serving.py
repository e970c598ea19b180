"""Prefill and decoding of a model shaped like LLaMA 8B with random weights: dense against quantized ones.

    python benchmarks/serving.py [--quick] [--json PATH] [--layers 32] [--batch 1 8 32] [--context 1024]
        [--prompts 1x512 4x1024] [--variants NAME ...] [--scanned | --both] [--fused] [--headless] [--embedding]
        [--seconds N] [--small] [--dtype D] [--commit C]

A decode step is one token per text at the last place of the context, head included unless --headless; prefill reads
whole prompts and makes logits of their last tokens. The embedding is dense, or with --embedding in the format of the
weights, too. Layers are a list, with --scanned one stack, or with --both either. --small (the
default without a GPU) is a model of 4 layers and a quarter of the width. Computed and dense in bfloat16 on a GPU, else
in float32, which XLA multiplies faster on CPUs. Ratios are to the first variant, dense weights and a dense cache, in
the same run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import os
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from _timing import write_json

import eformer as ef
from eformer.models import Config, fuse, make_cache
from eformer.models._decoder import logits_of, states

LARGE = Config(vocabulary=128256, width=4096, layers=32, heads=32, kv_heads=8, hidden=14336, rope_base=5e5)
SMALL = Config(vocabulary=8192, width=1024, layers=4, heads=8, kv_heads=2, hidden=3584, rope_base=5e5)
TINY = Config(vocabulary=64, width=64, layers=2, heads=4, kv_heads=2, hidden=128)
# name -> what `quantize` takes for the weights (None: dense), and the format of the cache
VARIANTS: dict[str, tuple[dict[str, Any] | None, str | None]] = {
    "dense": (None, None),
    "dense, int8 cache": (None, "int8"),
    "nf4": ({"dtype": "nf4"}, None),
    "nf4, int8 cache": ({"dtype": "nf4"}, "int8"),
    "nf4, int4 cache": ({"dtype": "nf4"}, "int4"),
    "int8, int8 cache": ({"dtype": "int8", "axis": 0}, "int8"),
    "int8 x int8, int8 cache": ({"dtype": "int8", "axis": 0, "activations": "int8"}, "int8"),
    "fp8 x fp8, int8 cache": ({"dtype": "fp8", "axis": 0, "activations": "fp8"}, "int8"),
}


@functools.partial(jax.jit, static_argnums=(1, 2))
def random(key: jax.Array, shape: tuple[int, int], dtype: Any) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(shape[0] ** -0.5, dtype)


def make_params(config: Config, weights: dict[str, Any] | None, dtype: Any, *, head: bool, embedding: bool) -> Any:
    """Matrix by matrix: what is dense is dropped before the next is made."""
    inner, kv = config.heads * config.head_size, config.kv_heads * config.head_size
    sizes = {"q": (config.width, inner), "k": (config.width, kv), "v": (config.width, kv), "o": (inner, config.width)}
    sizes |= dict.fromkeys(("gate", "up"), (config.width, config.hidden)) | {"down": (config.hidden, config.width)}
    keys = iter(jax.random.split(jax.random.key(0), len(sizes) * config.layers + 2))

    def matrix(shape: tuple[int, int]) -> Any:
        w = random(next(keys), shape, dtype)
        return w if weights is None else jax.block_until_ready(ef.quantize(w, **weights))

    ones = jnp.ones(config.width, dtype)
    norms = {"norm_attention": ones, "norm_mlp": ones}
    layers = [{**{name: matrix(shape) for name, shape in sizes.items()}, **norms} for _ in range(config.layers)]
    table = random(next(keys), (config.vocabulary, config.width), dtype)
    if embedding and weights is not None:  # rows are looked up: blocks, or scales, are those of rows
        table = jax.block_until_ready(ef.quantize(table, dtype=weights["dtype"], axis=-1))
    last = {"head": matrix((config.width, config.vocabulary))} if head else {}
    return {"embedding": table, "layers": layers, "norm": ones, **last}


def stacked(params: Any) -> Any:
    """The layers as one stack: of the parts of quantized arrays, too."""
    return {**params, "layers": jax.tree.map(lambda *parts: jnp.stack(parts), *params["layers"])}


def run(config: Config, params: Any, tokens: jax.Array, cache: Any, start: jax.Array) -> tuple[jax.Array, Any]:
    """The likeliest token after the last one of every text, or what the head would make it of; and the cache."""
    x, cache = states(config, params, tokens, cache, start)
    if "head" not in params:
        return x[:, -1], cache
    return jnp.argmax(logits_of(config, params, x[:, -1]), axis=-1), cache


class Job(NamedTuple):
    """So many texts: a decode step at the end of the context (`prompt` is 0), or the prefill of prompts."""

    batch: int
    prompt: int
    context: int

    def __str__(self) -> str:
        return f"prefill {self.batch}x{self.prompt}" if self.prompt else f"decode batch {self.batch}"


class Variant(NamedTuple):
    """Weights and cache, by the name they have above, and whether the layers are a stack that is scanned."""

    name: str
    scanned: bool

    def cache(self, config: Config, job: Job, dtype: Any) -> Any:
        how = {"format": VARIANTS[self.name][1], "listed": not self.scanned}
        return make_cache(config, job.batch, job.context, dtype, **how)


class Program:
    """A compiled step. It takes plain arrays: taking quantized ones apart for every call is not measured."""

    def __init__(self, config: Config, params: Any, cache: Any, job: Job):
        tokens = jax.random.randint(jax.random.key(1), (job.batch, job.prompt or 1), 0, config.vocabulary)
        start = jnp.asarray(0 if job.prompt else job.context - 1)
        self.given, tree = jax.tree.flatten((params, tokens, start))
        self.cache, cache_tree = jax.tree.flatten(cache)

        def step(given: Any, held: Any) -> tuple[jax.Array, Any]:
            params, tokens, start = jax.tree.unflatten(tree, given)
            token, cache = run(config, params, tokens, jax.tree.unflatten(cache_tree, held), start)
            return token, jax.tree.leaves(cache)

        self.call = jax.jit(step, donate_argnums=1).lower(self.given, self.cache).compile()

    def seconds(self, calls: int) -> float:
        begun, token = time.perf_counter(), None
        for _ in range(calls):
            token, self.cache = self.call(self.given, self.cache)
        jax.block_until_ready((token, self.cache))
        return (time.perf_counter() - begun) / calls


def compile_all(config: Config, models: dict[Variant, Any], jobs: list[Job]) -> dict[Any, Program]:
    """The programs of all variants and jobs, several at a time."""

    def one(which: tuple[Variant, Job]) -> Program:
        variant, job = which
        params = models[variant]
        return Program(config, params, variant.cache(config, job, params["norm"].dtype), job)

    all_of_them = list(itertools.product(models, jobs))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        return dict(zip(all_of_them, threads.map(one, all_of_them), strict=True))


def measure(models: dict[Variant, Any], programs: dict[Any, Program], job: Job, quick: bool) -> list[dict[str, Any]]:
    """A row for every variant, all timed once per round: a busy machine slows all of them alike."""
    held = {name: sum(leaf.nbytes for leaf in programs[name, job].cache) for name in models}
    calls, rounds = (1, 1) if quick else (2 if job.prompt else 10, 5)
    times: dict[Variant, list[float]] = {name: [] for name in models}
    for number in range(rounds + 1):  # the first warms up
        for name in models:
            seconds = programs[name, job].seconds(calls)
            if number:
                times[name].append(seconds)
    took = {name: statistics.median(values) for name, values in times.items()}
    return [
        {
            "variant": name.name,
            "what": str(job),
            "context": job.context,
            "scanned": name.scanned,
            "ms": 1e3 * took[name],
            "ratio": took[name] / next(iter(took.values())),
            "tokens_per_second": job.batch * max(job.prompt, 1) / took[name],
            "weights_mb": sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 1e6,
            "cache_mb": held[name] / 1e6,
        }
        for name, params in models.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int, nargs="*", default=(1, 8, 32))
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompts", nargs="*", default=("1x512", "4x1024"))
    parser.add_argument("--variants", choices=VARIANTS, nargs="*", default=tuple(VARIANTS))
    parser.add_argument("--scanned", action="store_true")
    parser.add_argument("--both", action="store_true", help="a list of layers, and a stack")
    parser.add_argument("--fused", action="store_true", help="q, k, v as one product, gate and up as another")
    parser.add_argument("--headless", action="store_true", help="the layers alone")
    parser.add_argument("--embedding", action="store_true", help="quantize the embedding, too")
    parser.add_argument("--commit", help="of the tree that is measured, for the file")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--seconds", type=float, default=1e9, help="start no measurement after so many seconds")
    options = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    small, dtype = options.small or not on_gpu, jnp.dtype(options.dtype or ("bfloat16" if on_gpu else "float32"))
    config = TINY if options.quick else SMALL if small else LARGE
    config = dataclasses.replace(config, layers=options.layers or config.layers)
    jobs = [Job(batch, 0, options.context) for batch in options.batch]
    jobs += [Job(int(b), int(t), int(t)) for b, t in (prompt.split("x") for prompt in options.prompts)]
    if options.quick:
        jobs = [Job(2, 0, 32), Job(1, 16, 16)]
    print(f"{jax.devices()[0].device_kind}: {config}")
    begun, rows, made = time.perf_counter(), [], {}
    for name in options.variants:  # variants that differ in the cache alone share their weights
        weights = VARIANTS[name][0]
        if str(weights) not in made:
            params = make_params(config, weights, dtype, head=not options.headless, embedding=options.embedding)
            params = fuse(params) if options.fused else params
            made[str(weights)] = {False: params, True: stacked(params) if options.scanned or options.both else None}
    layouts = (False, True) if options.both else (options.scanned,)
    variants = [Variant(name, scanned) for scanned in layouts for name in options.variants]
    models = {variant: made[str(VARIANTS[variant.name][0])][variant.scanned] for variant in variants}
    programs = compile_all(config, models, jobs)
    print(f"compiled after {time.perf_counter() - begun:.0f} s", flush=True)
    for job in jobs:
        if time.perf_counter() - begun > options.seconds:
            break
        for row in measure(models, programs, job, options.quick):
            rows.append(row)
            print(
                f"{row['what']:16} {'stack' if row['scanned'] else 'list':5} {row['variant']:23} {row['ms']:9.2f} ms "
                f"{row['ratio']:5.2f} of the first {row['tokens_per_second']:10,.0f} tokens/s, "
                f"weights {row['weights_mb']:9,.1f} MB, cache {row['cache_mb']:8,.1f} MB",
                flush=True,
            )
        about = {"device": jax.devices()[0].device_kind, "dtype": dtype.name, "model": dataclasses.asdict(config)}
        about |= {"commit": options.commit, "fused": options.fused}
        about |= {"headless": options.headless, "embedding": options.embedding}
        write_json(options.json, **about, rows=rows)


if __name__ == "__main__":
    main()
