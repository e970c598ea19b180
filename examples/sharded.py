"""A model split over eight devices: codes and scales are split together, and products stay where the weights are.

python examples/sharded.py        (without accelerators, the eight devices are parts of the CPU)
"""

from __future__ import annotations

import os
import re
from typing import Any

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):  # read when JAX starts
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import eformer as ef

P = PartitionSpec


def forward(params: Any, x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ params["up"]["kernel"]) @ params["down"]["kernel"]


def main() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def split(array: jax.Array, *spec: Any) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, P(*spec)))

    # Columns of the first matrix and rows of the second over "model": one sum over devices per layer.
    k1, k2, k3 = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": {"kernel": split(jax.random.normal(k1, (256, 1024)) / 16, None, "model")},
        "down": {"kernel": split(jax.random.normal(k2, (1024, 256)) / 32, "model", None)},
    }
    x = split(jax.random.normal(k3, (16, 256)), "data", None)
    exact = jax.jit(forward)(params, x)

    quantized = ef.quantize_tree(params, "nf4")  # what was split stays split
    print(ef.report(quantized))
    for name, holder in quantized.items():
        q = holder["kernel"]
        print(f"{name:5} {q.sharding.spec!s:26} codes {q.packed.sharding.spec!s:28} absmax {q.absmax.sharding.spec}")

    run = jax.jit(ef.implicit(forward))
    with ef.materialization_policy("error"):
        y = run(quantized, x)
    print(f"result split as {y.sharding.spec}, error {jnp.linalg.norm(y - exact) / jnp.linalg.norm(exact):.3f}")

    program = run.lower(quantized, x).compile().as_text()
    moved = re.findall(r"= (\S+) (all-gather|all-reduce|all-to-all|collective-permute)\(", program)
    print("between devices:", ", ".join(f"{kind} of {what}" for what, kind in moved))

    try:  # 1024 rows in blocks of 512 do not go over four devices
        ef.quantize(jnp.ones((1024, 256)), block_size=512).with_sharding(NamedSharding(mesh, P("model", None)))
    except ef.errors.ShardingError as error:
        print("refused:", error)


if __name__ == "__main__":
    main()
