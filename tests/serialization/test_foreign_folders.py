"""Checkpoints of other programs as whole files and folders: streamed, sorted, split, on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import eformer as ef
from eformer import serialization as files
from eformer._core import ImplicitArray
from eformer.cli import main

from . import foreign_files as made
from .trees import assert_same

# -- streaming, reports, files -----------------------------------------------------------------------------------------


def test_scales_are_never_quantized(tmp_path: Path):
    """Neither from a file, where they belong to a packed weight, nor from a tree of stored tensors."""
    rng = np.random.default_rng(0)
    tensors, stated, values = made.gptq(rng, size=256, out=256)
    extra = {"e.weight": rng.standard_normal((128, 64)).astype(np.float32)}
    folder = made.written(tmp_path / "m", ({**tensors, **extra}, stated, values))
    report = files.quantize_file(folder, tmp_path / "out.safetensors", default="nf4", min_size=0)
    assert {leaf.name: leaf.format for leaf in report.leaves} == {
        "m.weight": "as it was", "m.bias": "dense", "e.weight": "nf4", "norm.weight": "dense"
    }  # fmt: skip
    found = ef.load(report.path)
    np.testing.assert_array_equal(np.asarray(found["m.weight"].materialize()), values)
    raw = {
        "fp8": {"weight_scale_inv": jnp.ones((64, 64))},
        "mlx": {"scales": jnp.ones((64, 64)), "biases": jnp.ones((64, 64))},
    }
    kept = ef.quantize_tree({**raw, "x": {"qzeros": jnp.ones((64, 64)), "kernel": jnp.ones((64, 64))}}, min_size=0)
    assert not any(isinstance(v, ImplicitArray) for group in ("fp8", "mlx") for v in kept[group].values())
    assert not isinstance(kept["x"]["qzeros"], ImplicitArray)
    assert isinstance(kept["x"]["kernel"], ImplicitArray)


# -- sorted inputs -----------------------------------------------------------------------------------------------------


def test_sorted_inputs_multiply_packed(tmp_path: Path):
    """Act order: products on both sides, gradients, transposes, stacks and files without making the weight dense."""
    rng = np.random.default_rng(0)
    tensors, stated, values = made.gptq(rng, act_order=True)
    q = ef.load_checkpoint(made.written(tmp_path / "m", (tensors, stated, values)))["m.weight"]
    x, y = (jnp.asarray(rng.standard_normal((3, n)), jnp.float32) for n in (96, 64))
    q = q.astype(jnp.float32)
    w = q.materialize()
    with ef.materialization_policy("error"):
        close(x @ q.T, x @ w.T)
        close(q @ x.T, w @ x.T)
        close(y @ q, y @ w)
        close(jax.grad(lambda x: jnp.sum((x @ q.T) ** 2))(x), jax.grad(lambda x: jnp.sum((x @ w.T) ** 2))(x))
        stack = ef.implicit(jnp.stack)([q.T, q.T])
        close(jax.lax.scan(lambda c, w: (c, x @ w), 0, stack)[1], jnp.stack([x @ w.T] * 2))
    assert_same(ef.load(ef.save(tmp_path / "s.safetensors", {"q": q}))["q"], q)
    np.testing.assert_array_equal(np.asarray(stack.materialize()[0]), np.asarray(q.T.materialize()))
    with pytest.raises(ValueError, match=r"does not sort axis -1"):
        type(q)(q.w, q.order[:-1])


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=0, atol=2e-5 * float(jnp.abs(wanted).max()))


# -- folders of several files, devices, the command line ---------------------------------------------------------------


def split_in_two(folder: Path, parts: Any) -> Path:
    """A folder with an index, in which a weight may lie in both files."""
    tensors, stated, values = parts
    made.written(folder, ({}, stated, values))
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    owners = {}
    for i in range(2):
        owners |= dict.fromkeys(names[i::2], f"part-{i}.safetensors")
        safetensors.numpy.save_file({name: tensors[name] for name in names[i::2]}, folder / f"part-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": owners}))
    return folder


def test_weights_in_several_files(tmp_path: Path):
    tensors, stated, values = made.gptq(np.random.default_rng(0), sym=True)
    folder = split_in_two(tmp_path / "m", (tensors, stated, values))
    lazy = ef.open_checkpoint(folder)
    assert isinstance(lazy, files.PackedCheckpoint)
    assert lazy.schemes == ["gptq"]
    assert list(lazy) == ["m.weight", "m.bias"]
    np.testing.assert_array_equal(np.asarray(lazy["m.weight"].materialize()), values)
    rows = lazy.read_slice("m.weight", (slice(8, 16), slice(None)))
    np.testing.assert_array_equal(np.asarray(rows.materialize()), values[8:16])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("x",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", None))
    found = lazy.read("m.weight", spread)
    assert found.is_sharded
    np.testing.assert_array_equal(np.asarray(found.materialize()), values)


def test_commands_take_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tensors, stated, values = made.gptq(np.random.default_rng(0), sym=True, size=128)
    folder = made.written(tmp_path / "m", (tensors, stated, values), hidden_size=64)

    def run(*argv: object) -> Any:
        assert main([*map(str, argv), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    found = run("inspect", folder)
    assert found["kind"] == "safetensors, gptq"
    assert {t["path"]: t["format"] for t in found["tensors"]}["m.weight"] == "int4"
    assert sum(t["nbytes"] for t in found["tensors"]) == sum(t.nbytes for t in tensors.values()) + 16
    assert {leaf["path"]: leaf["format"] for leaf in run("report", folder)["leaves"]}["m.weight"] == "int4"
    assert run("quantize", folder, tmp_path / "ours.safetensors")["formats"]["as it was"]["tensors"] == 1
    there = run("export", tmp_path / "ours.safetensors", tmp_path / "again", "--to", "gptq")
    assert_same(ef.load_checkpoint(there["folder"])["m.weight"], ef.load_checkpoint(folder)["m.weight"])
    assert main(["export", str(folder), str(tmp_path / "no"), "--to", "fp8"]) == 1
    assert "tensor 'm.weight': cannot be written as fp8: it is ArrayInt" in capsys.readouterr().err


def test_a_weight_that_is_dense_as_well(tmp_path: Path):
    tensors, stated, values = made.gptq(np.random.default_rng(0))
    folder = made.written(tmp_path / "m", ({**tensors, "m.weight": np.zeros(3, "f2")}, stated, values))
    with pytest.raises(
        ef.errors.CheckpointError, match=r"'m\.weight': is float16\[3\], a dense.*'m\.qweight' is the same"
    ):
        ef.load_checkpoint(folder)


def test_arguments_nobody_reads_are_refused(tmp_path: Path):
    with pytest.raises(TypeError, match=r"quantization='gptq' is a str, but must be a dict"):
        files.load_checkpoint(tmp_path, quantization="gptq")
    with pytest.raises(ValueError, match=r"quantization={'bit': 4} has none of the keys that are read: bits, "):
        files.load_checkpoint(tmp_path, quantization={"bit": 4})
    with pytest.raises(TypeError, match=r"""load_checkpoint\(\) has no argument dtype=: .*{"dtype": 'float32'}"""):
        files.load_checkpoint(tmp_path, dtype="float32")
