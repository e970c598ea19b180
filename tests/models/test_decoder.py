"""The decoder: its cache, its groups of queries, its layers, with dense and quantized weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer import QuantizedCache, materialization_policy, quantize
from eformer._formats.permuted.array import PermutedArray
from eformer.jaximus import explain
from eformer.models import Config, Model, decode, forward, fuse, generate, init, make_cache
from eformer.models._decoder import _experts
from eformer.ops.quantization import dequantize_tree, quantize_tree

CONFIG = Config(vocabulary=32, width=64, layers=2, heads=4, kv_heads=2, hidden=96)


def test_a_cache_changes_nothing(key: jax.Array):
    params, tokens = init(CONFIG, key), jax.random.randint(key, (2, 7), 0, 32)
    for weights in (params, quantize_tree(params, "int8", donate=False, min_size=0)):
        whole = jax.jit(forward, static_argnums=0)(CONFIG, weights, tokens)
        cache = make_cache(CONFIG, 2, 9)
        run = jax.jit(decode, static_argnums=0)
        first, cache = run(CONFIG, weights, tokens[:, :4], cache, jnp.asarray(0))
        pieces = [first]
        for place in range(4, 7):
            step, cache = run(CONFIG, weights, tokens[:, place : place + 1], cache, jnp.asarray(place))
            pieces.append(step)
        np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, atol=2e-5)


def test_nothing_looks_ahead_and_order_matters(key: jax.Array):
    params, tokens = init(CONFIG, key), jax.random.randint(key, (1, 6), 0, 32)
    run = jax.jit(forward, static_argnums=0)
    whole = run(CONFIG, params, tokens)
    changed = run(CONFIG, params, tokens.at[0, 4].add(1))
    np.testing.assert_array_equal(whole[:, :4], changed[:, :4])
    assert jnp.abs(whole[:, 4:] - changed[:, 4:]).min() > 0
    swapped = run(CONFIG, params, tokens[:, ::-1])
    assert jnp.abs(swapped[:, -1] - whole[:, -1]).max() > 1e-3


def test_quantized_weights_compute_what_their_dense_values_do(key: jax.Array):
    rules = {"embedding": "int8", "*/[qk]": "ternary", "*/[vo]": "binary", "*": "nf4"}
    quantized = quantize_tree(init(CONFIG, key), rules, min_size=0)
    tokens = jax.random.randint(key, (1, 5), 0, 32)
    run = jax.jit(forward, static_argnums=0)
    expected = run(CONFIG, dequantize_tree(quantized), tokens)
    np.testing.assert_allclose(run(CONFIG, quantized, tokens), expected, atol=1e-4)
    assert not explain(lambda params: forward(CONFIG, params, tokens))(quantized).materializations


def test_generation_is_what_forward_says(key: jax.Array):
    params, prompt = init(CONFIG, key), np.array([3, 1, 4], np.int32)
    made = np.concatenate(list(generate(Model(CONFIG, params), prompt, 18)))
    assert made.shape == (18,)
    text = np.concatenate([prompt, made])
    logits = np.asarray(forward(CONFIG, params, jnp.asarray(text)[None]))[0, 2:-1]
    assert logits[np.arange(18), made] == pytest.approx(logits.max(axis=-1), abs=1e-4)
    end = int(made[17])
    ended = np.concatenate(list(generate(Model(CONFIG, params, end=end), prompt, 18)))
    assert ended.tolist() == made.tolist()[: made.tolist().index(end)]


def listed(params: Any) -> Any:
    """The same model with a list of layers."""
    layers = [jax.tree.map(lambda part, i=i: part[i], params["layers"]) for i in range(CONFIG.layers)]
    return {**params, "layers": layers}


@pytest.mark.parametrize(("kind", "limit"), [(None, 1e-5), ("int8", 0.03), ("int8+int4", 0.5)])
def test_caches_in_every_format_and_shape(key: jax.Array, kind: str | None, limit: float):
    """Stacked layers, a list of them with a stacked cache, and with a list of caches: the same logits."""
    params, tokens = init(CONFIG, key), jax.random.randint(key, (2, 9), 0, 32)
    run, found = jax.jit(decode, static_argnums=0), []
    for weights, is_list in ((params, False), (listed(params), False), (listed(params), True)):
        cache, logits = make_cache(CONFIG, 2, 12, format=kind, listed=is_list), []
        with materialization_policy("error"):
            for start, end in ((0, 5), (5, 6), (6, 9)):
                part, cache = run(CONFIG, weights, tokens[:, start:end], cache, jnp.asarray(start))
                logits.append(part)
        kinds = {type(leaf) for leaf in jax.tree.leaves(cache, is_leaf=lambda x: hasattr(x, "shape"))}
        assert (QuantizedCache in kinds) == (kind is not None)
        found.append(jnp.concatenate(logits, axis=1))
    exact = forward(CONFIG, params, tokens)
    assert jnp.abs(found[0] - exact).max() < limit * jnp.abs(exact).max()
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"layers": 0}, "layers=0 is not allowed"),
        ({"heads": 3}, "heads=3 is not a multiple of kv_heads=2"),
        ({"windows": (4,)}, "windows has 1 entries for 2 layers"),
        ({"ropes": (None,) * 3}, "ropes has 3 entries for 2 layers"),
        ({"windows": (4, 0)}, "hides every token"),
        ({"head_size": 7}, "head_size=7 is odd"),
        ({"activation": "tanh"}, "activation='tanh' is unknown; allowed are silu"),
    ],
    ids=lambda x: "" if isinstance(x, str) else next(iter(x)),
)
def test_impossible_models(wrong: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(CONFIG, **{"head_size": 0, **wrong})
    assert dataclasses.replace(CONFIG, head_size=7, ropes=(None, None)).head_size == 7


def test_caches_that_do_not_fit(key: jax.Array):
    params, tokens = init(CONFIG, key), jnp.zeros((1, 2), int)
    with pytest.raises(ValueError, match="stacked layers take a cache of stacked layers"):
        decode(CONFIG, params, tokens, make_cache(CONFIG, 1, 4, listed=True), jnp.asarray(0))
    with pytest.raises(ValueError, match=f"one of 1 layers, the model has {CONFIG.layers}"):
        decode(CONFIG, listed(params), tokens, make_cache(CONFIG, 1, 4, listed=True)[:1], jnp.asarray(0))
    with pytest.raises(
        ValueError, match="format='fp8' is not a format of caches; allowed are 'int8', 'int8\\+int4', 'int4' and None"
    ):
        make_cache(CONFIG, 1, 4, format="fp8")


@pytest.mark.parametrize("options", [{"dtype": "nf4"}, {"dtype": "int8", "axis": 0}, None], ids=str)
def test_joined_matrices_compute_what_they_do_apart(key: jax.Array, options: dict[str, Any] | None):
    params, tokens = init(CONFIG, key), jax.random.randint(key, (2, 5), 0, 32)
    layers = dict(params["layers"])
    matrices = [name for name in layers if not name.startswith("norm")]
    if options is not None:
        layers |= {name: quantize(layers[name], **options) for name in matrices}
    layers |= {f"{part}_bias": jax.random.normal(key, (2, layers[part].shape[-1])) for part in "qkv"}
    whole = fuse({**params, "layers": layers})
    assert {"qkv", "qkv_bias", "gate_up"} <= set(whole["layers"])
    assert not {"q", "k_bias", "up"} & set(whole["layers"])
    assert type(whole["layers"]["qkv"]) is type(layers["q"])
    run = jax.jit(forward, static_argnums=0)
    np.testing.assert_allclose(
        run(CONFIG, whole, tokens), run(CONFIG, {**params, "layers": layers}, tokens), rtol=1e-5, atol=1e-5
    )


def test_matrices_that_are_not_alike_or_that_are_split_stay_apart(key: jax.Array):
    params = init(CONFIG, key)
    order = jnp.arange(params["layers"]["q"].shape[-2])[::-1]
    turned = {part: PermutedArray(quantize(params["layers"][part][0]), order, axis=-2) for part in "qkv"}
    with materialization_policy("error"):
        assert set(turned) <= set(fuse({**params, "layers": [turned]})["layers"][0])
    mixed = quantize_tree(params, {"*/q": "int8", "*/gate": "nf4", "*/up": "nf4"}, min_size=0, donate=False)
    assert {"q", "k", "v", "gate_up"} <= set(fuse(mixed)["layers"])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",))
    columns = jax.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, "model"))
    split = {name: jax.device_put(w, columns) if w.ndim == 3 else w for name, w in params["layers"].items()}
    assert set(fuse({**params, "layers": split})["layers"]) == set(split)


@pytest.mark.parametrize("normalized", [True, False])
def test_experts_are_weighted_by_their_scores(key: jax.Array, normalized: bool):
    """Against one token and one expert at a time."""
    config = Config(4, 8, layers=1, heads=1, kv_heads=1, hidden=6, experts_per_token=2, normalize_experts=normalized)
    assert Config(4, 8, layers=1, heads=1, kv_heads=1, hidden=6).normalize_experts
    sizes = {"router": (8, 4), "gate": (4, 8, 6), "up": (4, 8, 6), "down": (4, 6, 8)}
    w = {name: jax.random.normal(jax.random.fold_in(key, i), size) for i, (name, size) in enumerate(sizes.items())}
    x = np.asarray(jax.random.normal(key, (1, 5, 8)))
    found = np.asarray(_experts(config, w, jnp.asarray(x)))[0]
    for row, made in zip(x[0], found, strict=True):
        odds = np.asarray(jax.nn.softmax(row @ w["router"]))
        best = np.argsort(odds)[-2:]
        scores = odds[best] / (odds[best].sum() if normalized else 1)
        parts = [(jax.nn.silu(row @ w["gate"][e]) * (row @ w["up"][e])) @ w["down"][e] for e in best]
        np.testing.assert_allclose(made, sum(s * p for s, p in zip(scores, parts, strict=True)), rtol=1e-4, atol=1e-5)
