"""Every architecture against `transformers` itself, on tiny random models. Needs the `oracle` extra: `make oracle`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer import models

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
