"""Quantization-aware training, as the demonstration does it."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from demo import qat
from demo.judge import bits_per_token, materializations
from eformer.models import Config, init
from eformer.ops.quantization import quantize_tree

CONFIG = Config(vocabulary=32, width=64, layers=2, heads=4, kv_heads=2, hidden=96)


def test_training_lowers_the_loss_it_sees(key: jax.Array):
    params = init(dataclasses.replace(CONFIG, layers=1), key)
    config, tokens = dataclasses.replace(CONFIG, layers=1), np.tile(np.arange(16, dtype=np.int32), 40)
    windows = np.stack([tokens[i : i + 17] for i in range(8)])

    def judged(params: object) -> float:
        return bits_per_token(config, quantize_tree(params, "ternary", donate=False), windows)

    *_, (done, loss, trained) = qat.train(config, params, tokens, "ternary", steps=30, length=16, batch=4, rate=1e-2)
    assert done == 30
    assert loss < 1.0
    assert judged(trained) < 0.5 * judged(params)


def test_weights_that_go_dense_are_counted(key: jax.Array):
    tokens = np.arange(6, dtype=np.int32)[None]
    params = quantize_tree(init(CONFIG, key), "nf4", min_size=0)
    assert materializations(CONFIG, params, tokens) == 0
    params["layers"]["norm_mlp"] = quantize_tree(params["layers"]["norm_mlp"], "nf4", min_size=0, skip=())
    assert materializations(CONFIG, params, tokens) > 0
