"""`quantize_file`: the same as in memory, with little memory, and in spite of being killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from eformer import errors
from eformer import serialization as files
from eformer.ops.quantization import Array8B, ArrayNF4, QuantizationConfig, quantize, quantize_tree
from eformer.serialization.streaming import output as _output

from .trees import assert_same, dense

RULES: Any = {"*norm*": None, "embed*": {"dtype": "int8", "axis": -1}, "*.w": "nf4"}


def checkpoint(rng: np.random.Generator) -> dict[str, Any]:
    layers = [{"w": dense(rng, 128, 32), "norm": dense(rng, 32), "steps": jnp.arange(3)} for _ in range(4)]
    return {"embed": dense(rng, 130, 32, dtype="bfloat16"), "layers": layers, "numpy": {"w": np.ones((512, 8), "f2")}}


def expected(tree: dict[str, Any]) -> dict[str, Any]:
    layers = [{**layer, "w": quantize(layer["w"], dtype="nf4")} for layer in tree["layers"]]
    embed = quantize(tree["embed"], dtype="int8", axis=-1)
    return {"embed": embed, "layers": layers, "numpy": {"w": quantize(jnp.asarray(tree["numpy"]["w"]), dtype="nf4")}}


@pytest.mark.parametrize("shard_in", [None, "8kB"])
@pytest.mark.parametrize("shard_out", [None, "4kB"])
def test_the_same_as_in_memory(tmp_path, shard_in, shard_out):
    tree = checkpoint(np.random.default_rng(0))
    source = files.save(tmp_path / "in.safetensors", tree, max_shard_size=shard_in, metadata={"from": "here"})
    seen = []
    rules, options = {**RULES, "never": "binary"}, {"max_shard_size": shard_out, "metadata": {"a": "b"}}
    with pytest.warns(errors.UnusedRuleWarning, match="'never' matches no path\npaths look like"):
        report = files.quantize_file(source, tmp_path / "out.safetensors", rules, progress=seen.append, **options)
    assert_same(files.load(report.path), expected(tree))
    lazy = files.open_lazy(tmp_path / "out.safetensors")
    assert dict(lazy.metadata) == {"from": "here", "a": "b"}
    assert [str(unused) for unused in report.unused] == ["rule 'never' matches no path"]
    assert report.resumed == 0
    by_name = {leaf.name: leaf for leaf in report.leaves}
    assert (by_name["layers.0.w"].rule, by_name["layers.0.w"].format) == ("*.w", "nf4")
    assert (by_name["layers.0.norm"].rule, by_name["layers.0.norm"].format) == ("*norm*", "dense")
    assert report.nbytes_out == sum(lazy.info(name).nbytes for name in lazy)
    assert report.nbytes_in == sum(files.open_lazy(source).info(name).nbytes for name in lazy)
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    assert seen[-1].done == seen[-1].total == report.nbytes_in
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_stacks_are_quantized_matrix_by_matrix(tmp_path):
    """As `quantize_tree` does: layers of very different sizes share no threshold, whatever the axis."""
    rng = np.random.default_rng(7)
    sizes = jnp.array([1.0, 10.0, 0.1])[:, None, None]
    tree = {
        "up": {"kernel": dense(rng, 3, 128, 64) * sizes, "bias": dense(rng, 3, 64)},
        "moe.experts": {"weight": dense(rng, 3, 64, 128) * sizes},
        "attn": {"query": {"kernel": dense(rng, 64, 4, 16)}, "out": {"kernel": dense(rng, 4, 16, 64)}},
    }
    source = files.save(tmp_path / "in.safetensors", tree)
    for axis in (None, -2, 1, -1, 2, 0):
        rules = {"*kernel": {"dtype": "ternary", "axis": axis}, "*weight": {"dtype": "ternary", "axis": -1}}
        wanted = quantize_tree(tree, rules, default=None, min_size=0, donate=False)
        report = files.quantize_file(source, tmp_path / "out.safetensors", rules, default=None, min_size=0)
        found = files.load(report.path)
        assert_same(found, wanted)
        for q, w in ((found["up"]["kernel"], tree["up"]["kernel"]), *([] if axis == 0 else [_experts(found, tree)])):
            errors = jnp.linalg.norm(q.materialize() - w, axis=(1, 2)) / jnp.linalg.norm(w, axis=(1, 2))
            assert (float(errors.max()) < 0.5) == (axis != 0)


def _experts(*trees: Any) -> tuple[Any, ...]:
    return tuple(tree["moe.experts"]["weight"] for tree in trees)


def test_rules_meet_leaves_they_cannot_quantize(tmp_path):
    w = jnp.ones((64, 4))
    tree = {"q": quantize(w, dtype="ternary"), "i": jnp.arange(3), "s": jnp.float32(1), "n": 2, "w": w}
    source = files.save(tmp_path / "in.safetensors", tree)
    with pytest.raises(ValueError, match=r"'q' is already quantized, with dtype=ternary, but dtype=int8 was requested"):
        files.quantize_file(source, tmp_path / "out.safetensors", "int8")
    rules = {"q": None, "*": QuantizationConfig("int8")}
    report = files.quantize_file(source, tmp_path / "out.safetensors", rules, axis=0, min_size=0)
    assert {leaf.name: leaf.reason for leaf in report.leaves} == {
        "q": "a rule keeps it",
        "i": "its dtype is int32",
        "s": "it is not a matrix",
        "n": "it is not an array",
        "w": "role: kernel",
    }
    found = files.load(report.path)
    assert_same(found, {**tree, "w": Array8B.quantize(w, axis=0)})
    empty = files.quantize_file(files.save(tmp_path / "e.safetensors", {}), tmp_path / "o.safetensors", "nf4")
    assert files.load(empty.path) == {}
    (tmp_path / "split").mkdir()
    split = files.save(tmp_path / "split" / "m.safetensors", tree, max_shard_size=1)
    for same in (source, split, split.parent, split.parent / "m.safetensors"):
        target = source if same == source else split.parent / "m.safetensors"
        with pytest.raises(files.CheckpointError, match="is the source too"):
            files.quantize_file(same, target)
    assert_same(files.load(split), tree)
    with pytest.raises(files.CheckpointError, match=r"'w'.*cannot be quantized.*out of range"):
        files.quantize_file(source, tmp_path / "x.safetensors", {"w": {"dtype": "nf4", "axis": 7}}, min_size=0)


def test_a_simulated_quantization_stays_dense(tmp_path):
    w = dense(np.random.default_rng(0), 64, 4)
    source = files.save(tmp_path / "in.safetensors", {"w": w})
    report = files.quantize_file(
        source, tmp_path / "out.safetensors", {"w": {"dtype": "nf4", "simulate": True}}, min_size=0
    )
    assert_same(files.load(report.path), {"w": ArrayNF4.quantize(w).materialize()})


# -- killed runs -------------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def stopping_at(name: str):
    def progress(state: files.Progress) -> None:
        if state.name == name:
            raise Stop

    return progress


@pytest.mark.parametrize("size", [None, "4kB"])
def test_an_interrupted_run_continues(tmp_path, size):
    tree = checkpoint(np.random.default_rng(1))
    source = files.save(tmp_path / "in.safetensors", tree)
    whole = tmp_path / "whole"
    whole.mkdir()
    files.quantize_file(source, whole / "out.safetensors", RULES, max_shard_size=size)
    target = tmp_path / "out.safetensors"
    options: Any = {"max_shard_size": size}
    for number, name in enumerate(["layers.0.w", "layers.2.norm", "numpy.w"]):
        with pytest.raises(Stop):
            files.quantize_file(source, target, RULES, progress=stopping_at(name), **options)
        assert not [n for n in os.listdir(tmp_path) if n.startswith("out")], "no visible file before the end"
        assert number or ".out.safetensors.journal" in os.listdir(tmp_path)
    report = files.quantize_file(source, target, RULES, **options)
    assert report.resumed == len(report.leaves)
    assert_same(files.load(report.path), expected(tree))
    for path in whole.iterdir():  # same names, same bytes
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("change", ["source", "rules", "part", "journal"])
def test_what_changed_is_not_continued(tmp_path, change):
    rng = np.random.default_rng(2)
    tree = checkpoint(rng)
    source, target = files.save(tmp_path / "in.safetensors", tree), tmp_path / "out.safetensors"
    with pytest.raises(Stop):
        files.quantize_file(source, target, RULES, progress=stopping_at("layers.3.w"))
    rules: Any = RULES
    if change == "source":
        tree = checkpoint(rng)
        files.save(source, tree)
    elif change == "rules":
        rules = {**RULES, "*.w": {"dtype": "nf4", "use_kernel": False}}
    elif change == "part":
        os.truncate(tmp_path / ".out.safetensors.part", 100)
    else:
        (tmp_path / ".out.safetensors.journal").write_bytes(b"\xff\x00nonsense\n99\n")
    report = files.quantize_file(source, target, rules)
    assert report.resumed == 0
    wanted = expected(tree)
    if change == "rules":
        for holder in (*wanted["layers"], wanted["numpy"]):
            holder["w"] = holder["w"].replaced(use_kernel=False)
    assert_same(files.load(target), wanted)


def test_one_run_at_a_time(tmp_path):
    source = files.save(tmp_path / "in.safetensors", {"w": jnp.ones((64, 2))})
    target = tmp_path / "out.safetensors"

    def second(_: files.Progress) -> None:
        with pytest.raises(files.CheckpointError, match="written by another process"):
            files.quantize_file(source, target, "nf4")
        raise Stop

    with pytest.raises(Stop):
        files.quantize_file(source, target, "nf4", progress=second)
    assert files.quantize_file(source, target, "nf4").resumed == 1


@pytest.mark.parametrize("hidden", [".out.safetensors.journal", ".out.safetensors.part"])
def test_links_at_the_names_of_hidden_files_are_not_followed(tmp_path, hidden):
    source = files.save(tmp_path / "in.safetensors", {"w": jnp.ones((64, 64))})
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / hidden).symlink_to(precious)
    if hidden.endswith("journal"):
        with pytest.raises(files.CheckpointError, match=r"journal: is a symbolic link.*Remove it"):
            files.quantize_file(source, tmp_path / "out.safetensors")
        (tmp_path / hidden).unlink()
    report = files.quantize_file(source, tmp_path / "out.safetensors")
    assert isinstance(files.load(report.path)["w"], ArrayNF4)
    assert not report.path.is_symlink()
    assert precious.read_text() == "mine"


KILLED = """
import os, signal, sys
from eformer import serialization as files
from eformer.serialization.streaming import output as _output
_output._SYNC_SECONDS = 0  # every leaf is recorded, so that the test knows where it stopped
def progress(state):
    if state.name == "layers.1.w":
        os.kill(os.getpid(), signal.SIGKILL)
