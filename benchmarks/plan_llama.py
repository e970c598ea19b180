"""Plans a Llama with NF4 weights on a mesh, without its devices and without its weights.

    python benchmarks/plan_llama.py [--model 70b 405b] [--mesh 16x16] [--layout 1d sp 2d] [--quick] [--json PATH]

The forward pass is compiled for as many pretended CPU devices as the mesh has, from shapes alone; layers are scanned,
so that the program is small. From the compiled program come the bytes every device holds, the collectives of one layer
and what they move, and the largest array that is made on the way.

Layouts, on a mesh of `data` x `model`:
    1d   batches over `data`; kernels over `model`, by outputs on the way in and by inputs on the way back: two sums
    sp   as 1d, and the residual stream over `model` along the tokens: each sum becomes a reduce-scatter and a gather
    2d   kernels over both axes, activations over `data` along their width: the smallest memory, more sums
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULT = "plan: "
ITEM = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "f64": 8}
KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int
    head_dim: int = 128


MODELS = {
    "70b": Shape(80, 8192, 28672, 64, 8, 128256),
    "405b": Shape(126, 16384, 53248, 128, 8, 128256),
    "tiny": Shape(2, 256, 512, 8, 2, 512, 32),
}


# -- the model: `x @ w`, whatever w is ---------------------------------------------------------------------------------


def kernels(shape: Shape) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of every matrix of a layer."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    w, h = shape.width, shape.hidden
    return {"q": (w, q), "k": (w, kv), "v": (w, kv), "o": (q, w), "gate": (w, h), "up": (w, h), "down": (h, w)}


def specs(layout: str) -> dict[str, Any]:
    """The spec of every weight; those of layers without the axis of the stack."""
    from jax.sharding import PartitionSpec as P

    over = "data" if layout == "2d" else None
    found = {name: P(over, "model") for name in ("q", "k", "v", "gate", "up", "head")}
    found |= {name: P("model", over) for name in ("o", "down")}
    stream = {"1d": P("data"), "sp": P("data", "model"), "2d": P(None, None, "data")}[layout]
    return {**found, "norm": P(), "embedding": P("model", over), "x": stream}


def forward(shape: Shape, layout: str, mesh: Any, params: Any, tokens: Any) -> Any:
    """Logits of all positions, of causal attention without a cache."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from eformer.jaximus import implicit

    stream = NamedSharding(mesh, specs(layout)["x"])

    def gathered(y: Any) -> Any:
        """All tokens on every device of `model`, in front of kernels that are split along their outputs."""
        return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, PartitionSpec("data"))) if layout == "sp" else y

    def layer(x: Any, weights: Any) -> Any:
        y = gathered(norm(x, weights["norm1"]))
        x = x + attention(shape, y @ weights["q"], y @ weights["k"], y @ weights["v"]) @ weights["o"]
        x = jax.lax.with_sharding_constraint(x, stream)
        y = gathered(norm(x, weights["norm2"]))
        x = x + (jax.nn.silu(y @ weights["gate"]) * (y @ weights["up"])) @ weights["down"]
        return jax.lax.with_sharding_constraint(x, stream), None

    def run(params: Any, tokens: Any) -> Any:
        x = jax.lax.with_sharding_constraint(jnp.take(params["embedding"], tokens, axis=0), stream)
        x, _ = jax.lax.scan(layer, x, params["layers"])
        return gathered(norm(x, params["norm"])) @ params["head"]

    return implicit(run)(params, tokens)


def norm(x: Any, weight: Any) -> Any:
    import jax
    import jax.numpy as jnp

    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)).astype(x.dtype) * weight


def attention(shape: Shape, q: Any, k: Any, v: Any) -> Any:
    import jax
    import jax.numpy as jnp

    batch, length = q.shape[:2]
    groups = shape.heads // shape.kv_heads
    k, v = (jnp.repeat(t.reshape(batch, length, shape.kv_heads, shape.head_dim), groups, axis=2) for t in (k, v))
    q = q.reshape(batch, length, shape.heads, shape.head_dim)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / shape.head_dim**0.5
    scores = jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(v.dtype), v)
    return mixed.reshape(batch, length, shape.heads * shape.head_dim)


# -- the plan ----------------------------------------------------------------------------------------------------------


