"""DoRA: columns with lengths of their own, products that leave the weight packed; and dropout in training."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import eformer as ef
from eformer.errors import UnusedRuleWarning
from eformer.integrations import equinox as eformer_equinox
from eformer.integrations import nnx as eformer_nnx


def adapted(key: jax.Array, kind: str | None, shape: tuple[int, ...] = (64, 48), **options: Any) -> Any:
    """A DoRA that has been trained: nothing in it is what it started as."""
    keys = jax.random.split(key, 4)
    w = jax.random.normal(keys[0], shape)
    q = w if kind is None else ef.quantize(w, dtype=kind)
    made = ef.add_lora({"kernel": q}, "*", 4, keys[1], alpha=8, dora=True, **options)["kernel"]
    parts = ef.split_trainable({"kernel": made})
    moved = {n: x + 0.3 * jax.random.normal(k, x.shape) for (n, x), k in zip(parts[0].items(), keys, strict=False)}
    return ef.merge(moved, parts[1])["kernel"]


def definition(q: Any) -> np.ndarray:
    v, columns = q.v, (-2 if q.columns else -1)
    w, a, b = (np.asarray(ef.materialize(x), np.float64) for x in (v.w, v.a, v.b))
    whole = w + v.scale * (a @ b)
    magnitude = np.expand_dims(np.asarray(q.magnitude, np.float64), columns)
    return magnitude * whole / np.linalg.norm(whole, axis=columns, keepdims=True)


@pytest.mark.parametrize("kind", [None, "nf4", "int8"])
def test_values_and_products(key, kind):
    q = adapted(key, kind)
    want = definition(q)
    np.testing.assert_allclose(q.materialize(), want, rtol=1e-5, atol=1e-5)
    x, y = jax.random.normal(key, (3, 64)), jax.random.normal(key, (3, 48))
    with ef.materialization_policy("error"):
        found = x @ q, q.T @ x.T, y @ q.T, jax.jit(ef.implicit(lambda x, q: jnp.einsum("bk,kn->nb", x, q)))(x, q)
    x, y = (np.asarray(v, np.float64) for v in (x, y))
    for got, expected in zip(found, (x @ want, want.T @ x.T, y @ want.T, (x @ want).T), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    assert "dora" in repr(q)


def test_half_precision(key):
    q = ef.implicit(lambda q: q.astype(jnp.bfloat16))(adapted(key, "nf4"))
    x = jax.random.normal(key, (3, 64)).astype(jnp.bfloat16)
    with ef.materialization_policy("error"):
        y = x @ q
    assert y.dtype == q.dtype == jnp.bfloat16
    want = np.asarray(x, np.float64) @ definition(q)
    np.testing.assert_allclose(np.asarray(y, np.float64), want, atol=3e-2 * np.abs(want).max())


def test_at_first_nothing_changes(key):
    w = ef.quantize(jax.random.normal(key, (64, 48)), dtype="nf4")
    q = ef.add_lora({"kernel": w}, "*", 4, key, dora=True)["kernel"]
    np.testing.assert_allclose(q.materialize(), w.materialize(), rtol=1e-6, atol=1e-6)


def test_gradients_take_the_length_as_a_constant(key):
    q = adapted(key, "nf4")
    x = jax.random.normal(key, (3, 64))
    trained, rest = ef.split_trainable({"kernel": q})
    assert sorted(trained) == ["kernel/a", "kernel/b", "kernel/magnitude"]
    found = jax.jit(jax.grad(lambda t: jnp.sum(jnp.sin(ef.implicit(lambda p: x @ p["kernel"])(ef.merge(t, rest))))))(
        trained
    )
    w, scale = q.v.w.materialize(), q.v.scale

    def dense(t):
        whole = w + scale * (t["kernel/a"] @ t["kernel/b"])
        length = jax.lax.stop_gradient(jnp.linalg.norm(whole, axis=0))
        return jnp.sum(jnp.sin(x @ (whole * (t["kernel/magnitude"] / length))))

    for name, want in jax.grad(dense)(trained).items():
        np.testing.assert_allclose(found[name], want, rtol=1e-3, atol=1e-4)


def test_stacks_and_loops(key):
    """A matrix of a stack, `scan` over layers, `vmap`; a kernel of heads."""
    q = adapted(key, "nf4", (3, 64, 64))
    want = definition(q)
    np.testing.assert_allclose(q[1].materialize(), want[1], rtol=1e-5, atol=1e-5)
    assert isinstance(q[1], ef.DoraArray)
    x = jax.random.normal(key, (2, 64))
    with ef.materialization_policy("error"):
        looped = jax.jit(ef.implicit(lambda x, q: jax.lax.scan(lambda h, layer: (h @ layer, None), x, q)[0]))(x, q)
        mapped = ef.implicit(jax.vmap(lambda w: x @ w))(q)
    expected = np.asarray(x, np.float64)
    for layer in want:
        expected = expected @ layer
    np.testing.assert_allclose(looped, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
    np.testing.assert_allclose(mapped, np.asarray(x, np.float64) @ want, rtol=1e-4, atol=1e-4)


def test_files_merging_and_masks(key, tmp_path):
    q = adapted(key, "nf4", dropout=0.25)
    back = ef.load(ef.save(tmp_path / "m.safetensors", {"kernel": q}))["kernel"]
    assert jax.tree.structure(back) == jax.tree.structure(q)
    np.testing.assert_array_equal(back.materialize(), q.materialize())
    assert back.v.dropout == 0.25
    merged, told = ef.merge_lora({"kernel": q})
    assert merged["kernel"].format == "nf4"
    assert 0 < told.relative_error < 0.2
    mask = ef.lora_mask({"kernel": q})["kernel"]
    assert (mask.v.a, mask.v.b, mask.magnitude, mask.squares) == (True, True, True, False)
    with pytest.raises(ValueError, match=r"do not fit an adapter of shape \(64, 48\)"):
        ef.DoraArray(q.v, jnp.ones(64), jnp.ones(64))


@pytest.mark.parametrize("dora", [False, True])
def test_modules(key, dora):
    """NNX and Equinox train the factors and the lengths, and leave the weight."""
    model = ef.quantize_tree(nnx.Linear(64, 64, rngs=nnx.Rngs(0)))
    model = ef.add_lora(model, "*kernel", 4, key, dora=dora, dropout=0.5)
    x = jax.random.normal(key, (4, 64))

    def loss(model):
        return jnp.sum(ef.implicit(lambda m: ef.lora_dropout(m, key)(x))(model) ** 2)

    grads = nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
    names = {str(path[-1]) for path, _ in nnx.to_flat_state(grads)}
    assert names == ({"a", "b", "magnitude"} if dora else {"a", "b"})
    seen = {str(path[-1]) for path, _ in nnx.to_flat_state(nnx.state(model, eformer_nnx.trainable))}
    assert seen == names | {"bias"}
    layer = ef.add_lora(ef.quantize_tree(eqx.nn.Linear(64, 64, key=key)), "*weight", 4, key, dora=dora)
    trained, rest = eformer_equinox.partition(layer)
    held = [leaf for leaf in jax.tree.leaves(trained) if leaf is not None]
    assert len(held) == (4 if dora else 3)
    assert eformer_equinox.combine(trained, rest).weight.shape == (64, 64)


def test_dropout_drops_a_share_of_the_inputs_of_the_factors(key):
    w = ef.quantize(jax.random.normal(key, (512, 32)), dtype="nf4")
    params = ef.add_lora({"kernel": w}, "*", 4, key, dropout=0.25)
    params["kernel"] = ef.merge(*(lambda t, f: ({n: x + 1 for n, x in t.items()}, f))(*ef.split_trainable(params)))[
        "kernel"
    ]
    x = jnp.ones((2000, 512))
    still = x @ params["kernel"]
    run = jax.jit(ef.implicit(lambda p, key: x @ ef.lora_dropout(p, key)["kernel"]))
    with ef.materialization_policy("error"):
        one, again, other = run(params, key), run(params, key), run(params, jax.random.key(1))
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)
    base = np.asarray(x @ w)
    update, dropped = np.asarray(still) - base, np.asarray(one) - base
    np.testing.assert_allclose(dropped.mean(0), update.mean(0), rtol=0.02)  # right on average
    variance = 0.25 / 0.75 * np.sum((np.asarray(params["kernel"].a @ params["kernel"].b)) ** 2, 0)
    np.testing.assert_allclose(dropped.var(0), variance, rtol=0.15)


def test_dropout_in_stacks_and_wrong_arguments(key):
    params = ef.add_lora({"kernel": jax.random.normal(key, (3, 64, 64))}, "*", 4, key, dropout=0.5)
    dropping = ef.lora_dropout(params, key)["kernel"]
    assert len(np.unique(np.asarray(dropping.key), axis=0)) == 3
    assert dropping[1].key.shape == (2,)
    np.testing.assert_array_equal(dropping[1].key, dropping.key[1])
    x = jnp.ones((2, 64))
    assert jax.lax.scan(ef.implicit(lambda h, layer: (h @ layer, None)), x, dropping)[0].shape == (2, 64)
    np.testing.assert_array_equal(dropping.materialize(), params["kernel"].materialize())
    with pytest.warns(UnusedRuleWarning, match=r"add_lora\(\.\.\., dropout=0\.05\)"):
        ef.lora_dropout({"kernel": jnp.ones((8, 8))}, key)
    with pytest.raises(ValueError, match=r"dropout=1\.0 is not allowed"):
        ef.add_lora({"kernel": jnp.ones((64, 64))}, "*", 4, key, dropout=1.0)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_lengths_are_those_of_the_weight_where_inputs_are_rounded(key, kind):
    base = ef.quantize_tree({"kernel": jax.random.normal(key, (96, 64))}, {"*": {"dtype": kind, "activations": "int8"}})
    trained, frozen = ef.split_trainable(ef.add_lora(base, "*", rank=4, key=key, dora=True))
    moved = {name: value + jax.random.normal(key, value.shape) for name, value in trained.items()}
    q = ef.merge(moved, frozen)["kernel"]
    w = np.asarray(base["kernel"].materialize(), np.float64)
    v = w + q.v.scale * np.asarray(q.v.a, np.float64) @ np.asarray(q.v.b, np.float64)
    expected = np.asarray(q.magnitude, np.float64) * v / np.linalg.norm(v, axis=0)
    np.testing.assert_allclose(q.materialize(), expected, rtol=2e-5, atol=2e-6 * np.abs(expected).max())
