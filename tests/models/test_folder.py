"""Models from folders: logits that `transformers` gave (golden/folders.json), old and new configurations, bad ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eformer as ef
from eformer.errors import CheckpointError
from eformer.models import decode, forward, load, make_cache
from eformer.models._families import described
from eformer.serialization import export

from . import folders

FEW = ("llama 3", "qwen 2", "qwen 3 moe", "gemma 3")
REST = [case for case in folders.GOLDEN if case not in FEW]


@pytest.mark.parametrize("case", [*FEW, *(pytest.param(c, marks=pytest.mark.thorough) for c in REST)])
def test_logits_are_those_of_transformers(case: str, tmp_path: Path):
    golden, model = folders.GOLDEN[case], load(folders.write(tmp_path, case))
    tokens, config = jnp.asarray(golden["tokens"])[None], model.config
    expected = np.array(list(golden["logits"].values()))
    limit = 1e-4 * np.abs(expected).max()
    whole = jax.jit(forward, static_argnums=0)(config, model.params, tokens)[0]
    np.testing.assert_allclose(whole[jnp.array([0, 6, 11])], expected, atol=limit)
    run, cache = jax.jit(decode, static_argnums=0), make_cache(config, 1, 16)
    first, cache = run(config, model.params, tokens[:, :7], cache, jnp.asarray(0))
    np.testing.assert_allclose(first[0, 6], expected[1], atol=limit)
    for place in range(7, 12):
        last, cache = run(config, model.params, tokens[:, place : place + 1], cache, jnp.asarray(place))
    np.testing.assert_allclose(last[0, 0], expected[2], atol=limit)


def old(config: dict[str, Any]) -> dict[str, Any]:
    """The same configuration as it was written before rotary positions and layers had tables of their own."""
    config = {k: v for k, v in config.items() if k != "layer_types"}
    found = config.pop("rope_parameters")
    if "full_attention" in found:
        config["rope_local_base_freq"] = found["sliding_attention"]["rope_theta"]
        config["sliding_window_pattern"] = 2
        found = found["full_attention"]
    config["rope_theta"] = found.pop("rope_theta")
    if found["rope_type"] != "default":
        found["type"] = found.pop("rope_type")
        config["rope_scaling"] = found
    return config


@pytest.mark.parametrize("case", folders.GOLDEN)
def test_old_configurations_mean_the_same(case: str):
    config = folders.GOLDEN[case]["config"]
    older = old(json.loads(json.dumps(config)))
    assert described(older) == described(config)
    assert older != config


def test_every_head_has_keys_of_its_own_unless_it_is_said_otherwise():
    config = {k: v for k, v in folders.GOLDEN["llama 2"]["config"].items() if k != "num_key_value_heads"}
    assert described(config).config.kv_heads == config["num_attention_heads"]


def test_rotations_of_weights_alone_are_part_of_them(tmp_path: Path):
    stated = {"config_groups": {"R1": R3["config_groups"]["R1"]}}
    assert load(folders.write(tmp_path, "llama 2", quantization_config={"transform_config": stated})).params


def test_the_language_part_of_a_model_with_pictures(tmp_path: Path):
    plain = load(folders.write(tmp_path / "plain", "gemma 3"))
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    both = tmp_path / "both"
    both.mkdir()
    config = {"model_type": "gemma3", "text_config": folders.GOLDEN["gemma 3"]["config"], "eos_token_id": [1, 106]}
    (both / "config.json").write_text(json.dumps(config))
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file({**renamed, "vision_tower.patch.weight": np.ones((2, 2), np.float32)}, both / "model.safetensors")
    found = load(both)
    assert found.config == plain.config
    assert found.ends == (1, 106)
    jax.tree.map(np.testing.assert_array_equal, found.params, plain.params)


# Rotations that compressed-tensors applies while the model runs, and one that it applied to weights.
R3 = {
    "config_groups": {
        "R1": {"type": "hadamard", "apply": [{"targets": ["embed_tokens"], "location": "weight_output"}]},
        "R3": {"apply": [{"targets": ["attn"], "location": place} for place in ("q_attn", "k_cache")]},
    }
}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model_type": "gpt_neox"}, "type 'gpt_neox'; those that run here are llama, mistral"),
        ({"num_hidden_layers": 0}, "says 0 for num_hidden_layers, which must be a positive whole number"),
        ({"hidden_size": "32"}, "says '32' for hidden_size"),
        ({"hidden_act": "relu2"}, "says 'relu2' for hidden_act"),
        ({"num_key_value_heads": 3}, "describes a model that cannot be: heads=2 is not a multiple of kv_heads=3"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope'.* allowed are"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "need the numbers factor"),
        ({"layer_types": ["full_attention"], "sliding_window": 4}, "layer_types, which must name .* 2 times"),
        ({"num_hidden_layers": 1}, r"layers.1.*is not part of the model"),
        ({"num_hidden_layers": 3}, r"layers.2.*is missing"),
        ({"quantization_config": {"rotation_config": {"hadamard": 32}}}, "says rotation_config: inputs of matrices"),
        ({"quantization_config": {"transform_config": R3}}, "says transform_config of k_cache, q_attn: inputs"),
        ({"vocab_size": 25}, r"has the shape \[24, 32\], but config.json says \[25, 32\]"),
    ],
)
def test_what_does_not_fit_is_named(more: dict[str, Any], words: str, tmp_path: Path):
    with pytest.raises(CheckpointError, match=words):
        load(folders.write(tmp_path, "llama 2", **more))


@pytest.mark.parametrize(
    ("case", "lost"),
    [
        ("qwen 2", "layers.1.self_attn.k_proj.bias"),
        ("llama with biases", "layers.0.mlp.down_proj.bias"),
        ("qwen 3", "layers.1.self_attn.q_norm.weight"),
        ("gemma 3", "layers.0.self_attn.k_norm.weight"),
    ],
)
def test_a_lost_bias_or_norm_of_heads_is_not_taken_for_none(case: str, lost: str, tmp_path: Path):
    file = folders.write(tmp_path, case) / "model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if not name.endswith(lost)}, file)
    with pytest.raises(CheckpointError, match=f"{lost}': is missing"):
        load(tmp_path)


def test_a_folder_to_a_folder(tmp_path: Path):
    source = folders.write(tmp_path / "source", "qwen 3 moe")
    folders.write_tokenizer(source)
    done = ef.quantize_folder(source, tmp_path / "out", {"*experts*": "int8"}, default="nf4", min_size=0)
    kinds = {leaf.name: leaf.format for leaf in done.leaves}
    assert kinds["model.layers.0.self_attn.q_proj.weight"] == "nf4"
    assert kinds["model.layers.1.mlp.experts.3.up_proj.weight"] == "int8"
    assert kinds["model.layers.0.mlp.gate.weight"] == "dense"
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {k: v for k, v in said.items() if k != "quantization_config"} == folders.GOLDEN["qwen 3 moe"]["config"]
    assert said["quantization_config"]["quant_method"] == "eformer"
    assert {group["dtype"] for group in said["quantization_config"]["groups"]} == {"nf4", "int8"}
    quantized = load(tmp_path / "out")
    assert quantized.params["layers"][0]["gate"].format == "int8"
    assert quantized.tokenizer.encode("ab").tolist() == [4, 5]
    dense = load(tmp_path / "out", dense=True)
    tokens, config = jnp.arange(8)[None], quantized.config
    run = jax.jit(forward, static_argnums=0)
    expected = run(config, dense.params, tokens)
    np.testing.assert_allclose(run(config, quantized.params, tokens), expected, atol=1e-4 * float(abs(expected).max()))
    explained = ef.explain(lambda params: forward(config, params, tokens))(quantized.params)
    assert not explained.materializations


def test_other_ways_to_store_the_weights(tmp_path: Path):
    whole = folders.write(tmp_path / "whole", "qwen 2")
    expected, tensors = load(whole).params, load_file(whole / "model.safetensors")
    names = sorted(tensors)
    shards = tmp_path / "shards"
    shards.mkdir()
    (shards / "config.json").write_text((whole / "config.json").read_text())
    for i in range(3):
        part = {name: tensors[name] for name in names[i::3]}
        save_file(part, shards / f"model-{i + 1:05}-of-00003.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load(shards).params, expected)
    (shards / "pytorch_model.bin.index.json").write_text("{}")  # of weights that were not fetched
    (shards / "consolidated.safetensors.part").write_text("")
    jax.tree.map(np.testing.assert_array_equal, load(shards).params, expected)
    ef.quantize_folder(shards, tmp_path / "out", "int8", min_size=0, max_shard_size="4KB")
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert not list((tmp_path / "out").glob("*.bin*"))
    assert load(tmp_path / "out").params["layers"][1]["down"].format == "int8"
    (shards / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has 2 of 3 shards; number 2 is missing"):
        load(shards)


def test_checkpoints_of_other_programs(tmp_path: Path):
    source = folders.write(tmp_path / "source", "qwen 3")
    ef.quantize_folder(source, tmp_path / "ours", {"*_proj*": "fp8"}, default=None, min_size=0)
    export(tmp_path / "ours", tmp_path / "theirs", "fp8")
    ours, theirs = load(tmp_path / "ours"), load(tmp_path / "theirs")
    assert theirs.params["layers"][0]["q"].format == ours.params["layers"][0]["q"].format
    run, tokens = jax.jit(forward, static_argnums=0), jnp.arange(8)[None]
    expected = run(ours.config, ours.params, tokens)
    found = run(theirs.config, theirs.params, tokens)
    np.testing.assert_allclose(found, expected, atol=1e-5 * float(abs(expected).max()))


def test_scales_of_activations_beside_weights(tmp_path: Path):
    """Those of a server that rounds activations or the cache; beside a dense weight they are an error as any other."""
    source = folders.write(tmp_path / "source", "qwen 3")
    ef.quantize_folder(source, tmp_path / "ours", {"*_proj*": {"dtype": "int8", "axis": -1}}, default=None, min_size=0)
    export(tmp_path / "ours", tmp_path / "theirs", "compressed-tensors")
    file = tmp_path / "theirs" / "model.safetensors"
    expected, tensors = load(tmp_path / "theirs").params, load_file(file)
    scale = np.ones((), np.float32)
    known = ("q_proj.input_scale", "q_proj.activation_scale", "k_proj.k_scale", "v_proj.output_scale", "v_scale")
    save_file({**tensors, **{f"model.layers.0.self_attn.{name}": scale for name in known}}, file)
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "theirs").params, expected)
    save_file({**tensors, "model.embed_tokens.input_scale": scale}, file)
    with pytest.raises(CheckpointError, match=r"'model\.embed_tokens\.input_scale': is not part of the model"):
        load(tmp_path / "theirs")


def test_dtype_and_progress(tmp_path: Path):
    source, seen = folders.write(tmp_path, "llama 2"), []
    model = load(source, dtype="bfloat16", progress=seen.append)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.params)} == {"bfloat16"}
    assert seen[0].name == "model.embed_tokens.weight"
    assert seen[-1].done == seen[-1].total


@pytest.mark.parametrize("case", ["qwen 3 moe", pytest.param("mixtral", marks=pytest.mark.thorough)])
def test_experts_in_one_tensor(case: str, tmp_path: Path):
    """As MLX writes them: `switch_mlp`, with the same names of parts for all models."""
    source = folders.write(tmp_path / "m", case)
    expected = load(source)
    stored = load_file(source / "model.safetensors")
    router, experts, parts = described(folders.GOLDEN[case]["config"], source).family.experts
    for at in {name.partition(router)[0] for name in stored if name.endswith(f"{router}.weight")}:
        for our, part in parts.items():
            names = [f"{at}{experts}.{i}.{part}.weight" for i in range(len(stored[f"{at}{router}.weight"]))]
            together = np.stack([stored.pop(name) for name in names])
            stored[f"{at}{experts.removesuffix('experts')}switch_mlp.{our}_proj.weight"] = together
    save_file(stored, source / "model.safetensors")
    found = load(source)
    for ours, theirs in zip(jax.tree.leaves(found.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_array_equal(ours, theirs)