def abstract_params(shape: Shape, layout: str, mesh: Any) -> Any:
    """Shapes with shardings in place of the weights: NF4 kernels, norms and the embedding in bf16."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from eformer.ops.quantization import quantize

    where = specs(layout)

    def struct(array: Any, spec: Any) -> Any:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))

    def dense(*size: int, spec: Any) -> Any:
        return struct(jax.ShapeDtypeStruct(size, jnp.bfloat16), spec)

    def packed(spec: Any, *size: int) -> Any:
        spec = PartitionSpec(*[None] * (len(size) - 2), *spec)
        q = jax.eval_shape(lambda w: quantize(w, dtype="nf4"), jax.ShapeDtypeStruct(size, jnp.bfloat16))
        children = jax.tree.map(struct, q, q.child_specs(spec), is_leaf=lambda s: isinstance(s, PartitionSpec))
        return children

    stack = {name: packed(where[name], shape.layers, *size) for name, size in kernels(shape).items()}
    norms = {name: dense(shape.layers, shape.width, spec=where["norm"]) for name in ("norm1", "norm2")}
    return {
        "embedding": dense(shape.vocabulary, shape.width, spec=where["embedding"]),
        "layers": {**stack, **norms},
        "norm": dense(shape.width, spec=where["norm"]),
        "head": packed(where["head"], shape.width, shape.vocabulary),
    }


def compile_plan(shape: Shape, layout: str, mesh: Any, batch: int, length: int) -> Any:
    """The compiled forward pass, from shapes."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    params = abstract_params(shape, layout, mesh)
    rows = PartitionSpec() if layout == "2d" else PartitionSpec("data")
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32, sharding=NamedSharding(mesh, rows))
    out = NamedSharding(mesh, PartitionSpec(None if layout == "2d" else "data", None, "model"))
    run = jax.jit(lambda params, tokens: forward(shape, layout, mesh, params, tokens), out_shardings=out)
    return run.lower(params, tokens).compile()


def describe(shape: Shape, compiled: Any) -> dict[str, Any]:
    """What a compiled plan says, per device."""
    memory, text = compiled.memory_analysis(), compiled.as_text()
    bodies = computations(text)
    loops = re.findall(r" while\(.*?body=%?([\w.\-]+)", text)
    layer = [c for name in dict.fromkeys(loops) for c in collectives(bodies, name)]
    return {
        "arguments": memory.argument_size_in_bytes,
        "results": memory.output_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "largest": largest(bodies),
        "layer": layer,
        "once": [c for c in collectives(bodies, entry_name(text)) if c not in layer],
        "layers": shape.layers,
    }


def computations(text: str) -> dict[str, str]:
    """The parts of a program by name."""
    parts = re.split(r"\n(?=(?:ENTRY )?%?[\w.\-]+ \(.*\) -> .* \{\n)", text)
    return {re.match(r"(?:ENTRY )?%?([\w.\-]+)", part)[1]: part for part in parts[1:]}  # pyright: ignore


def entry_name(text: str) -> str:
    return re.search(r"\nENTRY %?([\w.\-]+)", text)[1]  # pyright: ignore


def collectives(bodies: dict[str, str], name: str, *, into_loops: bool = False) -> list[dict[str, Any]]:
    """Kind and bytes of every collective of a computation and of what it calls, loops left out."""
    found = []
    for line in bodies.get(name, "").splitlines():
        match = re.search(rf"= (\(.*?\)|\S+) ({KINDS})(?:-start)?\(", line)
        if match:
            found.append({"kind": match[2], "bytes": sum(sizes(match[1])), "shape": re.sub(r"\{.*?\}", "", match[1])})
        if " while(" in line and not into_loops:
            continue
        for called in re.findall(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)", line):
            found += collectives(bodies, called)
    return found


def sizes(types: str) -> Iterator[int]:
    """Bytes of every array in the text of a type."""
    for kind, dims in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", types):
        count = 1
        for size in filter(None, dims.split(",")):
            count *= int(size)
        yield count * ITEM.get(kind, 4)


