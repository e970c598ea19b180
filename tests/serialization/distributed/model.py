"""A small model for every process to build: weights from a seed, placed shard by shard."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eformer.jaximus import implicit, materialization_policy
from eformer.ops.quantization import add_lora, merge, quantize_tree, split_trainable

SHAPES = {"up": (128, 64), "gate": (128, 64), "side": (128, 64), "down": (64, 128)}
SPECS = {**dict.fromkeys(("up", "gate", "side"), P(None, "model")), "down": P("model")}
RULES = {"*up*": {"dtype": "nf4", "block_size": 16}, "*gate*": "int8", "*side*": "binary"}
RULES |= {"*down*": {"dtype": "nf4", "block_size": 16}}
LEAF_SPECS = {"layer.*.kernel": P(None, "model"), "out.kernel": P("model"), "scale": P()}


def mesh_of() -> Mesh:
    """Devices of one process are neighbours, so the parts of `model` lie in all of them."""
    return jax.make_mesh((4, 2), ("model", "data"), axis_types=(AxisType.Auto, AxisType.Auto))


def weights(name: str) -> np.ndarray:
    rows, cols = SHAPES[name]
    return np.random.default_rng(len(name)).standard_normal((rows, cols)).astype(np.float32) / np.sqrt(rows)


def placed(mesh: Mesh, values: np.ndarray, spec: P) -> jax.Array:
    """Only the shards of this process are made."""
    return jax.make_array_from_callback(values.shape, NamedSharding(mesh, spec), lambda index: values[index])


def params_on(mesh: Mesh) -> Any:
    kernels = {name: {"kernel": placed(mesh, weights(name), spec)} for name, spec in SPECS.items()}
    down = kernels.pop("down")
    return {"layer": kernels, "out": down, "scale": placed(mesh, np.linspace(0.5, 2, 128, dtype=np.float32), P())}


def quantized_on(mesh: Mesh) -> Any:
    rules = {f"*{name}*": RULES[f"*{name}*"] for name in ("up", "gate", "side")} | {"*out*": RULES["*down*"]}
    return quantize_tree(params_on(mesh), rules, min_size=0, skip=("norms", "biases"), progress=False)


def forward(params: Any, x: jax.Array) -> jax.Array:
    h = (x * params["scale"]) @ params["layer"]["up"]["kernel"]
    h = jax.nn.silu(h) * (x @ params["layer"]["gate"]["kernel"]) + x @ params["layer"]["side"]["kernel"]
    return h @ params["out"]["kernel"]


def batch_on(mesh: Mesh) -> jax.Array:
    return placed(mesh, np.random.default_rng(7).standard_normal((8, 128)).astype(np.float32), P("data"))


def results(mesh: Mesh, params: Any) -> dict[str, np.ndarray]:
    """A forward pass and a QLoRA step: the output, the loss, and the adapters after the step, on every process."""
    everywhere = NamedSharding(mesh, P())
    x = batch_on(mesh)
    model = add_lora(params, "*kernel", rank=2, key=jax.random.key(3), alpha=4)
    trainable, frozen = split_trainable(model)
    # Factors that start at zero have gradients of one kind only; start all of them somewhere.
    trainable = {
        name: placed(mesh, np.random.default_rng(len(name)).standard_normal(v.shape).astype(np.float32) / 8, P())
        for name, v in trainable.items()
    }
    optimizer = optax.sgd(0.1)

    def step(trainable: Any, frozen: Any, x: Any) -> Any:
        def loss(trainable: Any) -> Any:
            y = implicit(forward)(merge(trainable, frozen), x)
            return jnp.mean((y - jnp.roll(x, 1, -1)) ** 2)

        value, grads = jax.value_and_grad(loss)(trainable)
        updates, _ = optimizer.update(grads, optimizer.init(trainable))
        return optax.apply_updates(trainable, updates), value

    with materialization_policy("error"):
        y = jax.jit(implicit(forward), out_shardings=everywhere)(params, x)
        trained, value = jax.jit(step, out_shardings=everywhere)(trainable, frozen, x)
    return {"y": np.asarray(y), "loss": np.asarray(value), **{k: np.asarray(v) for k, v in trained.items()}}


def local_nbytes(tree: Any) -> int:
    """Bytes of the different shards this process holds: copies are counted once."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shards = {str(shard.index): shard.data.nbytes for shard in leaf.addressable_shards}
        total += sum(shards.values())
    return total
