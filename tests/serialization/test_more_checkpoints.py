"""Checkpoints as other programs really name them: several configurations in one, experts in one tensor, odd names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import eformer as ef
from eformer._core import ImplicitArray

from . import foreign_files as made

Tensors = dict[str, np.ndarray]
Case = tuple[Tensors, dict[str, Any], dict[str, np.ndarray]]  # tensors, what config.json says, values by name
F8 = ml_dtypes.float8_e4m3fn


def seeded(seed: int = 0) -> Any:
    return np.random.default_rng(seed)


def several(config: Any = None, /, key: str = "quantization_config", **weights: Any) -> Case:
    """Weights of `foreign_files`, by the names of their layers."""
    stored, values = {}, {}
    for stem, (tensors, _, wanted) in weights.items():
        stored |= {stem.replace("__", ".") + name[1:]: array for name, array in tensors.items()}
        values[f"{stem.replace('__', '.')}.weight"] = wanted
    return stored, {} if config is None else {key: config}, values


def fp8(
    shape: tuple[int, ...], scale: tuple[int, ...], codes: str, name: str, tiles: bool = False, leaf: str = ""
) -> Case:
    rng = seeded(len(shape))
    stored, factor = rng.standard_normal(shape).astype(F8), np.abs(rng.standard_normal(scale)).astype(np.float32)
    spread = factor.reshape(*factor.shape, *[1] * (len(shape) - factor.ndim)) if factor.ndim else factor
    if tiles:
        for axis in (-2, -1):
            spread = made.repeated(spread, 128, shape[axis], axis)
    return {codes: stored, name: np.asarray(factor)}, {}, {leaf or codes: stored.astype(np.float32) * spread}


def nvfp4_experts(turned: bool) -> Case:
    """Of ModelOpt: (experts, in / 2, out) in one tensor for all, or (experts, out, in / 2) with a number for each."""
    rng = seeded()
    codes = rng.integers(0, 16, (2, 8, 64), dtype=np.uint8)
    scale = np.abs(rng.standard_normal((2, 8, 4))).astype(F8)
    whole = np.abs(rng.standard_normal(() if turned else 2)).astype(np.float32)
    each = scale.astype(np.float32) * whole.reshape(-1, 1, 1)
    values, packed = made.E2M1[codes] * made.repeated(each, 16, 64), made.nibbles(codes)
    if turned:
        packed, scale, values = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (packed, scale, values))
    names = ("e.up", "e.up_weight_scale", "e.up_weight_scale_2")
    names = names if turned else ("e.up.weight", "e.up.weight_scale", "e.up.weight_scale_2")
    return dict(zip(names, (packed, scale, np.asarray(whole)), strict=True)), {}, {names[0]: values}


def gptq(config: dict[str, Any], **weights: Any) -> Case:
    return several({"quant_method": "gptq", "bits": 4, "group_size": 32, **config}, **weights)


def autoround(config: dict[str, Any], weight: Any) -> Case:
    return several({"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, **config}, m=weight)


def turned_names(case: Any, **names: str) -> Case:
    tensors, stated, values = case
    found = {names.get(name.removeprefix("m.").replace(".", "_"), name): array for name, array in tensors.items()}
    return found, {"quantization_config": stated}, {names.get("leaf", "m.weight"): values}


MX = made.in_blocks("mxfp4")
CASES: dict[str, Any] = {
    "gptq: dynamic": lambda: gptq(
        {"sym": True, "dynamic": {"-:.*gate": {}, "+:.*down": {"bits": 8}, "up": {"bits": 3, "sym": False}}},
        q=made.gptq(seeded(), sym=True),
        down=made.gptq(seeded(), bits=8, group=16, sym=True),
        up=made.gptq(seeded(), bits=3),
    ),
    "gptq: one of another kind": lambda: gptq(
        {"x.up": {"bits": 8}}, q=made.gptq(seeded()), x__up=made.gptq(seeded(), bits=8)
    ),
    "gptq: format": lambda: gptq({"format": "gptq_v2", "method": "gptq"}, q=made.gptq(seeded(), v2=True)),
    "gptq: nothing said": lambda: gptq({"sym": None, "checkpoint_format": None}, q=made.gptq(seeded())),
    "autoround: bits of one weight": lambda: several(
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "bits": 4,
            "group_size": 32,
            "sym": True,
            "extra_config": {"up": {"bits": 8, "group_size": 16}},
        },
        q=made.gptq(seeded(), sym=True),
        up=made.gptq(seeded(), bits=8, group=16, sym=True),
    ),
    "autoround": lambda: autoround({"packing_format": "auto_round"}, made.gptq(seeded(), v2=True)),
    "autoround: as older versions say it": lambda: autoround(
        {"quant_method": "intel/auto-round", "backend": "auto_round:exllamav2"}, made.gptq(seeded(), v2=True)
    ),
    "autoround: a part of names": lambda: several(
        {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": True, "extra_config": {"attn": {"bits": 8}}},
        x__attn__q=made.gptq(seeded(), bits=8, group=32, sym=True),
        up=made.gptq(seeded(), size=96, group=64, sym=True),
    ),
    "autoround: gptq": lambda: autoround({"packing_format": "auto_round:gptq"}, made.gptq(seeded())),
    "autoround: not said": lambda: autoround({}, made.gptq(seeded())),
    "autoround: awq": lambda: autoround({"packing_format": "auto_round:auto_awq"}, made.awq(seeded())),
    "mlx: floats, and affine": lambda: several(
        {"mode": "mxfp4", "bits": 4, "group_size": 32, "q": {"group_size": 64, "bits": 8}, "x.up": {"bits": 4}},
        "quantization",
        down=MX(seeded(), by="mlx"),
        q=made.mlx(seeded(), bits=8),
        x__up=made.mlx(seeded()),
    ),
    "mlx: affine, and floats": lambda: several(
        {"bits": 4, "group_size": 64, "gate": False, "down": {"mode": "mxfp4", "group_size": 32, "bits": 4}},
        "quantization",
        down=MX(seeded(), by="mlx"),
        q=made.mlx(seeded()),
    ),
    "a layer alone": lambda: turned_names(
        made.gptq(seeded()), qweight="qweight", qzeros="qzeros", scales="scales", g_idx="g_idx", leaf="weight"
    ),
    "quark": lambda: turned_names(MX(seeded(), by="quark")),
    "experts of DeepSeek-V4": lambda: turned_names(
        in_int8(MX(seeded(), by="quark")), weight="e.0.w1.weight", weight_scale="e.0.w1.scale", leaf="e.0.w1.weight"
    ),
    "mxfp8, e8m0": lambda: several(m=e8m0(made.in_blocks("mxfp8")(seeded(), by="compressed-tensors"))),
    "gpt-oss of OpenAI": lambda: turned_names(
        made.mxfp4_experts(seeded()), weight_blocks="b.w.blocks", weight_scales="b.w.scales", leaf="b.w"
    ),
    "experts: fp8, tiles": lambda: fp8((3, 200, 300), (3, 2, 3), "e.up", "e.up_scale_inv", tiles=True),
    "experts: fp8, tensors": lambda: fp8((3, 8, 16), (3,), "e.up", "e.up_scale_inv"),
    "experts: fp8, rows": lambda: fp8((3, 8, 16), (3, 8, 1), "e.weight", "e.weight_scale"),
    "experts: fp8, columns": lambda: fp8((3, 8, 16), (3, 1, 16), "e.up", "e.up_scale"),
    **{
        f"fp8: {name}": lambda name=name: fp8((8, 16), (), "q.weight", f"q.{name}")
        for name in ("qscale_weight", "scale_weight", "scale")
    },
    "torchao: fp8": lambda: fp8((8, 16), (8, 1), "q._weight_qdata", "q._weight_scale", leaf="q.weight"),
    "experts: nvfp4": lambda: nvfp4_experts(turned=False),
    "experts: nvfp4, (in, out)": lambda: nvfp4_experts(turned=True),
}


def in_int8(case: Any) -> Any:
    tensors, stated, values = e8m0(case)
    return {**tensors, "m.weight": tensors["m.weight"].view(np.int8)}, stated, values


def e8m0(case: Any) -> Any:
    tensors, stated, values = case
    return {**tensors, "m.weight_scale": tensors["m.weight_scale"].view(ml_dtypes.float8_e8m0fnu)}, stated, values


def written(folder: Path, case: Case) -> Path:
    tensors, stated, _ = case
    folder.mkdir()
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(stated))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_equations(name: str, tmp_path: Path):
    case = CASES[name]()
    folder = written(tmp_path / "m", case)
    found = ef.load_checkpoint(folder)
    ef.quantize_file(folder, tmp_path / "ours.safetensors", min_size=0)
    kept = ef.load(tmp_path / "ours.safetensors")
    for leaf, values in case[2].items():
        assert isinstance(found[leaf], ImplicitArray)
        for array in (found[leaf], kept[leaf]):
            np.testing.assert_array_equal(np.asarray(array.materialize()), values.astype(array.dtype))


def ones(dtype: Any, *shape: int) -> np.ndarray:
    return np.ones(shape, dtype)


REFUSED: dict[str, tuple[Tensors, dict[str, Any], str]] = {
    "integers with exponents": (
        {"q.weight_packed": ones("u1", 2, 32), "q.weight_scale": ones("u1", 2, 2)},
        {"quant_method": "auto-round", "data_type": "mx_int"},
        r"'q\.weight_packed'.*data_type='mx_int', integers.*mxfp4 is read\. Take",
    ),
    "7 bits": (
        {"q.weight_packed": ones("i4", 2, 7), "q.weight_scale": ones("f4", 2, 1), "q.weight_shape": np.array([2, 32])},
        {"config_groups": {"a": {"weights": {"num_bits": 7}}}},
        r"config_groups says \[7\]\. Quantize the dense",
    ),
    "scales nobody knows": (
        {"q.weight": ones(F8, 8, 8), "q.weight_scales": ones("f4", 8)},
        {},
        r"'q\.weight'.*'q\.weight_scales'.*no layout",
    ),
    "quanto": (
        {"q.weight._data": ones("i1", 8, 8), "q.weight._scale": ones("f4", 8)},
        {},
        r"'q\.weight\._data': is int8\[8, 8\]",
    ),
    "tensorrt-llm": (
        {"q.weight": ones(F8, 8, 8), "q.weights_scaling_factor": ones("f4", 1)},
        {},
        r"'q\.weight': is float8_e4m3fn\[8, 8\] beside 'q\.weights_scaling_factor'",
    ),
    "bitsandbytes without its state": (
        {"q.weight": ones("u1", 8, 1), "q.weight.absmax": ones("f4", 1)},
        {},
        r"'q\.weight': is uint8\[8, 1\] beside 'q\.weight\.absmax'",
    ),
    "no scale at all": (
        {"q.weight": ones("i1", 8, 8)},
        {"quant_method": "compressed-tensors"},
        r"'q\.weight': is int8\[8, 8\], but nothing beside it.*compressed-tensors",
    ),
    "torchao": (
        {"q._weight_qdata": ones("i1", 8, 8), "q._weight_scale": ones("f4", 8)},
        {},
        r"'q\._weight_(qdata|scale)'",
    ),
    "exl2": ({"q.q_weight": ones("i4", 8, 8), "q.q_scale": ones("i4", 8, 1)}, {}, r"'q\.q_weight': is int32\[8, 8\]"),
    "hqq": (
        {"q.W_q": ones("u1", 8, 8), "q.scale": ones("f4", 8, 1)},
        {"quant_method": "hqq"},
        r"'q\.W_q'.*quant_method='hqq'",
    ),
    "sparse": (
        {"q.weight.compressed": ones("f4", 8, 8), "q.weight.bitmask": ones("u1", 8, 2)},
        {"quant_method": "compressed-tensors"},
        r"'q\.weight\.bitmask': says where the values of a sparse weight",
    ),
    "gemv": (
        {"q.qweight": ones("i4", 64, 16), "q.qzeros": ones("i4", 64, 1), "q.scales": ones("f2", 64, 8)},
        {"quant_method": "awq", "version": "gemv"},
        r"makes none of awq: .*version='gemv'",
    ),
    "zero points of version 2": (
        several(m=made.gptq(seeded(), v2=True, sym=True))[0],
        {"quant_method": "gptq", "sym": True, "dynamic": {"x": {}}},
        r"'m\.qzeros': holds 8 everywhere.*gptq_v2",
    ),
    "two conventions": (
        {"q.weight": ones(F8, 8, 8), "q.weight_scale": ones("f4", 8), "q.weight_scale_inv": ones("f4", 8)},
        {},
        r"'q\.weight_scale': is float32\[8\], part of a quantized weight",
    ),
    "zero points beside FP8": (
        {"q.weight": ones(F8, 8, 8), "q.weight_scale": ones("f4", 8), "q.weight_zp": ones("f4", 8)},
        {"quant_method": "auto-round"},
        r"'q\.weight_zp': is float32\[8\] beside 'q\.weight', which is read without it.*auto-round",
    ),
    "a second scale": (
        {"q.weight": ones(F8, 8, 8), "q.weight_scale": ones("f4", 8), "q.weight_scale_outer": ones("f4", 1)},
        {},
        r"'q\.weight_scale_outer'.*read without it",
    ),
    "experts with other scales": (
        {"e.up": ones(F8, 3, 8, 8), "e.up_scale_inv": ones("f4", 2, 1, 1)},
        {},
        r"'e\.up_scale_inv'.*\[3, 1, 1\] for each matrix",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_read_is_refused(what: str, tmp_path: Path):
    tensors, stated, message = REFUSED[what]
    folder = written(tmp_path / "m", (tensors, {"quantization_config": stated}, {}))
    with pytest.raises(ef.errors.CheckpointError, match=message) as caught:
        ef.load_checkpoint(folder)
    assert len(str(caught.value)) < 1200


def test_narrow_values_without_scales_stay_as_they_are(tmp_path: Path):
    """Weights that were cast, indices, what activations were scaled by, and values that were rounded and kept."""
    tensors = {
        "a.weight": ones(F8, 8, 8),
        "a.input_scale": ones("f4", 1),
        "b.relative_position_index": ones("i8", 8, 8),
        "b.logit_scale": ones("f4", 8, 1),
        "c.weight": ones(ml_dtypes.bfloat16, 8, 8),
        "c.weight_scale": ones("f4", 8, 1),
        "c.weight_zero_point": ones("i1", 8, 1),
    }
    folder = written(tmp_path / "m", (tensors, {}, {}))
    assert {name: (x.shape, x.dtype) for name, x in ef.load_checkpoint(folder).items()} == {
        name: (x.shape, x.dtype) for name, x in tensors.items()
    }


def test_shards_without_an_index_have_a_configuration_too(tmp_path: Path):
    tensors, stated, values = made.mlx(seeded())
    names = sorted(tensors)
    for i, part in enumerate((names[:1], names[1:]), 1):
        safetensors.numpy.save_file({n: tensors[n] for n in part}, tmp_path / f"model-0000{i}-of-00002.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"llm_config": {"quantization": stated}}))
    np.testing.assert_array_equal(np.asarray(ef.load_checkpoint(tmp_path)["m.weight"].materialize()), values)


def test_of_two_checkpoints_in_a_folder_the_usual_one(tmp_path: Path):
    """Mistral has its own files beside those of Hugging Face, each with an index."""
    for stem in ("consolidated", "model"):
        name = f"{stem}-00001-of-00001.safetensors"
        safetensors.numpy.save_file({stem: ones("f4", 2)}, tmp_path / name)
        (tmp_path / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": {stem: name}}))
    assert set(ef.load_checkpoint(tmp_path)) == {"model"}
    for index in tmp_path.glob("*.json"):
        index.unlink()
    safetensors.numpy.save_file({"other": ones("f4", 2)}, tmp_path / "adapter_model.safetensors")
    assert set(ef.load_checkpoint(tmp_path)) == {"model"}
    (tmp_path / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(ef.errors.CheckpointError, match=r"2 checkpoints \(adapter_model.*consolidated-0.*; name one"):
        ef.load_checkpoint(tmp_path)


def test_what_mlx_says_counts_for_its_weights(tmp_path: Path):
    """A model that was FP8 before it was converted, whose configuration still says so."""
    tensors, stated, values = made.mlx(seeded())
    old = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = written(tmp_path / "m", (tensors, {"quantization_config": old, "quantization": stated}, {}))
    found = ef.load_checkpoint(folder)["m.weight"]
    np.testing.assert_array_equal(np.asarray(found.materialize()), values)
    x = jnp.ones((1, found.shape[1]), found.dtype)
    with ef.materialization_policy("error"):
        assert (x @ found.T).shape == (1, found.shape[0])
