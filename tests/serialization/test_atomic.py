"""A file is complete or not there, whatever happens while it is written."""

from __future__ import annotations

import json
import os
import stat

import jax.numpy as jnp
import numpy as np
import pytest

from eformer import serialization as files
from eformer.serialization.checkpoint import save as saving
from eformer.serialization.streaming.output import Journal


def names(folder) -> list[str]:
    return sorted(os.listdir(folder))


def big(value: float) -> dict[str, jnp.ndarray]:
    return {name: jnp.full(1000, value) for name in "abc"}


def failing_at(count: int, monkeypatch):
    """The disk fills up when tensor `count` is written."""
    host, calls = saving.host, []

    def full(array, name):
        calls.append(name)
        if len(calls) > count:
            raise OSError(28, "No space left on device")
        return host(array, name)

    monkeypatch.setattr(saving, "host", full)


@pytest.mark.parametrize("size", [None, "5kB"])
@pytest.mark.parametrize("count", [0, 2])
def test_a_failed_save_leaves_the_old_one(tmp_path, monkeypatch, size, count):
    path = tmp_path / "m.safetensors"
    files.save(path, big(1), max_shard_size=size)
    before = names(tmp_path)
    with monkeypatch.context() as patched:
        failing_at(count, patched)
        with pytest.raises(OSError, match="No space"):
            files.save(path, big(2), max_shard_size=size)
    assert not [name for name in names(tmp_path) if name.startswith(".")]
    assert set(before) <= set(names(tmp_path))
    assert float(files.load(path)["c"][0]) == 1
    files.save(path, big(3), max_shard_size=size)
    assert float(files.load(path)["c"][0]) == 3


def test_the_commit_is_one_rename(tmp_path, monkeypatch):
    """Until the last rename readers see the old checkpoint, afterwards the new one; old files go when it is safe."""
    path = tmp_path / "m.safetensors"
    files.save(path, big(1), max_shard_size="5kB")
    old = names(tmp_path)
    seen = []
    replace = os.replace

    def watched(source, target):
        seen.append(float(files.load(path)["a"][0]))
        replace(source, target)
        seen.append(float(files.load(path)["a"][0]))

    monkeypatch.setattr(os, "replace", watched)
    files.save(path, big(2), max_shard_size="5kB")
    assert seen == [1] * (len(seen) - 1) + [2]
    assert len(names(tmp_path)) == len(old) == 4
    assert set(names(tmp_path)) & set(old) == {"m.safetensors.index.json"}
    seen.clear()
    files.save(path, big(4))  # several files to one
    assert seen == [2, 4]
    assert names(tmp_path) == ["m.safetensors"]
    seen.clear()
    files.save(path, big(5), max_shard_size="5kB")  # and back: the single file goes after the index has come
    assert float(files.load(path)["a"][0]) == 5
    assert "m.safetensors" not in names(tmp_path)


def test_tidying_up_deletes_only_our_own_files(tmp_path):
    """An old index may name anything."""
    (tmp_path / "precious.txt").write_text("keep me")
    (tmp_path / "m-00001-of-00001.safetensors").write_text("somebody else's shard")
    owners = {"a": "precious.txt", "b": "m-00001-of-00001.safetensors"}
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps({"weight_map": owners}))
    files.save(tmp_path / "m.safetensors", big(1))
    assert names(tmp_path) == ["m-00001-of-00001.safetensors", "m.safetensors", "precious.txt"]


def test_files_obey_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        path = files.save(tmp_path / "m.safetensors", big(1))
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_tensors_are_aligned(tmp_path):
    """JAX on the CPU takes what begins at a multiple of 64 bytes without a copy; the rest is small."""
    rng = np.random.default_rng(0)
    tree = {
        f"t{i}": jnp.asarray(rng.integers(0, 9, int(rng.integers(1, 200))), d)
        for i, d in enumerate(["f4", "u1", "f2", "i1", "f4", "u1"])
    }
    tree |= {f"a{i}": jnp.ones((64, i + 1), "bfloat16") for i in range(4)}
    lazy = files.open_lazy(files.save(tmp_path / "m.safetensors", tree))
    start = lazy._owners["a0"].header.data_start
    assert start % 64 == 0
    for name, array in tree.items():
        entry = lazy.entry(name)
        assert entry.start % array.dtype.itemsize == 0, name
        if name.startswith("a"):
            assert entry.start % 64 == 0, name
            there = lazy._owners[name].view(name).__array_interface__["data"][0]
            assert lazy[name].unsafe_buffer_pointer() == there


@pytest.mark.parametrize("size", ["", "x", "0", "-3", "1 parsec", "1e9"])
def test_sizes_are_checked(size):
    with pytest.raises(ValueError, match="is not a size"):
        saving.byte_count(size)


def test_a_journal_that_cannot_be_begun_lets_go_of_its_lock(tmp_path, monkeypatch):
    target = tmp_path / "out.safetensors"

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            Journal(target, "run")
    Journal(target, "run").close()
