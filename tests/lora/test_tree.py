"""Adapters on whole models: adding, splitting, masking, merging."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from eformer.errors import UnusedRuleWarning
from eformer.jaximus import ImplicitArray, implicit, materialization_policy, materialize
from eformer.ops.quantization import (
    Array8B,
    ArrayNF4,
    LoraArray,
    add_lora,
    lora_mask,
    merge,
    merge_lora,
    quantize,
    quantize_tree,
    split_trainable,
)

KEY = jax.random.key(0)


def model() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return {
        "embed": {"embedding": normal(96, 64)},
        "attn": {"query": {"kernel": normal(64, 4, 16)}, "out": {"kernel": normal(4, 16, 64)}},
        "mlp": {"kernel": normal(3, 64, 32), "bias": normal(3, 32)},
        "torch": {"weight": normal(32, 64)},
        "norm": {"scale": normal(64)},
    }


def adapters(params: Any) -> dict[str, LoraArray]:
    pairs, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: isinstance(x, ImplicitArray))
    named = ((jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in pairs)
    return {path: leaf for path, leaf in named if isinstance(leaf, LoraArray)}


def test_where_adapters_go_and_what_they_look_like():
    params = quantize_tree(model(), min_size=0)
    found = adapters(add_lora(params, "*", 4, KEY, alpha=8))
    shapes = {path: (q.a.shape, q.b.shape) for path, q in found.items()}
    assert shapes == {
        "attn/query/kernel": ((64, 4), (4, 4, 16)),
        "attn/out/kernel": ((4, 16, 4), (4, 64)),
        "mlp/kernel": ((3, 64, 4), (3, 4, 32)),
        "torch/weight": ((32, 4), (4, 64)),
    }
    for path, q in found.items():
        assert q.scale == 2.0
        zero, random = (q.a, q.b) if path == "torch/weight" else (q.b, q.a)  # the side of the input is random
        assert not np.any(zero)
        fan_in = 64
        assert float(jnp.std(random)) == pytest.approx(fan_in**-0.5, rel=0.25)
        np.testing.assert_array_equal(materialize(q), q.w.materialize())
    assert not np.allclose(found["attn/query/kernel"].a, found["mlp/kernel"].a[0])


def test_rules_ranks_and_groups():
    params = model()
    ranks = {
        path: q.rank for path, q in adapters(add_lora(params, {"*out*": None, "attn*": 2, "*": 3}, key=KEY)).items()
    }
    assert ranks == {"attn/query/kernel": 2, "mlp/kernel": 3, "torch/weight": 3}
    assert {q.rank for q in adapters(add_lora(params, key=KEY)).values()} == {8}
    assert set(adapters(add_lora(params, ["re:quer", "mlp*"], 2, KEY))) == {"attn/query/kernel", "mlp/kernel"}
    assert "embed/embedding" in adapters(add_lora(params, "*", 2, KEY, skip=("norms", "biases")))
    once = add_lora(params, "mlp*", 2, KEY)
    again = add_lora(once, "*", 2, KEY)
    assert again["mlp"]["kernel"] is once["mlp"]["kernel"]
    np.testing.assert_array_equal(once["mlp"]["kernel"].a, add_lora(params, "*", 2, KEY)["mlp"]["kernel"].a)
    with pytest.warns(UnusedRuleWarning, match=r"\['\*head\*'\] match no matrix"):
        add_lora(params, ["*head*", "*"], 2, KEY)
    for rank in (0, True, 2.0):
        with pytest.raises(ValueError, match=f"rank={rank}"):
            add_lora(params, "*", rank, KEY)  # pyright: ignore[reportArgumentType]
    for alpha in ("x", True, float("nan")):
        with pytest.raises(ValueError, match=f"alpha={alpha!r} is not allowed"):
            add_lora(params, "*", 2, KEY, alpha=alpha)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="key="):
        add_lora(params, "*", 2)
    with pytest.raises(TypeError, match=r"rules=4 is not allowed; .* rank=\."):
        add_lora(params, 4, key=KEY)  # pyright: ignore[reportArgumentType]


def test_split_and_merge():
    params = add_lora(quantize_tree(model()), ["mlp*", "torch*"], 2, KEY)
    trainable, frozen = split_trainable(params, also="*norm*")
    assert list(trainable) == ["mlp/kernel/a", "mlp/kernel/b", "norm/scale", "torch/weight/a", "torch/weight/b"]
    assert "a=Hole(name='mlp/kernel/a')" in repr(frozen["mlp"]["kernel"])
    back = jax.jit(merge)(trainable, frozen)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    everything, _ = split_trainable(params, also="*")
    dense = {"embed", "attn", "mlp", "torch", "norm"} - {"embed", "attn"}
    assert {name.split("/")[0] for name in everything} == dense
    with pytest.raises(ValueError, match="lacks 'norm/scale'"):
        merge({k: v for k, v in trainable.items() if k != "norm/scale"}, frozen)
    with pytest.raises(ValueError, match=r"no place for \['more'\]"):
        merge({**trainable, "more": jnp.ones(2)}, frozen)
    with pytest.raises(ValueError, match=r"(?s)'mlp/kernel/a'.*'mlp/kernel/b'.*shapes \(3, 64, 2\) and \(3, 5, 32\)"):
        merge({**trainable, "mlp/kernel/b": jnp.ones((3, 5, 32))}, frozen)
    with pytest.warns(UnusedRuleWarning, match="match no dense leaf"):
        split_trainable(params, also="*attn*")


def test_layers_are_merged_inside_a_scan():
    stack = add_lora(quantize_tree({"kernel": model()["mlp"]["kernel"] @ jnp.ones((32, 64)) / 32}), "*", 2, KEY)
    parts, x = split_trainable(stack), jnp.ones((2, 64))
    found, _ = jax.lax.scan(lambda x, layer: (jnp.tanh(x @ merge(*layer)["kernel"]), None), x, parts)
    for layer in range(3):
        x = jnp.tanh(x @ materialize(stack["kernel"])[layer])
    np.testing.assert_allclose(found, x, rtol=1e-4)


def test_convolutions_with_the_window_last():
    """(out, in, window...): one factor per output, the other takes the inputs and the window."""
    conv = eqx.nn.Conv2d(16, 32, 3, key=KEY)
    stacked = eqx.filter_vmap(lambda key: eqx.nn.Conv1d(4, 8, 5, key=key))(jax.random.split(KEY, 2))
    params = {
        "conv": conv,
        "torch": {"conv": {"weight": model()["torch"]["weight"].reshape(8, 16, 4, 4)}},
        "s": stacked,
    }
    found = adapters(add_lora(params, "*", 4, KEY, skip=("norms", "biases")))
    assert {path: (q.a.shape, q.b.shape) for path, q in found.items()} == {
        "conv/weight": ((32, 4), (4, 16, 3, 3)),
        "torch/conv/weight": ((8, 4), (4, 16, 4, 4)),
        "s/weight": ((2, 8, 4), (2, 4, 4, 5)),
    }
    assert float(jnp.std(found["conv/weight"].b)) == pytest.approx((16 * 9) ** -0.5, rel=0.2)
    q = LoraArray(*(getattr(found["conv/weight"], name) + 0.1 for name in "wab"), left=1, right=3)
    expected = q.w + jnp.einsum("or,rikl->oikl", q.a, q.b)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(16, 7, 7)), jnp.float32)
    dense, adapted = (eqx.tree_at(lambda c: c.weight, conv, w) for w in (expected, q))
    with materialization_policy("allow"):
        np.testing.assert_allclose(implicit(adapted)(x), dense(x), rtol=1e-4, atol=1e-4)


def test_a_tied_adapter_is_trained_once():
    shared = quantize(model()["torch"]["weight"], dtype="int8")
    params = add_lora({"a": {"weight": shared}, "b": {"weight": shared}}, "*", 2, KEY)
    assert params["a"]["weight"] is params["b"]["weight"]
    trainable, frozen = split_trainable(params)
    assert set(trainable) == {"a/weight/a", "a/weight/b"}
    trainable["a/weight/a"] = trainable["a/weight/a"] + 1
    merged = merge(trainable, frozen)
    np.testing.assert_array_equal(merged["a"]["weight"].a, merged["b"]["weight"].a)


def test_modules_of_frameworks():
    module = quantize_tree(nnx.Linear(64, 64, rngs=nnx.Rngs(0)))
    trainable, frozen = split_trainable(add_lora(module, "*", 2, KEY), also="bias")
    assert {name: value.shape for name, value in trainable.items()} == {
        "bias": (64,),
        "kernel/a": (64, 2),
        "kernel/b": (2, 64),
    }
    whole = merge(trainable, frozen)
    x = jnp.ones((2, 64))
    np.testing.assert_allclose(implicit(whole)(x), implicit(module)(x), rtol=1e-5)
    linear = add_lora(quantize_tree(eqx.nn.Linear(64, 64, key=KEY)), "*", 2, KEY)
    parts = split_trainable(linear)
    assert isinstance(merge(*parts), eqx.nn.Linear)
    assert list(parts[0]) == ["weight/a", "weight/b"]


def test_masks_for_optax():
    """A dense base, so that the whole tree can be updated: only the factors move, only they have moments."""
    params = add_lora({"mlp": model()["mlp"], "norm": model()["norm"]}, "mlp*", 2, KEY)
    mask = lora_mask(params)
    assert jax.tree.structure(mask) == jax.tree.structure(params)
    assert jax.tree.leaves(mask) == [False, False, True, True, False]
    labels = jax.tree.map(lambda factor: "train" if factor else "freeze", mask)
    optimizer = optax.multi_transform({"train": optax.adamw(0.1), "freeze": optax.set_to_zero()}, labels)
    state = optimizer.init(params)
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert sorted(m.shape for m in moments) == sorted([(3, 64, 2), (3, 2, 32)] * 2)
    x = jnp.ones((4, 64))
    grads = jax.grad(lambda p: jnp.sum((x @ p["mlp"]["kernel"] + p["mlp"]["bias"][:, None] - 1.0) ** 2))(params)
    updates, _ = optimizer.update(grads, state, params)
    moved = jax.tree.map(lambda p, q: bool(np.any(p != q)), params, optax.apply_updates(params, updates))
    assert np.any(grads["mlp"]["bias"])  # which `optax.masked` alone would have added
    assert jax.tree.leaves(moved) == [False, False, True, True, False]
    quantized = add_lora(quantize_tree(model()), "*", 2, KEY)
    assert jax.tree.structure(lora_mask(quantized)) == jax.tree.structure(quantized)
    assert sum(jax.tree.leaves(lora_mask(quantized))) == 8


def trained(fmt: Any, size: float) -> LoraArray:
    q = add_lora(quantize_tree({"k": model()["mlp"]["kernel"]}, default=fmt), "*", 2, KEY)["k"]
    return LoraArray(q.w, q.a, size * jnp.ones_like(q.b), q.scale)


@pytest.mark.parametrize("fmt", ["nf4", "int8", "ternary", "binary", {"dtype": "nf4", "double_quant": True}])
def test_merging_rounds_anew_and_says_what_it_cost(fmt: Any):
    q = trained(fmt, 0.5)
    (merged, report) = merge_lora({"k": q, "other": jnp.ones(3)})
    assert type(merged["k"]) is type(q.w)
    assert jax.tree.structure(merged["k"]) == jax.tree.structure(q.w)
    target = q.materialize()
    error = float(jnp.linalg.norm(merged["k"].materialize() - target) / jnp.linalg.norm(target))
    assert report.relative_error == pytest.approx(error, rel=1e-4)
    (cost,) = report
    assert cost.update == pytest.approx(float(jnp.linalg.norm(q.update()) / jnp.linalg.norm(target)), rel=1e-3)
    assert str(report).splitlines()[1].split()[:2] == ["k", q.w.format]
    assert 0 < cost.relative_error < {"nf4": 0.12, "int8": 0.02}.get(q.w.format, 0.9)


def test_merging_into_other_formats():
    q = trained("nf4", 0.5)
    unchanged, report = merge_lora({"k": trained("nf4", 0.0)})
    assert report.relative_error == 0.0  # nothing was added, so the codes come out again
    jax.tree.map(np.testing.assert_array_equal, unchanged["k"], q.w)
    dense, report = merge_lora({"k": q}, into="dense")
    assert report.relative_error == 0.0
    np.testing.assert_array_equal(dense["k"], q.materialize())
    int8, report = merge_lora({"k": q}, into="int8")
    assert isinstance(int8["k"], Array8B)
    assert int8["k"].axis == (-2,)
    assert report.relative_error < 0.02
    plain, report = merge_lora({"k": LoraArray(q.w.materialize(), q.a, q.b)})
    assert isinstance(plain["k"], jax.Array)
    assert report.relative_error == 0.0
    nested = LoraArray(q, q.a, q.b)
    with pytest.raises(TypeError, match=r"'k' is a LoraArray, which merge_lora cannot quantize again"):
        merge_lora({"k": nested})
    assert isinstance(merge_lora({"k": nested}, into="nf4")[0]["k"], ArrayNF4)