files.quantize_file(sys.argv[1], sys.argv[2], {rules!r}, progress=progress)
"""


def test_a_killed_run_leaves_no_half_file_and_continues(tmp_path):
    tree = checkpoint(np.random.default_rng(3))
    source, target = files.save(tmp_path / "in.safetensors", tree), tmp_path / "out.safetensors"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED.format(rules=RULES), source, target],
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not target.exists()
    report = files.quantize_file(source, target, RULES)
    assert report.resumed == [leaf.name for leaf in report.leaves].index("layers.1.w") + 1
    assert_same(files.load(target), expected(tree))


def test_work_is_recorded_now_and_then_only(tmp_path, monkeypatch):
    """Syncing to disk after every tensor would cost more than the work."""
    syncs = []
    monkeypatch.setattr(os, "fsync", lambda descriptor, sync=os.fsync: (syncs.append(descriptor), sync(descriptor)))
    tree = {f"w{i}": jnp.ones((64, 2)) for i in range(20)}
    source = files.save(tmp_path / "in.safetensors", tree)
    syncs.clear()
    assert _output._SYNC_SECONDS >= 1
    monkeypatch.setattr(_output, "_SYNC_SECONDS", 3600)  # a slow machine takes more than a second for these
    files.quantize_file(source, tmp_path / "out.safetensors", "nf4")
    assert len(syncs) < 8


# -- memory ------------------------------------------------------------------------------------------------------------

FRUGAL = """
import json, re, resource, sys, time
from eformer import serialization as files

