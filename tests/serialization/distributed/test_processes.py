"""Two processes of four devices each, joined by `jax.distributed` on this machine, against one process of eight."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from eformer.serialization import load, open_lazy, save

from . import model
from .launch import exit_codes, launch


def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    mesh = model.mesh_of()
    expected = model.quantized_on(mesh)
    save(tmp_path / "plain.safetensors", expected)
    for output in launch("whole", tmp_path):
        assert "finished\n\nexit code 0" in output, output
    # The files: each process wrote about half, and together they are the tree, bit for bit.
    written = sorted(tmp_path.glob("model-*.safetensors"))
    assert [path.name[:20] for path in written] == ["model-00001-of-00002", "model-00002-of-00002"]
    sizes = [path.stat().st_size for path in written]
    assert max(sizes) < 0.65 * sum(sizes)
    loaded = load(tmp_path / "model.safetensors")
    assert open_lazy(tmp_path / "model.safetensors").metadata["note"] == "two processes"
    assert jax.tree.structure(loaded) == jax.tree.structure(jax.tree.map(lambda x: x, loaded))
    for mine, theirs in zip(jax.tree.leaves(expected), jax.tree.leaves(loaded), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))
    # The forward pass and the QLoRA step.
    wanted = model.results(mesh, expected)
    for process in range(2):
        found = np.load(tmp_path / f"results-{process}.npz")
        assert set(found) == set(wanted)
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.thorough
def test_a_process_that_died(tmp_path: Path) -> None:
    survivor, dead = launch("killed", tmp_path)
    assert "exit code 3" in dead
    assert "refused: process 1 of 2 did not come to 'save killed.safetensors' within 3 seconds" in survivor, survivor
    assert "another task died" in survivor
    assert not list(tmp_path.glob("killed*.index.json"))


@pytest.mark.thorough
def test_a_process_that_never_came(tmp_path: Path) -> None:
    (output,) = launch("missing", tmp_path, started=1)
    assert "finished" not in output
    assert "exit code 0" not in output
    assert "DEADLINE_EXCEEDED" in output or "timed out" in output.lower(), output


@pytest.mark.thorough
def test_a_process_that_hangs_is_told_from_a_slow_one() -> None:
    idle = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with pytest.raises(TimeoutError, match="idle for 1 seconds"):
            exit_codes([idle], quiet=1)
    finally:
        idle.kill()
        idle.wait()
    # Longer at work than it may be idle, and idle for long enough that a machine under load gives it a share by then.
    script = "import time; end = time.process_time() + 6\nwhile time.process_time() < end: pass"
    busy = subprocess.Popen([sys.executable, "-c", script])
    try:
        assert exit_codes([busy], quiet=5) == [0]
    finally:
        busy.kill()
        busy.wait()
