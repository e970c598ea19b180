"""Every architecture against `transformers` itself, on tiny random models. Needs the `oracle` extra: `make oracle`."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eformer as ef
from eformer import models
from eformer.errors import CheckpointError

torch = pytest.importorskip("torch", reason="needs the oracle extra: make oracle")
transformers = pytest.importorskip("transformers", reason="needs the oracle extra: make oracle")

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16, "rope_theta": 500000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("Llama", {}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 32}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "qwen 2": ("Qwen2", {}),
    "qwen 2, windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "qwen 3": ("Qwen3", {"head_dim": 32}),
    "qwen 3, yarn": ("Qwen3", {"head_dim": 32, "rope_parameters": YARN}),
    "qwen 3 moe": ("Qwen3Moe", {**EXPERTS, "num_experts": 8, "head_dim": 32, "norm_topk_prob": True}),
    "qwen 3 moe, mixed": ("Qwen3Moe", {**EXPERTS, "num_experts": 8, "mlp_only_layers": [1], "norm_topk_prob": False}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "mistral, no window": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma": ("Gemma", {"head_dim": 32}),
    "gemma 2": ("Gemma2", {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 24}),
    "gemma 3": ("Gemma3", {"head_dim": 32, "sliding_window": 8, "sliding_window_pattern": 2}),
    "smollm 3": ("SmolLM3", {"no_rope_layer_interval": 2}),
}


def config_of(family: str, more: dict[str, Any]) -> Any:
    name = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
    return getattr(transformers, name)(**{**SIZES, **more}, attn_implementation="eager")


def made(case: str, folder: Path, **saved: Any) -> Any:
    """A model with random weights, biases and norms too, saved into a folder."""
    family, more = CASES[case]
    torch.manual_seed(len(case))
    model = getattr(transformers, f"{family}ForCausalLM")(config_of(family, more)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder, **saved)
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_are_equal(case: str, tmp_path: Path):
    reference = made(case, tmp_path)
    tokens = np.random.default_rng(0).integers(0, 96, (2, 40))
    with torch.no_grad():
        expected = reference(torch.tensor(tokens)).logits.numpy()
    model = models.load(tmp_path)
    config, params = model.config, model.params
    whole = jax.jit(models.forward, static_argnums=0)(config, params, jnp.asarray(tokens))
    limit = 2e-4 * np.abs(expected).max()
    np.testing.assert_allclose(whole, expected, atol=limit)
    run, cache = jax.jit(models.decode, static_argnums=0), models.make_cache(config, 2, 48)
    first, cache = run(config, params, jnp.asarray(tokens[:, :30]), cache, jnp.asarray(0))
    np.testing.assert_allclose(first, expected[:, :30], atol=limit)
    for place in range(30, 40):
        step, cache = run(config, params, jnp.asarray(tokens[:, place : place + 1]), cache, jnp.asarray(place))
        np.testing.assert_allclose(step[:, 0], expected[:, place], atol=limit)


def logits_of(model: models.Model, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(models.forward, static_argnums=0)(model.config, model.params, jnp.asarray(tokens)))


@pytest.mark.parametrize("case", ["llama 3", "qwen 3 moe", "gemma 3"])
def test_a_folder_to_a_folder(case: str, tmp_path: Path):
    """The quantized folder computes what `transformers` computes with the decoded weights."""
    reference = made(case, tmp_path / "source", max_shard_size="100KB")
    assert (tmp_path / "source" / "model.safetensors.index.json").exists()
    ef.quantize_folder(tmp_path / "source", tmp_path / "out", {"*o_proj*": "int8"}, min_size=0, max_shard_size="50KB")
    model = models.load(tmp_path / "out")
    kinds = {w.format for layer in model.params["layers"] for w in layer.values() if isinstance(w, ef.QuantizedArray)}
    assert kinds == {"nf4", "int8"}
    decoded = models.save_folder(tmp_path / "decoded", models.load(tmp_path / "out", dense=True))
    assert "quantization_config" not in json.loads((decoded / "config.json").read_text())
    reference = type(reference).from_pretrained(decoded, attn_implementation="eager").eval()
    tokens = np.random.default_rng(1).integers(0, 96, (1, 24))
    with torch.no_grad():
        expected = reference(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(logits_of(model, tokens), expected, atol=2e-4 * np.abs(expected).max())


def test_files_of_pytorch(tmp_path: Path):
    reference = made("llama 2", tmp_path / "safe")
    expected = models.load(tmp_path / "safe")
    (tmp_path / "safe" / "model.safetensors").unlink()
    state = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    torch.save(state, tmp_path / "safe" / "pytorch_model.bin")
    jax.tree.map(np.testing.assert_array_equal, models.load(tmp_path / "safe").params, expected.params)
    half = {n: t.bfloat16().mT.contiguous().mT if t.ndim == 2 else t.bfloat16() for n, t in state.items()}
    names = sorted(half)
    for number in (0, 1):
        file = tmp_path / "safe" / f"pytorch_model-{number + 1:05}-of-00002.bin"
        torch.save({name: half[name] for name in names[number::2]}, file)
    (tmp_path / "safe" / "pytorch_model.bin").unlink()
    weights = {name: f"pytorch_model-{i % 2 + 1:05}-of-00002.bin" for i, name in enumerate(names)}
    index = tmp_path / "safe" / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weights}))
    ef.quantize_folder(tmp_path / "safe", tmp_path / "out", "int8")
    found = models.load(tmp_path / "out")
    assert found.params["layers"][0]["q"].format == "int8"
    assert found.params["norm"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.params["norm"], expected.params["norm"].astype(jnp.bfloat16))


EXPORTS: dict[str, dict[str, Any]] = {
    "compressed-tensors": {"dtype": "int4", "block_size": 32},
    "fp8": {"dtype": "fp8", "block_size": 128},
}


@pytest.mark.parametrize("to", EXPORTS)
def test_it_runs_what_was_exported(to: str, tmp_path: Path):
    """Codes, scales, and a configuration that names what stayed dense: the head, the embedding, and one projection."""
    made("qwen 3", tmp_path / "source")
    rules = {"*embed*": None, "*lm_head*": None, "*.1.*o_proj*": None, "*proj*": {**EXPORTS[to], "axis": -1}}
    ef.quantize_folder(tmp_path / "source", tmp_path / "ours", rules, default=None, min_size=0)
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    folder = ef.serialization.export(tmp_path / "ours", tmp_path / "out", to, config=config)
    options = {}
    if to == "fp8":
        block = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=[128, 128])
        options["quantization_config"] = block
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    tokens = np.random.default_rng(1).integers(0, 96, (1, 16))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(
        logits_of(models.load(folder, dense=True), tokens), expected, atol=2e-4 * np.abs(expected).max()
    )


def test_tensors_of_pytorch_that_are_not_plain(tmp_path: Path):
    """Named when the file is opened, not by an error of torch when they are read."""
    file = tmp_path / "m.bin"
    for tensor, word in ((torch.eye(2).to_sparse(), "sparse_coo"), (torch.ones(2, device="meta"), "meta")):
        torch.save({"a": tensor}, file)
        with pytest.raises(CheckpointError, match=rf"m\.bin: tensor 'a': is a tensor of torch .*{word}"):
            ef.open_checkpoint(file)
    torch.save({"a": torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, file)
    with pytest.raises(CheckpointError, match=r"m\.bin: tensor 'a': 'float4_e2m1fn_x2' is not a dtype"):
        ef.open_checkpoint(file)


def test_a_pickle_that_runs_a_program_is_refused(tmp_path: Path):
    class Program:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    made("llama 2", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    for save in (torch.save, lambda what, path: path.write_bytes(pickle.dumps(what, protocol=2))):
        save({"model.norm.weight": Program()}, tmp_path / "model" / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match="weights_only=True"):
            models.load(tmp_path / "model")
        assert not (tmp_path / "ran").exists()


# peft asks transformers for something by its old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("case", ["llama 3", "gemma 2"])
def test_peft_reads_the_adapter(case: str, dora: bool, tmp_path: Path):
    peft = pytest.importorskip("peft")
    reference = made(case, tmp_path / "base")
    model, key = models.load(tmp_path / "base"), jax.random.key(0)
    params = ef.add_lora(model.params, {"layers/0/[qv]": 4, "layers/*/down": 2}, key=key, alpha=6, dora=dora)
    trainable, frozen = ef.split_trainable(params)
    filled = {name: x + 0.2 * jax.random.normal(key, x.shape) for name, x in trainable.items()}
    trained = dataclasses.replace(model, params=ef.merge(filled, frozen))
    models.save_adapter(tmp_path / "adapter", trained)
    theirs = peft.PeftModel.from_pretrained(reference, tmp_path / "adapter").eval()
    tokens = np.random.default_rng(2).integers(0, 96, (1, 16))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    ours = logits_of(trained, tokens)
    np.testing.assert_allclose(ours, expected, atol=2e-4 * np.abs(expected).max())
    assert np.abs(ours - logits_of(model, tokens)).max() > 0.1
    theirs.save_pretrained(tmp_path / "again")
    again = models.load_adapter(model, tmp_path / "again")
    np.testing.assert_allclose(logits_of(again, tokens), ours, atol=1e-4 * np.abs(ours).max())
    merged, _ = ef.merge_lora(trained.params)
    models.save_folder(tmp_path / "merged", dataclasses.replace(trained, params=merged))
    whole = type(reference).from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    with torch.no_grad():
        np.testing.assert_allclose(
            whole(torch.tensor(tokens)).logits.numpy(), expected, atol=2e-4 * np.abs(expected).max()
        )
