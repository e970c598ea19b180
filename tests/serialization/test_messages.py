"""What is said when a checkpoint cannot be written, read or placed as asked; and a reader that meets a writer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from safetensors.numpy import save_file

from eformer import serialization as files
from eformer.ops.quantization import quantize
from eformer.serialization.checkpoint import index as opening

from .trees import assert_same


def test_targets_no_file_can_have(tmp_path: Path):
    tree = {"w": jnp.ones((64, 4))}
    source = files.save(tmp_path / "in.safetensors", tree)
    for target, message in (
        (tmp_path, "is a folder. Name a file in it"),
        (tmp_path / "a" / "b", "there is no folder"),
        (tmp_path / "m.pt", "by its suffix .pt; .* Name it m.safetensors"),
    ):
        for write in (
            lambda t: files.save(t, tree),
            lambda t: files.save(t, tree, max_shard_size=100),
            lambda t: files.save_distributed(t, tree),
            lambda t: files.quantize_file(source, t, "nf4"),
        ):
            with pytest.raises(files.CheckpointError, match=message) as caught:
                write(target)
            assert str(caught.value).startswith(f"{target}: ")
            assert not any(word in str(caught.value) for word in (".part", ".journal"))
    assert os.listdir(tmp_path) == ["in.safetensors"]
    assert not [name for name in os.listdir(tmp_path.parent) if name.endswith((".part", ".journal"))]


def test_values_of_64_bits_name_the_setting(tmp_path: Path):
    with jax.enable_x64(True):
        tree = {kind: quantize(jnp.ones((64, 8), jnp.float64), dtype=kind) for kind in ("nf4", "int8", "binary")}
        file = files.save(tmp_path / "m.safetensors", tree)
        assert_same(files.load(file), tree)
    for kind in tree:
        with pytest.raises(files.CheckpointError, match=rf"'{kind}'.* float64 with jax_enable_x64 only: jax.config"):
            files.open_lazy(file)[kind]


def test_what_does_not_fit_like(tmp_path: Path):
    file = files.save(tmp_path / "m.safetensors", {"n": 3, "w": jnp.ones(2)})
    with pytest.raises(files.CheckpointError, match=r"'n': is 3 of type int, but like= has an array of shape \[\]"):
        files.load(file, like={"n": jnp.array(0), "w": jnp.ones(2)})
    with pytest.raises(files.CheckpointError, match=r"'w': has the shape \[2\], but like= has \[3\]"):
        files.load(file, like={"n": 0, "w": jnp.ones(3)})
    assert files.load(file, like={"n": 0, "w": np.ones(2, "f4")})["n"] == 3


def test_specs_without_patterns(tmp_path: Path):
    file = files.save(tmp_path / "m.safetensors", {"w": jnp.ones((8, 2))})
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    for specs in (PartitionSpec("d"), PartitionSpec("ab", "cd"), "ab", "*"):
        with pytest.raises(TypeError, match="names no leaves; give patterns and their specs, such as"):
            files.load_distributed(file, mesh, specs)  # pyright: ignore[reportArgumentType]
    for specs in (["ab"], [("w", PartitionSpec("d"), 1)]):
        with pytest.raises(TypeError, match="allowed are pairs"):
            files.load_distributed(file, mesh, specs)  # pyright: ignore[reportArgumentType]
    for specs in (None, {}, {"w": PartitionSpec("d")}, [("w", PartitionSpec("d"))]):
        assert_same(files.load_distributed(file, mesh, specs), {"w": jnp.ones((8, 2))})


@pytest.mark.parametrize("size", ["300B", None])
def test_a_reader_that_meets_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str | None):
    """Files of the old checkpoint vanish between reading the index and opening them: the new one is read."""
    old, new = ({f"w{i}": jnp.full(64, i + start) for i in range(4)} for start in (0.0, 10.0))
    path = tmp_path / "m.safetensors"
    files.save(path, old, max_shard_size="300B")
    saves = iter([new])
    read = opening.read_index

    def racing(index: Path) -> Any:
        found = read(index)
        for tree in saves:
            files.save(path, tree, max_shard_size=size)
        return found

    monkeypatch.setattr(opening, "read_index", racing)
    assert_same(files.load(path), new)
    if size is not None:
        next(tmp_path.glob("m-00002-of-*")).unlink()  # gone for good
        with pytest.raises(files.CheckpointError, match=r"cannot be opened: No such file.*Fetch all files"):
            files.load(path)


def test_shards_and_an_index_that_do_not_belong_together(tmp_path: Path):
    tree = {name: np.full((8, 8), float(i), np.float32) for i, name in enumerate("abc")}
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    save_file({"a": tree["a"], "b": tree["b"]}, tmp_path / first)
    save_file({"c": tree["c"]}, tmp_path / second)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": first, "c": second}}))
    with pytest.raises(
        files.CheckpointError, match=r"'b': is in the file, but \S+ does not name it.* remove the index"
    ):
        files.load_checkpoint(tmp_path)
    index.unlink()
    found = files.load_checkpoint(tmp_path)
    assert {name: float(value[0, 0]) for name, value in found.items()} == {"a": 0, "b": 1, "c": 2}
    save_file({"a": tree["a"], "c": tree["c"]}, tmp_path / second)
    with pytest.raises(files.CheckpointError, match=r"'a': is in two files. Remove the file that does not belong"):
        files.load_checkpoint(tmp_path)


def test_a_configuration_that_is_no_object(tmp_path: Path):
    source = tmp_path / "in"
    source.mkdir()
    save_file({"w": np.ones((64, 64), np.float32)}, source / "model.safetensors")
    (source / "config.json").write_text("[]")
    with pytest.raises(files.CheckpointError, match=r"config.json: does not hold an object"):
        files.quantize_folder(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"GGUF\x03\0\0\0", r"is a GGUF file, not a safetensors file. Read it with eformer.load_checkpoint"),
        (b"PK\x03\x04\0\0\0\0", r"is a zip file, as torch.save .* reads those of torch whose names end in .bin"),
        (b"version https://git-lfs", r"is a pointer of Git LFS, .* git lfs pull"),
        (b"<!DOCTYPE html>", "is a web page"),
    ],
)
def test_files_of_other_kinds_are_named(start: bytes, message: str, tmp_path: Path):
    file = tmp_path / "m.safetensors"
    file.write_bytes(start + bytes(100))
    with pytest.raises(files.CheckpointError, match=message):
        files.load(file)
