"""The planning script: what it says of a program, against the same program with real arrays on eight devices."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from eformer.ops.quantization import quantize

ROOT = Path(__file__).parents[3]
BATCH, LENGTH = 4, 16


def load_script() -> Any:
    found: Any = importlib.util.spec_from_file_location("plan_llama", ROOT / "benchmarks" / "plan_llama.py")
    module = sys.modules[found.name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


script = load_script()
TINY = script.MODELS["tiny"]
# Per layer: sums of the two results that go back to the residual stream (or reduce-scatters, with gathers in front of
# what follows); keys and values gathered because two heads do not split over four devices. With kernels split twice,
# every product is summed, and every norm.
HALF, ALL = f"{BATCH // 2},{LENGTH}", f"{BATCH},{LENGTH}"
KEYS = {("all-gather", f"f32[{HALF},1,32]"): 2}
EXPECTED = {
    "1d": Counter({**KEYS, ("all-reduce", f"f32[{HALF},256]"): 2}),
    "sp": Counter(
        {
            **KEYS,
            ("all-gather", f"f32[{HALF},256]"): 2,
            ("reduce-scatter", f"f32[{BATCH // 2},{LENGTH // 4},256]"): 2,
        }
    ),
    "2d": Counter(
        {
            ("all-gather", f"f32[{ALL},1,32]"): 2,
            ("all-reduce", f"f32[{ALL}]"): 2,
            ("all-reduce", f"f32[{ALL},64]"): 1,  # q
            ("all-reduce", f"f32[{ALL},16]"): 2,  # k, v
            ("all-reduce", f"f32[{ALL},128]"): 4,  # o, gate, up, down
        }
    ),
}


def mesh_of() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


def counted(layer: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    """Sums XLA has joined count one by one."""
    found: Counter[tuple[str, str]] = Counter()
    for item in layer:
        found.update((item["kind"], shape.strip("() ")) for shape in item["shape"].split(", "))
    return found


def real_params(abstract: Any) -> Any:
    """Random weights in the places of the shapes; kernels quantized from dense ones."""
    rng = np.random.default_rng(0)

    def made(shape: Any) -> Any:
        if not hasattr(shape, "packed"):
            values = 1 + 0.1 * rng.standard_normal(shape.shape)
            return jax.device_put(jnp.asarray(values, shape.dtype), shape.sharding)
        dense = jnp.asarray(rng.standard_normal(shape.shape) / math.sqrt(shape.shape[-2]), jnp.bfloat16)
        q = quantize(dense, dtype="nf4")
        return jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), q, shape)

    return jax.tree.map(made, abstract, is_leaf=lambda x: hasattr(x, "packed"))


@pytest.mark.parametrize("layout", EXPECTED)
def test_claims_hold_for_a_real_program(layout: str) -> None:
    mesh = mesh_of()
    compiled = script.compile_plan(TINY, layout, mesh, BATCH, LENGTH)
    said = script.describe(TINY, compiled)
    assert counted(said["layer"]) == EXPECTED[layout]
    params = real_params(script.abstract_params(TINY, layout, mesh))
    rows = PartitionSpec() if layout == "2d" else PartitionSpec("data")
    tokens = np.random.default_rng(1).integers(0, TINY.vocabulary, (BATCH, LENGTH)).astype(np.int32)
    placed = jax.device_put(tokens, NamedSharding(mesh, rows))
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves((params, placed)))
    assert said["arguments"] == held
    assert said["largest"]["bytes"] <= said["temporaries"] + said["results"]
    logits = np.asarray(compiled(params, placed), np.float32)
    # The same on one device: no mesh, no sums across devices.
    alone = jax.device_put(params, jax.devices()[0])
    one = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:1])
    wanted = jax.jit(lambda p, t: script.forward(TINY, layout, one, p, t))(alone, tokens)
    difference = np.abs(logits - np.asarray(wanted, np.float32)).max()
    assert difference < 0.05 * np.abs(logits).max()  # activations are bfloat16


def test_layers_cost_the_same() -> None:
    deeper = dataclasses.replace(TINY, layers=3)
    said = [script.describe(s, script.compile_plan(s, "1d", mesh_of(), BATCH, LENGTH)) for s in (TINY, deeper)]
    assert said[0]["layer"] == said[1]["layer"]
    assert said[1]["temporaries"] < 1.2 * said[0]["temporaries"]


@pytest.mark.parametrize("number", range(6))
def test_recorded_plans(number: int) -> None:
    """The figures in the guide: bytes by shapes alone, sums by the formula."""
    plan = json.loads((ROOT / "benchmarks/results/plan_llama_16x16.json").read_text())[number]
    shape, mesh = script.MODELS[plan["model"]], AbstractMesh(tuple(plan["mesh"]), ("data", "model"))
    total = 4 * plan["batch"] * plan["length"] // (1 if plan["layout"] == "2d" else plan["mesh"][0])  # tokens
    for leaf in jax.tree.leaves(script.abstract_params(shape, plan["layout"], mesh)):
        parts = math.prod(mesh.shape[n] for e in leaf.sharding.spec if e for n in ([e] if isinstance(e, str) else e))
        total += math.prod(leaf.shape) * leaf.dtype.itemsize // parts
    assert plan["arguments"] == total
    if plan["layout"] != "2d":
        rows = plan["batch"] * plan["length"] // plan["mesh"][0]
        kind, parts = ("all-reduce", 1) if plan["layout"] == "1d" else ("reduce-scatter", plan["mesh"][1])
        sums = [item for item in plan["layer"] if item["kind"] == kind]
        assert [item["bytes"] for item in sums] == [4 * rows * shape.width // parts] * 2
        assert plan["largest"]["bytes"] < 2 * shape.width * shape.hidden / plan["mesh"][1]  # no decoded kernel
