"""Packed arrays as folders of other programs, and back."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import eformer as ef
from eformer import serialization as files

from . import foreign_files as made
from .test_foreign import CASES
from .trees import assert_same

EXPORTS = {
    "gptq": ("gptq v2", "gptq, symmetric", "gptq, 3 bits", "gptq, act order", "gptq, one group", "awq"),
    "mlx": ("mlx, 4 bits", "mlx, 3 bits", "mlx, experts", "mlx mxfp4", "mlx mxfp8", "mlx nvfp4"),
    "fp8": ("fp8, tiles", "fp8, rows", "fp8, tensor", "fp8, e5m2", "fp8, exponents"),
    "compressed-tensors": (
        "pack-quantized", "pack-quantized, 8 bits", "pack-quantized, zero points", "pack-quantized, act order",
        "pack-quantized, ragged", "pack-quantized, 3 bits", "int-quantized", "fp8, tiles", "fp8, rows", "awq",
        "compressed-tensors mxfp4", "compressed-tensors mxfp8", "compressed-tensors nvfp4",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("to", "case"),
    [
        pytest.param(to, case, marks=() if case in (cases[0], "gptq, act order") else pytest.mark.thorough)
        for to, cases in EXPORTS.items()
        for case in cases
    ],
)
def test_export_comes_back_bit_for_bit(to: str, case: str, tmp_path: Path):
    source = made.written(tmp_path / "m", CASES[case](np.random.default_rng(3)), hidden_size=7)
    folder = files.export(source, tmp_path / "out", to)
    before, after = ef.load_checkpoint(source), ef.load_checkpoint(folder)
    assert set(before) == set(after)
    for name, array in before.items():
        assert_same(after[name], array)
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 7


def test_export_of_kernels_of_jax(tmp_path: Path):
    """A kernel (in, out) becomes a weight (out, in) with the same values."""
    w = jnp.asarray(np.random.default_rng(0).standard_normal((128, 64)), jnp.float32)
    packed = {"gptq": ef.quantize(w, dtype="int4", block_size=32), "fp8": ef.quantize(w, dtype="fp8")}
    for to, q in packed.items():
        tree = {"a": {"kernel": q, "bias": jnp.ones(64)}}
        found = ef.load_checkpoint(files.export(tree, tmp_path / to, to))
        assert set(found) == {"a.weight", "a.bias"}
        np.testing.assert_array_equal(np.asarray(found["a.weight"].materialize()).T, np.asarray(q.materialize()))


def test_exponents_become_the_numbers_they_stand_for(tmp_path: Path):
    """compressed-tensors has no FP8 with scales of e8m0."""
    source = made.written(tmp_path / "m", made.fp8(np.random.default_rng(0), e8m0=True))
    folder = files.export(source, tmp_path / "out", "compressed-tensors")
    before, after = (ef.load_checkpoint(path)["m.weight"] for path in (source, folder))
    assert after.scale.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(after.materialize()), np.asarray(before.materialize()))


def test_the_configuration_names_what_stays_dense(tmp_path: Path):
    """Other programs take every matrix for quantized that it does not name."""
    w = jnp.asarray(np.random.default_rng(0).standard_normal((128, 128)), jnp.float32)
    layer = {"up": {"weight": None}, "gate": {"weight": w}, "norm": {"weight": w[0]}}
    formats = {"gptq": "int4", "fp8": "fp8", "compressed-tensors": "fp8"}
    for to, dtype in formats.items():
        layer["up"]["weight"] = ef.quantize(w, axis=-1, dtype=dtype)
        folder = files.export({"layers": [layer], "lm_head": {"weight": w}}, tmp_path / to, to)
        stated = json.loads((folder / "config.json").read_text())["quantization_config"]
        dense = ["layers.0.gate", "lm_head"]
        if to == "gptq":
            assert stated["dynamic"] == {r"-:^layers\.0\.gate$": {}}
        elif to == "fp8":
            assert (stated["modules_to_not_convert"], stated["activation_scheme"]) == (dense, "dynamic")
        else:
            assert stated["ignore"] == dense
        assert_same(ef.load_checkpoint(folder)["layers.0.up.weight"], layer["up"]["weight"])


def test_sorted_inputs_are_said_to_be(tmp_path: Path):
    """Readers of compressed-tensors look for `weight_g_idx` only then."""
    source = made.written(tmp_path / "m", made.pack_quantized(np.random.default_rng(0), act_order=True))
    folder = files.export(source, tmp_path / "out", "compressed-tensors")
    (group,) = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"].values()
    assert group["weights"]["actorder"] == "group"


def test_a_layer_alone(tmp_path: Path):
    """Its tensors have nothing before their names, as in the state of one layer of PyTorch."""
    q = ef.quantize(jnp.ones((64, 64)), dtype="int4", block_size=32, axis=-1)
    found = ef.load_checkpoint(files.export({"weight": q, "bias": jnp.ones(64)}, tmp_path, "gptq"))
    assert set(found) == {"weight", "bias"}
    np.testing.assert_array_equal(np.asarray(found["weight"].materialize()), np.asarray(q.materialize()))


def test_names_say_which_axis_is_contracted(tmp_path: Path):
    """One scale for a tensor does not tell; scales along outputs, which nobody else has, are refused by name."""
    w = jnp.asarray(np.random.default_rng(0).standard_normal((128, 64)), jnp.float32)
    whole = ef.quantize(w, dtype="fp8", axis=(-2, -1))
    found = ef.load_checkpoint(files.export({"a": {"kernel": whole}, "b": {"weight": whole}}, tmp_path / "fp8", "fp8"))
    np.testing.assert_array_equal(np.asarray(found["a.weight"].materialize()).T, np.asarray(whole.materialize()))
    np.testing.assert_array_equal(np.asarray(found["b.weight"].materialize()), np.asarray(whole.materialize()))
    for name, axis in (("kernel", -1), ("weight", -2)):
        for options in ({"dtype": "int8"}, {"dtype": "int4", "block_size": 32}):
            q = ef.quantize(w, axis=axis, **options)
            with pytest.raises(
                ef.errors.CheckpointError, match=rf"along axis {axis}, the outputs of a '{name}'.*axis="
            ):
                files.export({"a": {name: q}}, tmp_path / "no", "compressed-tensors")


def test_values_keep_their_dtype(tmp_path: Path):
    """Scales in float32 of values in bfloat16, which products and `materialize` round to."""
    w = jnp.asarray(np.random.default_rng(0).standard_normal((64, 64)), jnp.bfloat16)
    for to, q in (("gptq", ef.quantize(w, dtype="int4", axis=-1)), ("fp8", ef.quantize(w, dtype="fp8", axis=-1))):
        found = ef.load_checkpoint(files.export({"a": {"weight": q}}, tmp_path / to, to))["a.weight"]
        assert found.dtype == jnp.bfloat16
        np.testing.assert_array_equal(found.materialize(), q.materialize())
    stated = {"dtype": "float16"}
    assert "torch_dtype" not in json.loads(
        (files.export({"a": q}, tmp_path, "fp8", config=stated) / "config.json").read_text()
    )


def test_tied_weights_are_written_under_each_name(tmp_path: Path):
    q = ef.quantize(jnp.ones((64, 64)), dtype="int4", block_size=32, axis=-1)
    source = ef.save(tmp_path / "tied.safetensors", {"a": {"weight": q}, "b": {"weight": q}, "c": jnp.ones(3)})
    before, after = (ef.load_checkpoint(p) for p in (source, files.export(source, tmp_path / "out", "gptq")))
    assert set(before) == set(after) == {"a.weight", "b.weight", "c"}
    assert before["a.weight"] is before["b.weight"]


def test_a_scale_of_the_tensor_is_written_as_its_reciprocal(tmp_path: Path):
    """compressed-tensors stores what values were multiplied by. Not every number is 1 over a float32."""
    w = jnp.asarray(np.random.default_rng(0).standard_normal((32, 64)), jnp.float32)
    q = ef.quantize(w, dtype="nvfp4", axis=-1)
    held = {"m": {"weight": q.replaced(tensor_scale=jnp.full((1, 1), 1 / jnp.float32(1.1)))}}
    found = ef.load_checkpoint(files.export(held, tmp_path / "held", "compressed-tensors"))["m.weight"]
    assert_same(found, held["m"]["weight"])
    between = jnp.nextafter(1 / jnp.float32(1.1), jnp.float32(1))
    tried = np.nextafter(np.float32(1.1), np.float32([0, 2]))
    assert between not in (1 / tried).tolist()
    with pytest.raises(ef.errors.CheckpointError, match=r"'m\.weight': cannot be.* holds only what is 1 / a float32"):
        files.export(
            {"m": {"weight": q.replaced(tensor_scale=jnp.full((1, 1), between))}}, tmp_path / "no", "compressed-tensors"
        )


def test_stacks_of_matrices_are_refused_where_they_cannot_be_read_back(tmp_path: Path):
    q = ef.quantize(jnp.ones((2, 64, 64)), dtype="int4", block_size=32, axis=-1)
    for to in ("gptq", "compressed-tensors"):
        with pytest.raises(ef.errors.CheckpointError, match=r"'m\.weight': cannot be.*has the shape \[2, 64, 64\]"):
            files.export({"m": {"weight": q}}, tmp_path / to, to)


def test_what_would_be_rounded_is_not_exported(tmp_path: Path):
    w = jnp.ones((64, 64))
    for to in EXPORTS:
        with pytest.raises(
            ef.errors.CheckpointError, match=rf"'q': cannot be written as {to}: it is ArrayNF4"
        ) as caught:
            files.export({"q": ef.quantize(w, dtype="nf4")}, tmp_path, to)
        assert not getattr(caught.value, "__notes__", [])  # of JAX, about frames that it left out
    with pytest.raises(ef.errors.CheckpointError, match=r"has no packed array"):
        files.export({"w": w}, tmp_path, "mlx")
    with pytest.raises(ValueError, match="allowed are 'gptq', 'mlx', 'fp8', 'compressed-tensors'"):
        files.export({"w": w}, tmp_path, "awq")
    two = {"a": ef.quantize(w, dtype="int4", block_size=32), "b": ef.quantize(w, dtype="int8", block_size=32)}
    with pytest.raises(ef.errors.CheckpointError, match=r"'b': would need.*'a' needs.*one configuration"):
        files.export(two, tmp_path, "gptq")
    assert not list(tmp_path.iterdir())
