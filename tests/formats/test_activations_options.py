"""Options of arrays that round x: static scales, smoothing, configurations, files, mistakes."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eformer as ef
from eformer._formats.activations.array import ActivationArray
from eformer._quantize.statistics import LeafStatistics
from eformer.jaximus import explain, implicit
from eformer.ops.quantization import QuantizationConfig, quantize, quantize_tree, report

from .contract import normal, seeded
from .rounding import error, rounded


def test_static_scales_come_from_statistics() -> None:
    rng = seeded("static")
    x, w = normal(rng, 50, 48), normal(rng, 48, 32)
    largest = np.abs(np.asarray(x)).max(0)
    stats = LeafStatistics((48, 32), (0,), (), None, np.ones(48), largest, np.asarray(50.0))
    q = quantize(w, dtype="int8", activations="int8", static=True, statistics=stats)
    scale = np.float32(largest.max() / 127)
    assert error(q.x_scale, [[scale]]) < 1e-7
    assert "static scale" in repr(q)
    want = rounded(2 * x, (1,), "int8", scale) @ np.asarray(q.materialize(), np.float64)  # cut off at the largest
    assert error((2 * x) @ q, want) < 1e-6
    stack = LeafStatistics(
        (2, 48, 32), (1,), (0,), None, np.ones((2, 48)), np.stack([largest, 3 * largest]), np.ones(2)
    )
    both = quantize(jnp.stack([w, w]), dtype="nf4", activations="int8", static=True, statistics=stack)
    assert error(both.x_scale, scale * np.array([1, 3]).reshape(2, 1, 1)) < 1e-7
    assert error(implicit(lambda q: q[1])(both).x_scale, [[3 * scale]]) < 1e-7
    assert error(jax.lax.scan(lambda _, q: (None, x @ q), None, both)[1][0], x @ implicit(lambda q: q[0])(both)) < 1e-7
    with pytest.raises(ValueError, match="static=True needs statistics of the inputs, and there are none"):
        quantize(w, dtype="int8", activations="int8", static=True)
    with pytest.raises(ValueError, match=r"statistics of an array of shape \(48, 32\)"):
        quantize(w.T, dtype="int8", activations="int8", static=True, statistics=stats)


def test_smoothing_moves_outliers_into_the_weight() -> None:
    rng = seeded("smooth")
    x = normal(rng, 64, 48) * jnp.where(jnp.arange(48) % 16 == 0, 60.0, 1.0)
    params = {"up": {"kernel": normal(rng, 48, 32)}, "embed": {"embedding": normal(rng, 64, 48)}}
    w = params["up"]["kernel"]
    found = ef.calibrate(lambda p, x: (x @ p["up"]["kernel"], p["embed"]["embedding"][jnp.arange(2)]), params, [x])
    plain, smooth = ({"dtype": "int8", "activations": "int8", **more} for more in ({}, {"smooth": 0.5, "static": True}))
    made = {
        name: quantize_tree(params, {"*": c}, calibration=found, method=None if name == "smooth" else "round",
                            min_size=0, donate=False)
        for name, c in (("plain", plain), ("smooth", smooth))
    }  # fmt: skip
    want = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    q = made["smooth"]["up"]["kernel"]
    factor, scale = np.asarray(q.factor), q.w.x_scale
    largest = np.abs(np.asarray(x)).max(0)
    assert error(1 / factor[:, 0] ** 2, largest / np.abs(np.asarray(w)).max(1)) < 1e-5
    assert error(scale, [[(largest * factor[:, 0]).max() / 127]]) < 1e-6
    inputs = rounded(np.asarray(x * factor[:, 0], np.float32), (1,), "int8", scale)
    assert error(x @ q, inputs @ np.asarray(q.w.materialize(), np.float64)) < 1e-6
    assert error(x @ q, want) < 0.5 * error(x @ made["plain"]["up"]["kernel"], want)
    assert made["smooth"]["embed"]["embedding"].x_scale is None  # looked up only
    one = quantize(w, dtype="int8", axis=0, activations="int8", smooth=0.5, statistics=found["up/kernel"])
    assert error(x @ one, want) < 0.03
    for value, words in (
        (2.0, "not a number from 0"),
        ("0.5", "not a number from 0"),
        (True, "not a number from 0"),
        (0.5, "needs statistics"),
    ):
        with pytest.raises(ValueError, match=words):
            quantize(w, dtype="int8", activations="int8", smooth=value)
    with pytest.raises(ValueError, match="goes with method='round', not with 'gptq'"):
        quantize_tree(params, {"*": smooth}, calibration=found, method="gptq", min_size=0, donate=False)
    with pytest.raises(ValueError, match="needs statistics of the inputs, and there are none"):
        quantize_tree(params, {"*": smooth}, min_size=0, donate=False)


def test_bad_input() -> None:
    w = jnp.ones((64, 32))
    for options, words in (
        (
            {"dtype": "int8", "activations": "int4"},
            "activations='int4' is unknown; allowed values are None, 'int8', 'fp8'",
        ),
        ({"dtype": "int8", "activations": "fp8"}, "does not work with int8 weights: int8 takes activations='int8'"),
        ({"dtype": "fp8", "activations": "int8"}, "fp8 takes activations='fp8'. Integer formats"),
        ({"dtype": "int8", "backward": "int8"}, "backward='int8' is an option for products that round their inputs"),
        ({"dtype": "int8", "static": True}, "static=True is an option for products that round"),
        ({"dtype": "int8", "activations": "int8", "simulate": True}, "no meaning with simulate=True"),
        ({"dtype": "int8", "activations": "int8", "backward": "bf16"}, "backward='bf16' is unknown"),
    ):
        with pytest.raises(ValueError, match=words):
            quantize(w, **options)
    with pytest.raises(ValueError, match="int8 takes activations='int8'"):
        ActivationArray(quantize(w, dtype="int8"), activations="fp8")
    q = quantize(w, dtype="int8", activations="int8")
    with pytest.raises(TypeError, match=r"round the other operand already; wrap its own `\.w`"):
        ActivationArray(q, activations="int8")
    for x in (jnp.ones((2, 64), jnp.int32), jnp.ones((2, 64), jnp.complex64)):
        with pytest.raises(TypeError, match="rounds rows of floating values; convert x with astype"):
            x @ q
    with pytest.raises(ef.errors.QuantizedGradientError):
        jax.grad(lambda s: (jnp.ones((2, 64)) @ dataclasses.replace(q, w=q.w.replaced(scale=s))).sum())(q.w.scale)


def test_configurations_and_rules() -> None:
    config = QuantizationConfig("nf4", activations="int8", backward="fp8")
    assert QuantizationConfig.from_json(config.to_json()) == config
    assert "activations" not in json.loads(QuantizationConfig("nf4").to_json())
    old = QuantizationConfig.from_json('{"dtype": "int8", "block_size": 64, "simulate": false, "use_kernel": true}')
    assert old == QuantizationConfig("int8")
    params = {"up": {"kernel": jnp.ones((64, 64))}, "down": {"kernel": jnp.ones((64, 64))}}
    rules = {"up*": {"dtype": "int4", "activations": "int8"}, "down*": {"dtype": "fp8", "activations": "fp8"}}
    made = quantize_tree(params, rules, donate=False)
    assert [leaf.format for leaf in report(made).leaves] == ["fp8 x fp8", "int4 x int8"]
    assert "int4 x int8" in str(ef.plan_tree(params, rules))
    with pytest.warns(ef.errors.UnusedRuleWarning, match="it is quantized already"):  # as it is asked for
        quantize_tree(made, rules)
    with pytest.raises(ValueError, match="already quantized, with activations=fp8"):
        quantize_tree(made, {"up*": "int4", "down*": "fp8"})
    abstract = quantize_tree(params, rules, abstract=True)
    assert jax.tree.structure(abstract) == jax.tree.structure(made)
    assert [x.shape for x in jax.tree.leaves(abstract)] == [x.shape for x in jax.tree.leaves(made)]


def test_explain_says_what_rounds() -> None:
    q = quantize(jnp.ones((64, 32)), dtype="int8", activations="int8")
    text = str(explain(lambda x: x @ q)(jnp.ones((2, 64))))
    assert "rounded to int8" in text


def test_files(tmp_path) -> None:
    rng = seeded("files")
    w = normal(rng, 64, 32)
    q = quantize(w, dtype="int4", activations="int8", backward="int8")
    static = dataclasses.replace(q, x_scale=jnp.full((1, 1), 0.02))
    ef.save(tmp_path / "m.safetensors", {"q": q, "static": static, "plain": quantize(w, dtype="int4")})
    loaded = ef.load(tmp_path / "m.safetensors")
    x = normal(rng, 3, 64)
    for name, made in {"q": q, "static": static}.items():
        assert jax.tree.structure(loaded[name]) == jax.tree.structure(made)
        np.testing.assert_array_equal(x @ loaded[name], x @ made)
    assert loaded["plain"].format == "int4"
    assert ef.inspect(tmp_path / "m.safetensors").tensors[1].format == "int4 x int8"
    part = ef.open_lazy(tmp_path / "m.safetensors").read_slice("static", (slice(None), slice(8, 24)))
    np.testing.assert_array_equal(x @ part, (x @ static)[:, 8:24])


def test_a_loop_that_turns_its_carry_ends(key):
    """The type changes at every step: the carry is dense."""
    q = quantize(jax.random.normal(key, (64, 64)), dtype="int4", activations="int8")
    turned = implicit(lambda q: jax.lax.scan(lambda c, _: (c.T, None), q, None, length=3)[0])(q)
    np.testing.assert_array_equal(turned, q.materialize().T)
