"""Quantize, save, load and fine-tune a model that is spread over many processes. No array is ever whole in one place.

On a cluster start it once per host, the way your cluster starts programs; JAX finds the others by itself:

    srun python examples/multi_host.py --folder /shared/run     # SLURM; likewise under Open MPI, GKE, on a TPU pod

Anywhere else it starts two processes of four CPU devices each on this machine:

    python examples/multi_host.py

All processes need to see `--folder`.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LOCAL_PROCESSES = 2
LOCAL_FLAGS = "--xla_force_host_platform_device_count=4"
WIDTH, LAYERS, BATCH = 128, 2, 16


def local(folder: str) -> int:
    """Two processes on this machine, for as long as they need. One that fails ends the other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "XLA_FLAGS": LOCAL_FLAGS, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, __file__, "--folder", folder, "--port", str(port), "--process"]
    running = [subprocess.Popen([*command, str(i)], env=environment) for i in range(LOCAL_PROCESSES)]
    try:
        while None in (codes := [process.poll() for process in running]) and not any(codes):
            time.sleep(0.1)
        return max(abs(code or 0) for code in codes)
    finally:
        for process in running:
            process.kill()


def join(options: argparse.Namespace) -> bool:
    """Join the other processes; False if there is no cluster to be found."""
    import jax

    if options.process is not None:
        address = f"127.0.0.1:{options.port}"
        jax.distributed.initialize(address, LOCAL_PROCESSES, options.process, initialization_timeout=3600)
        return True
    try:
        jax.distributed.initialize()
    except ValueError:  # nothing in the environment says where the others are
        return False
    return True


def train(folder: Path) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    from eformer.jaximus import implicit
    from eformer.ops.quantization import add_lora, merge, quantize_tree, report, split_trainable
    from eformer.serialization import load_distributed, save_distributed

    def say(*what: Any) -> None:
        if jax.process_index() == 0:
            print(*what, flush=True)

    # Devices of one host are neighbours along `data`; the weights are spread over `model`, across hosts.
    data = 2 if jax.device_count() % 2 == 0 else 1
    mesh = jax.make_mesh((jax.device_count() // data, data), ("model", "data"), axis_types=(AxisType.Auto,) * 2)
    hidden = max(256, 16 * mesh.shape["model"])
    say(f"{jax.process_count()} processes, {jax.device_count()} devices, mesh {dict(mesh.shape)}")
    specs = {"*/up/kernel": P(None, "model"), "*/down/kernel": P("model")}

    def place(values: np.ndarray, spec: P) -> jax.Array:
        return jax.make_array_from_callback(values.shape, NamedSharding(mesh, spec), lambda index: values[index])

    def kernel(seed: int, rows: int, cols: int, spec: P) -> Any:
        # A real model would be read here: load_distributed, or open_lazy(file).read_slice per shard.
        values = np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32) / rows**0.5
        return {"kernel": place(values, spec)}

    dense = {
        f"layer{i}": {
            "up": kernel(2 * i, WIDTH, hidden, specs["*/up/kernel"]),
            "down": kernel(2 * i + 1, hidden, WIDTH, specs["*/down/kernel"]),
        }
        for i in range(LAYERS)
    }
    # A device must hold whole blocks of the rows that are split.
    block = min(64, hidden // mesh.shape["model"])
    params = quantize_tree(dense, {"*": {"dtype": "nf4", "block_size": block}}, progress=False)
    say(report(params))

    file = save_distributed(folder / "model.safetensors", params)  # every process writes its own shards
    params = load_distributed(file, mesh, specs)  # and reads no more than those
    here = sum(shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards)
    say(f"process 0 holds {here:,} bytes on {jax.local_device_count()} devices")

    def forward(params: Any, x: jax.Array) -> jax.Array:
        for i in range(LAYERS):
            layer = params[f"layer{i}"]
            x = x + jax.nn.gelu(x @ layer["up"]["kernel"]) @ layer["down"]["kernel"]
        return x

    trainable, frozen = split_trainable(add_lora(params, "*kernel", rank=4, key=jax.random.key(0)))
    trainable = jax.device_put(trainable, NamedSharding(mesh, P()))
    optimizer = optax.adam(1e-2)
    x = place(np.random.default_rng(9).standard_normal((BATCH, WIDTH)).astype(np.float32), P("data"))

    @jax.jit
    def step(trainable: Any, state: Any, frozen: Any, x: jax.Array) -> Any:
        def loss(trainable: Any) -> jax.Array:
            return jnp.mean((implicit(forward)(merge(trainable, frozen), x) - jnp.roll(x, 1, -1)) ** 2)

        value, grads = jax.value_and_grad(loss)(trainable)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(trainable, updates), state, value

    state, losses = optimizer.init(trainable), []
    for _ in range(20):
        trainable, state, value = step(trainable, state, frozen, x)
        losses.append(float(value))
    say(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    if not losses[-1] < losses[0]:
        raise SystemExit("the loss did not fall")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="where the checkpoint goes; by default a temporary folder (one machine only)")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", help=argparse.SUPPRESS)
    options = parser.parse_args()
    joined = join(options)
    if joined and options.folder is not None:
        train(Path(options.folder))
        return 0
    if joined:
        parser.error("on a cluster give --folder, a folder that all processes see.")
    if options.folder is not None:
        return local(options.folder)
    with tempfile.TemporaryDirectory() as folder:
        return local(folder)


if __name__ == "__main__":
    sys.exit(main())
