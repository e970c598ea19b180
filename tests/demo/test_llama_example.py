"""examples/llama.py, which stands on its own, computes what `eformer.models` does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli import tiny

from eformer import models
from eformer.ops.quantization import quantize_tree

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama.py"


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("llama_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "llama_example", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.thorough
def test_both_agree(llama: Any, key: jax.Array, tmp_path: Path):
    config = models.Config(vocabulary=32, width=64, layers=2, heads=4, kv_heads=2, hidden=96, rope_base=1000.0)
    small = llama.Config(2, 64, 4, 2, 96, 32, 1000.0)
    params, tokens = models.init(config, key), jax.random.randint(key, (6,), 0, 32)
    run = jax.jit(llama.decode, static_argnums=0)
    for weights in (params, quantize_tree(params, min_size=0, donate=False)):
        expected = jax.jit(models.forward, static_argnums=0)(config, weights, tokens[None])[0]
        logits, cache = run(small, weights, tokens, llama.make_cache(small, 6), 0)
        np.testing.assert_allclose(logits, expected, atol=2e-5)
        assert cache.shape == (2, 2, 6, 2, 16)
    path = tiny.write(tmp_path / "tiny.gguf", "Q8_0", **{"llama.rope.freq_base": np.float32(500), **VOCABULARY})
    read, again = models.load(path, dense=True), llama.read_gguf(path)
    assert again[0] == (2, 64, 4, 2, 96, 8, 500)
    stacked = {**read.params, "layers": jax.tree.map(lambda *layers: jnp.stack(layers), *read.params["layers"])}
    assert jax.tree.structure(again[1]) == jax.tree.structure(stacked)
    for mine, other in zip(jax.tree.leaves(again[1]), jax.tree.leaves(stacked), strict=True):
        np.testing.assert_array_equal(mine, other)
    made = llama.generate(again[0], again[1], jnp.asarray([1, 2]), 5)
    text = jnp.concatenate([jnp.asarray([1, 2]), made])
    logits = np.asarray(models.forward(read.config, read.params, text[None]))[0, 1:-1]
    assert logits[np.arange(5), made] == pytest.approx(logits.max(axis=-1), rel=1e-4)


VOCABULARY = {"llama.vocab_size": np.uint32(len(tiny.TOKENS))}