def virtual():
    return 1024 * int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1])

def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

folder, tensor = sys.argv[1], int(sys.argv[2])
files.quantize_file(f"{folder}/one.safetensors", f"{folder}/one_out.safetensors", {"*": "nf4"}, axis=-1)
before = peak()
limit = virtual() + 2 * tensor
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
begun = time.perf_counter()
report = files.quantize_file(f"{folder}/many.safetensors", f"{folder}/out.safetensors", {"*": "nf4"}, axis=-1)
print(json.dumps([before, peak(), report.nbytes_in, report.nbytes_out, time.perf_counter() - begun]))
"""


def sparse_checkpoint(path: Path, count: int, shape: tuple[int, int], filled: dict[int, np.ndarray]) -> None:
    """A valid file that takes no space on disk but for the tensors that are `filled`; the others are zeros."""
    size = 4 * shape[0] * shape[1]
    table = {
        f"w{i}": {"dtype": "F32", "shape": shape, "data_offsets": [i * size, (i + 1) * size]} for i in range(count)
    }
    header = json.dumps(table).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + count * size)
        for i, values in filled.items():
            file.seek(8 + len(header) + i * size)
            file.write(values.tobytes())


def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    """Two gigabytes pass through a process that may hold two tensors of 32 MB more than it needs for one."""
    shape, count = (2048, 4096), 64
    tensor = 4 * shape[0] * shape[1]
    values = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    sparse_checkpoint(tmp_path / "one.safetensors", 1, shape, {0: values})
    sparse_checkpoint(tmp_path / "many.safetensors", count, shape, {31: values, 63: values})
    # XLA's optimizations, which the other tests do without, decide how much memory the codec takes.
    flags = re.sub(r"--xla_backend_optimization_level=\S+", "", os.environ.get("XLA_FLAGS", ""))
    result = subprocess.run(
        [sys.executable, "-c", FRUGAL, str(tmp_path), str(tensor)],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    before, after, nbytes_in, nbytes_out, _ = json.loads(result.stdout)
    assert nbytes_in == count * tensor > 2_000_000_000
    assert nbytes_out == nbytes_in * 9 // 64
    assert after - before < tensor
    lazy, one = files.open_lazy(tmp_path / "out.safetensors"), files.load(tmp_path / "one_out.safetensors")["w0"]
    assert len(lazy) == count
    for i, wanted in ((31, True), (32, False), (63, True)):
        found = lazy[f"w{i}"]
        same = [bool((a == b).all()) for a, b in ((found.packed, one.packed), (found.absmax, one.absmax))]
        assert same == [wanted, wanted], i
    rows = ArrayNF4.quantize(jnp.asarray(values[-3:]), axis=-1)
    assert (one[-3:].packed == rows.packed).all()
    assert not jnp.any(lazy["w32"].absmax)
