"""LoRA factors as `peft` stores them, and trained models as folders. tests/oracle reads them with `peft` itself."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import eformer as ef
from eformer.errors import CheckpointError
from eformer.models import Model, forward, load, load_adapter, save_adapter, save_folder

from . import folders


def adapted(model: Model, key: jax.Array, rules: str, rank: int = 2) -> Model:
    """Adapters of which neither factor is zero."""
    trainable, frozen = ef.split_trainable(ef.add_lora(model.params, rules, rank, key, alpha=6))
    keys = jax.random.split(key, len(trainable))
    filled = {n: 0.3 * jax.random.normal(k, x.shape) for k, (n, x) in zip(keys, trainable.items(), strict=True)}
    return dataclasses.replace(model, params=ef.merge(filled, frozen))


def logits(model: Model) -> np.ndarray:
    return np.asarray(jax.jit(forward, static_argnums=0)(model.config, model.params, jnp.arange(6)[None]))


def test_a_trained_adapter_and_the_merged_model(key: jax.Array, tmp_path: Path):
    source = folders.write(tmp_path / "source", "gemma 3")
    folders.write_tokenizer(source)
    model = load(source)
    trained = adapted(model, key, "layers/*/[qv]")
    expected = logits(trained)
    assert np.abs(expected - logits(model)).max() > 0.1
    save_adapter(tmp_path / "adapter", trained)
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["target_modules"]) == (2, 6.0, ["q_proj", "v_proj"])
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert stored["base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"].shape == (16, 2)
    np.testing.assert_allclose(logits(load_adapter(model, tmp_path / "adapter")), expected, atol=1e-5)
    merged, _ = ef.merge_lora(trained.params)
    save_folder(tmp_path / "merged", dataclasses.replace(trained, params=merged))
    again = load(tmp_path / "merged")
    np.testing.assert_allclose(logits(again), expected, atol=2e-4)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(again.params))
    assert again.tokenizer.encode("ab").tolist() == [4, 5]
    jax.tree.map(
        np.testing.assert_array_equal, again.params["layers"][0]["norm_q"], model.params["layers"][0]["norm_q"]
    )


def test_uneven_adapters_over_quantized_weights(key: jax.Array, tmp_path: Path):
    ef.quantize_folder(folders.write(tmp_path / "source", "qwen 3 moe"), tmp_path / "base", min_size=0)
    model = load(tmp_path / "base")
    once = adapted(model, key, "layers/0/[qk]", 3)
    trained = adapted(once, key, "layers/1/o")
    save_adapter(tmp_path / "adapter", trained)
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert len(said["target_modules"]) == 3
    assert said["rank_pattern"] == {"model.layers.1.self_attn.o_proj": 2}
    found = load_adapter(model, tmp_path / "adapter")
    np.testing.assert_allclose(logits(found), logits(trained), atol=1e-5)
    with pytest.raises(ValueError, match="has an adapter; merge_lora"):
        save_folder(tmp_path / "no", trained)
    saved = load(save_folder(tmp_path / "again", model))
    np.testing.assert_array_equal(logits(saved), logits(model))
    assert saved.params["layers"][1]["up"].format == "nf4"


def test_lengths_and_dropout_of_an_adapter(key: jax.Array, tmp_path: Path):
    """As `peft` names them: `use_dora`, `lora_dropout`, and a vector beside the factors."""
    model = load(folders.write(tmp_path / "source", "llama 3"))
    made = ef.add_lora(model.params, "layers/*/[qv]", 2, key, alpha=6, dora=True, dropout=0.125)
    trainable, frozen = ef.split_trainable(made)
    keys = jax.random.split(key, len(trainable))
    filled = {n: x + 0.3 * jax.random.normal(k, x.shape) for k, (n, x) in zip(keys, trainable.items(), strict=True)}
    trained = dataclasses.replace(model, params=ef.merge(filled, frozen))
    save_adapter(tmp_path / "adapter", trained)
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (said["use_dora"], said["lora_dropout"]) == (True, 0.125)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    q = trained.params["layers"][0]["q"]
    at = "base_model.model.model.layers.0.self_attn.q_proj"
    np.testing.assert_array_equal(stored[f"{at}.lora_magnitude_vector"], q.magnitude)
    a, b = (np.asarray(stored[f"{at}.lora_{x}.weight"], np.float64) for x in "AB")
    whole = np.asarray(model.params["layers"][0]["q"], np.float64).T + 3 * b @ a  # (out, in), as peft has it
    want = stored[f"{at}.lora_magnitude_vector"][:, None] * whole / np.linalg.norm(whole, axis=1, keepdims=True)
    np.testing.assert_allclose(q.materialize().T, want, atol=1e-5)
    found = load_adapter(model, tmp_path / "adapter")
    assert found.params["layers"][1]["v"].v.dropout == 0.125
    np.testing.assert_allclose(logits(found), logits(trained), atol=1e-5)
    mixed = [dict(layer) for layer in trained.params["layers"]]
    mixed[0]["q"] = mixed[0]["q"].v
    with pytest.raises(ValueError, match="DoRA for all or none"):
        save_adapter(tmp_path / "no", dataclasses.replace(trained, params={**trained.params, "layers": mixed}))


def test_what_cannot_be_written_or_read(key: jax.Array, tmp_path: Path):
    model = load(folders.write(tmp_path / "source", "qwen 3 moe"))
    with pytest.raises(ValueError, match="no adapter"):
        save_adapter(tmp_path / "adapter", model)
    with pytest.raises(ValueError, match="layer 0: adapters of experts"):
        save_adapter(tmp_path / "adapter", adapted(model, key, "layers/*/up"))
    with pytest.raises(CheckpointError, match="is the folder the model was loaded from"):
        save_folder(tmp_path / "source", model)
    save_adapter(tmp_path / "adapter", adapted(model, key, "layers/*/q"))
    file = tmp_path / "adapter" / "adapter_config.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps({**said, "use_dora": True}))
    with pytest.raises(CheckpointError, match=r"lora_magnitude_vector.*is missing; with use_dora"):
        load_adapter(model, tmp_path / "adapter")
    file.write_text(json.dumps({**said, "use_rslora": True}))
    first = load_adapter(model, tmp_path / "adapter").params["layers"][0]["q"]
    assert first.scale == pytest.approx(6 / 2**0.5)
    refused = {"bias": "all", "modules_to_save": ["lm_head"], "alora_invocation_tokens": [1], "use_qalora": True}
    for changed, told in (
        *(({name: value}, f"for {name}; adapters are read where") for name, value in refused.items()),
        (
            {"r": 4},
            r"q_proj.lora_A.weight': has the shape \[2, 32\]; adapter_config.json \(rank 4\).* ask for \[4, 32\]",
        ),
        ({"rank_pattern": {"q_proj": 1}}, r"adapter_config.json \(rank 1\)"),
    ):
        file.write_text(json.dumps({**said, **changed}))
        with pytest.raises(CheckpointError, match=told):
            load_adapter(model, tmp_path / "adapter")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"has no adapter_config.json, which says how the factors are scaled"):
        load_adapter(model, tmp_path / "adapter")
    with pytest.raises(TypeError, match="goes over a Model"):
        load_adapter(model.params, tmp_path / "adapter")
    with pytest.raises(FileNotFoundError, match=r"nobody/model does not exist.*hf download"):
        load("nobody/model")
