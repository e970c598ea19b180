"""One process of the tests: python -m tests.serialization.distributed.worker SCENARIO PORT COUNT INDEX FOLDER."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eformer.serialization import (
    CheckpointError,
    ProcessError,
    load,
    load_distributed,
    load_orbax,
    save_distributed,
    save_orbax,
)
from eformer.serialization.safetensors.reading import MappedFile

from . import model


def counting_reads() -> list[int]:
    """From now on, the bytes every read of a file returned. Nothing else gives out the contents of a file."""
    counts: list[int] = []
    plain = MappedFile.read

    def read(self: MappedFile, name: str, index: Any = ...) -> np.ndarray:
        found = plain(self, name, index)
        counts.append(found.nbytes)
        return found

    def view(self: MappedFile, name: str) -> np.ndarray:
        counts.append(self.entry(name).nbytes)
        return plain(self, name)

    MappedFile.read, MappedFile.view = read, view  # pyright: ignore[reportAttributeAccessIssue]
    return counts


def whole(folder: Path) -> None:
    """Quantize, save, load, run: everything that must equal one process with the same devices."""
    mesh = model.mesh_of()
    params = model.quantized_on(mesh)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    held = model.local_nbytes(params)
    scales = params["scale"].nbytes + params["layer"]["side"]["kernel"].nbytes  # (at most) whole on every process
    assert held <= total / 2 + scales, (held, total)
    file = save_distributed(folder / "model.safetensors", params, metadata={"note": "two processes"})
    counts = counting_reads()
    again = load_distributed(file, mesh, model.LEAF_SPECS)
    assert sum(counts) == held, (sum(counts), held)
    assert model.local_nbytes(again) == held
    counts.clear()
    plain = load_distributed(folder / "plain.safetensors", mesh, model.LEAF_SPECS)
    assert sum(counts) == held, (sum(counts), held)
    counts.clear()
    like = load(file, like=again)
    assert sum(counts) == held
    for tree in (again, plain, like):
        same = jax.tree.map(lambda a, b: bool(jax.jit(lambda a, b: (a == b).all())(a, b)), params, tree)
        assert all(jax.tree.leaves(same)), same
    found = model.results(mesh, again)
    np.savez(folder / f"results-{jax.process_index()}.npz", **found)
    where = save_orbax(folder / "orbax", params)
    restored = load_orbax(where, like=params)
    assert model.local_nbytes(restored) == held
    assert np.array_equal(np.asarray(model.results(mesh, restored)["y"]), found["y"])
    disagree(folder, mesh, params, file)


def disagree(folder: Path, mesh: Any, params: Any, file: Path) -> None:
    """What differs between processes is an error on all of them, and names the leaf or the process."""
    me = jax.process_index()
    other = {"layer": params["layer"], "odd": np.zeros(3 + me)}
    with pytest.raises(ProcessError, match="odd"):
        save_distributed(folder / "odd.safetensors", other)
    specs = {"out.kernel": P("model")} if me else {"out.kernel": P(None, "data")}
    with pytest.raises(ProcessError, match="process 1 has"):
        load_distributed(file, mesh, specs)
    blocked = folder / ("nowhere" if me else ".") / "half.safetensors"  # process 1 cannot write
    with pytest.raises(CheckpointError if me else ProcessError, match="nowhere" if me else "process 1 failed"):
        save_distributed(blocked, {"w": params["scale"]})
    assert not (folder / "half.safetensors.index.json").exists()


def killed(folder: Path) -> None:
    """Process 1 is gone when process 0 saves, and when it computes."""
    mesh = model.mesh_of()
    x = model.placed(mesh, np.ones(16, np.float32), P("model"))
    total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, P()))
    total(x).block_until_ready()
    multihost_utils.sync_global_devices("both have finished")
    if jax.process_index() == 1:
        os._exit(3)
    with pytest.raises(ProcessError) as refused:
        save_distributed(folder / "killed.safetensors", {"w": np.ones(3)}, timeout=3)
    print(f"refused: {refused.value}", flush=True)
    try:  # JAX ends the program when it misses the other one, if the collective has not failed before
        total(x).block_until_ready()
    except jax.errors.JaxRuntimeError as err:
        print(f"another task died: {err}", flush=True)
    os._exit(0)  # without the farewell to a process that is gone


def main() -> None:
    scenario, port, count, index, folder = sys.argv[1:]
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        int(count),
        int(index),
        initialization_timeout=600 if scenario != "missing" else 3,
        heartbeat_timeout_seconds=15 if scenario == "killed" else 100,
    )
    try:
        {"whole": whole, "killed": killed}[scenario](Path(folder))
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        os._exit(1)  # the farewell would wait for a process that may be gone
    print("finished", flush=True)


if __name__ == "__main__":
    main()