def largest(bodies: dict[str, str]) -> dict[str, Any]:
    """The largest array that some operation makes (fused ones make none), arguments and results apart."""
    best: dict[str, Any] = {"bytes": 0, "shape": "", "operation": ""}
    skipped = ("parameter", "tuple", "get-tuple-element", "while", "bitcast", "constant", "conditional", "call")
    for name, body in bodies.items():
        is_small = name.startswith("region") and " while(" not in body and "custom-call" not in body
        if "fused" in name or is_small:  # what a fusion or a reduction does inside, it does not keep
            continue
        for line in body.splitlines():
            match = re.search(r"= (\S+\[[\d,]*\])\S* ([\w\-]+)\(", line)
            if match and match[2] not in skipped and "ROOT" not in line:
                size = sum(sizes(match[1]))
                if size > best["bytes"]:
                    best = {"bytes": size, "shape": match[1], "operation": match[2]}
    return best


# -- the command -------------------------------------------------------------------------------------------------------


def plan_here(model: str, layout: str, mesh_sizes: tuple[int, int], batch: int, length: int) -> dict[str, Any]:
    """One plan, in a process that has as many devices as the mesh."""
    import jax
    from jax.sharding import AxisType

    mesh = jax.make_mesh(mesh_sizes, ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    found = describe(MODELS[model], compile_plan(MODELS[model], layout, mesh, batch, length))
    return {"model": model, "layout": layout, "mesh": list(mesh_sizes), "batch": batch, "length": length, **found}


def plan(model: str, layout: str, mesh_sizes: tuple[int, int], batch: int, length: int) -> dict[str, Any]:
    """One plan, in a process of its own with pretended devices."""
    flags = f"--xla_force_host_platform_device_count={mesh_sizes[0] * mesh_sizes[1]} --xla_backend_optimization_level=0"
    command = [sys.executable, __file__, "--here", "--model", model, "--layout", layout, "--batch", str(batch)]
    command += ["--mesh", "x".join(map(str, mesh_sizes)), "--length", str(length)]
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if not lines:
        raise SystemExit(f"{model} on {mesh_sizes}: {done.stderr[-2000:]}")
    return json.loads(lines[-1].removeprefix(RESULT))


def table(plans: list[dict[str, Any]]) -> str:
    """The plans in Markdown: memory per device, then the collectives of one layer."""
    rows = [
        "| model | mesh | layout | weights | temporaries | largest array | collectives per layer | moved per layer |"
    ]
    rows.append("|---" * 8 + "|")
    for p in plans:
        kinds: dict[str, int] = {}
        for c in p["layer"]:
            kinds[c["kind"]] = kinds.get(c["kind"], 0) + 1
        said = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())) or "none"
        moved = sum(c["bytes"] for c in p["layer"])
        big = p["largest"]
        rows.append(
            f"| {p['model']} | {'×'.join(map(str, p['mesh']))} | {p['layout']} | {p['arguments'] / 1e9:.2f} GB "
            f"| {p['temporaries'] / 1e6:.0f} MB | {big['shape']} ({big['bytes'] / 1e6:.1f} MB) | {said} "
            f"| {moved / 1e6:.2f} MB |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["70b", "405b"])
    parser.add_argument("--layout", nargs="+", choices=("1d", "sp", "2d"), default=["1d", "sp", "2d"])
    parser.add_argument("--mesh", default="16x16", help="sizes of data and model")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--quick", action="store_true", help="a tiny model on a mesh of 2x4")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = tuple(int(n) for n in options.mesh.split("x"))
    if len(sizes) != 2 or min(sizes) < 1:
        parser.error(f"--mesh {options.mesh!r} is not two sizes such as 16x16.")
    if options.here:
        (model,), (layout,) = options.model, options.layout
        print(RESULT + json.dumps(plan_here(model, layout, sizes, options.batch, options.length)))
        return
    models, sizes, batch = (["tiny"], (2, 4), 8) if options.quick else (options.model, sizes, options.batch)
    plans = [plan(m, layout, sizes, batch, options.length) for m in models for layout in options.layout]
    print(f"Forward pass of {batch} sequences of {options.length} tokens, per device\n\n{table(plans)}")
    for p in plans:
        print(
            f"\n{p['model']} {p['layout']}: of one layer",
            *(f"  {c['kind']} {c['shape']}" for c in p["layer"]),
            sep="\n",
        )
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(plans, indent=1) + "\n")


if __name__ == "__main__":
    main()
