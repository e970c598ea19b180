"""`quantize_tree(calibration=..., method=...)`: rules, reports, and what is wrong with statistics."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eformer as ef
from eformer._formats.scaled.array import ScaledArray
from eformer.errors import CalibrationError, CalibrationWarning

Params = dict[str, Any]


def model(key: jax.Array) -> Params:
    keys = jax.random.split(key, 4)
    return {
        "embed": {"embedding": jax.random.normal(keys[0], (80, 64))},
        "up": {"kernel": jax.random.normal(keys[1], (64, 96))},
        "layers": {"kernel": jax.random.normal(keys[2], (2, 96, 96)) * 0.1},
        "spare": {"kernel": jax.random.normal(keys[3], (96, 64))},
    }


def forward(params: Params, tokens: jax.Array) -> jax.Array:
    x = ef.materialize(params["embed"]["embedding"][tokens]) @ params["up"]["kernel"]
    x, _ = jax.lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), x, params["layers"]["kernel"])
    return x


@pytest.fixture(scope="module")
def calibrated() -> tuple[Params, Any, jax.Array]:
    params = model(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (4, 100), 0, 80)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)  # of `spare`
        return params, ef.calibrate(forward, params, [tokens]), tokens


def quantized(calibrated: Any, *given: Any, **options: Any) -> Params:
    params, stats, _ = calibrated
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        return ef.quantize_tree(params, *given, donate=False, calibration=stats, **options)


def loss(calibrated: Any, made: Params) -> float:
    params, _, tokens = calibrated
    return float(jnp.mean((ef.implicit(forward)(made, tokens) - forward(params, tokens)) ** 2))


def test_methods_make_the_model_better_and_reports_name_them(calibrated: Any) -> None:
    made = {method: quantized(calibrated, method=method) for method in ("round", "scale", "gptq", "awq")}
    losses = {method: loss(calibrated, params) for method, params in made.items()}
    assert losses["gptq"] < 0.6 * losses["round"]
    assert losses["scale"] < losses["round"]
    assert losses["awq"] < losses["round"]
    assert isinstance(made["awq"]["layers"]["kernel"], ScaledArray)
    assert not isinstance(made["awq"]["embed"]["embedding"], ScaledArray)
    told = {leaf.path: leaf.method for leaf in ef.report(made["gptq"]).leaves}
    rounded = "rounded, no statistics"
    assert told == {
        "embed/embedding": rounded, "layers/kernel": "gptq", "spare/kernel": rounded, "up/kernel": "gptq"
    }  # fmt: skip
    assert "nf4 (gptq)" in str(ef.report(made["gptq"]))
    copied = jax.tree.map(lambda x: x, made["gptq"])
    assert ef.report(copied).leaves[1].method == "gptq"
    assert {leaf.method for leaf in ef.report(made["round"]).leaves} == {None}


def test_statistics_alone_mean_gptq_and_rules_say_otherwise(calibrated: Any) -> None:
    made = quantized(calibrated, {"up*": {"dtype": "int4", "method": "awq"}, "spare*": {"method": "round"}})
    told = {leaf.path: (leaf.format, leaf.method) for leaf in ef.report(made).leaves}
    assert told["up/kernel"] == ("int4, scaled inputs", "awq")
    assert told["layers/kernel"] == ("nf4", "gptq")
    assert told["spare/kernel"] == ("nf4", None)


def test_a_leaf_without_statistics_is_rounded_and_told(calibrated: Any) -> None:
    params, stats, _ = calibrated
    with pytest.warns(CalibrationWarning, match=r"1 leaf \('spare/kernel'\) without statistics"):
        made = ef.quantize_tree(params, donate=False, calibration=stats, method="scale")
    expected = ef.quantize(params["spare"]["kernel"], dtype="nf4", axis=-2).materialize()
    np.testing.assert_array_equal(made["spare"]["kernel"].materialize(), expected)


def test_statistics_of_another_model_are_refused(calibrated: Any) -> None:
    params, stats, _ = calibrated
    with pytest.raises(CalibrationError, match="another model: they have a leaf 'layers/kernel'"):
        ef.quantize_tree({"up": params["up"]}, calibration=stats)
    other = {**params, "up": {"kernel": jnp.ones((64, 80))}}
    with pytest.raises(CalibrationError, match=r"'up/kernel' has shape \(64, 96\) there and \(64, 80\) here"):
        ef.quantize_tree(other, calibration=stats)


def test_few_tokens_are_told(calibrated: Any) -> None:
    params, _, tokens = calibrated
    used = {name: params[name] for name in ("embed", "up", "layers")}
    stats = ef.calibrate(forward, used, [tokens[:1, :40]])
    with pytest.warns(
        CalibrationWarning, match=r"2 leaves .* fewer tokens than channels \(40 and 96 of the first\): so few"
    ):
        ef.quantize_tree(used, donate=False, calibration=stats, method="gptq")


def test_diagonals_alone_mean_scale(calibrated: Any) -> None:
    params, _, tokens = calibrated
    used = {name: params[name] for name in ("embed", "up", "layers")}
    stats = ef.calibrate(forward, used, [tokens], diagonal_only=True)
    made = ef.quantize_tree(used, {"layers*": {"method": "awq"}}, donate=False, calibration=stats)
    told = {leaf.path: leaf.method for leaf in ef.report(made).leaves}
    assert told["up/kernel"] == "scale"
    assert told["layers/kernel"] == "awq"
    for asked in ({"method": "gptq"}, {"rules": {"up*": {"method": "gptq"}}}):
        with pytest.raises(CalibrationError, match="method='gptq' needs whole second moments"):
            ef.quantize_tree(used, donate=False, calibration=stats, **asked)


def test_methods_that_need_statistics_say_so(calibrated: Any) -> None:
    params, _, _ = calibrated
    with pytest.raises(ValueError, match="method='gptq' for 'embed/embedding' needs statistics of its inputs"):
        ef.quantize_tree(params, method="gptq")
    with pytest.raises(ValueError, match="method='best' is unknown"):
        ef.quantize_tree(params, method="best")
    made = ef.quantize_tree(params, donate=False, method="scale")
    assert ef.report(made).leaves[1].method == "scale, no statistics"


def test_shapes_without_values(calibrated: Any) -> None:
    for method in ("gptq", "awq"):
        made = quantized(calibrated, method=method)
        shapes = quantized(calibrated, method=method, abstract=True)
        assert jax.tree.structure(made) == jax.tree.structure(shapes)
        described = [[(x.shape, x.dtype) for x in jax.tree.leaves(tree)] for tree in (made, shapes)]
        assert described[0] == described[1]


def test_a_sharded_weight_gives_the_same_array(calibrated: Any) -> None:
    params, stats, _ = calibrated
    mesh = jax.make_mesh((2,), ("model",))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))
    split = {**params, "up": {"kernel": jax.device_put(params["up"]["kernel"], spec)}}
    for method in ("gptq", "awq"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CalibrationWarning)
            made = ef.quantize_tree(split, donate=False, calibration=stats, method=method)["up"]["kernel"]
        assert made.sharding is not None
        whole = quantized(calibrated, method=method)["up"]["kernel"]
        np.testing.assert_array_equal(made.materialize(), whole.materialize())


# -- the array that carries factors ------------------------------------------------------------------------------------


def scaled(key: jax.Array, shape: tuple[int, ...], factor: tuple[int, ...]) -> tuple[ScaledArray, jax.Array]:
    a, b = jax.random.split(key)
    q = ef.quantize(jax.random.normal(a, shape), dtype="int8", axis=-2)
    made = ScaledArray(q, jnp.exp(jax.random.normal(b, factor)))
    return made, made.materialize()


@pytest.mark.parametrize("spec", ["mk,kn->mn", "km,kn->mn", "nm,kn->mk", "kn,km->nm", "mn,kn->km"])
def test_products_carry_the_factors(spec: str, key: jax.Array) -> None:
    q, dense = scaled(key, (16, 8), (16, 1))
    first, second = spec.split("->")[0].split(",")
    sizes = {"m": 5, "k": 16, "n": 8}
    x = jax.random.normal(key, [sizes[c] for c in (second if first == "kn" else first)])
    operands = (q, x) if first == "kn" else (x, q)
    plain = (dense, x) if first == "kn" else (x, dense)
    with ef.materialization_policy("error"):
        found = ef.implicit(lambda a, b: jnp.einsum(spec, a, b))(*operands)
    np.testing.assert_allclose(found, jnp.einsum(spec, *plain), rtol=1e-4, atol=1e-4)


def test_stacks_of_them_are_scanned_joined_and_used_in_groups(key: jax.Array) -> None:
    q, dense = scaled(key, (3, 16, 8), (3, 16, 1))
    x = jax.random.normal(key, (7, 16))
    sizes = jnp.array([2, 0, 5])
    with ef.materialization_policy("error"):
        _, found = ef.implicit(lambda w: jax.lax.scan(lambda c, m: (c, x @ m), 0, w))(q)
        ragged = ef.implicit(jax.lax.ragged_dot)(x, q, sizes)
        parts = ef.implicit(lambda w: jnp.stack([w[i] for i in range(3)]))(q)
        turned = ef.implicit(lambda w: jnp.swapaxes(w, -1, -2).astype(jnp.bfloat16))(q)
    np.testing.assert_allclose(found, x @ dense, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(ragged, jax.lax.ragged_dot(x, dense, sizes), rtol=1e-4, atol=1e-4)
    assert isinstance(parts, ScaledArray)
    np.testing.assert_array_equal(parts.materialize(), dense)
    assert (turned.shape, turned.dtype) == ((3, 8, 16), jnp.bfloat16)
    np.testing.assert_allclose(turned.materialize(), jnp.swapaxes(dense, 1, 2), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4", "iq4_nl", "int4", "fp8"])
@pytest.mark.parametrize("method", ["gptq", "scale"])
def test_what_a_method_made_is_saved(calibrated: Any, fmt: str, method: str, tmp_path: Any) -> None:
    made = {"up": quantized(calibrated, {"*": fmt}, method=method)["up"]}
    ef.save(tmp_path / "m.safetensors", made)
    found = ef.load(tmp_path / "m.safetensors")
    assert jax.tree.structure(found) == jax.tree.structure(made)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(made), strict=True):
        np.testing.assert_array_equal(a, b)


def test_names_of_formats_are_saved_as_strings(tmp_path: Any) -> None:
    names = {"activations": ef.QuantizationType.INT8, "backward": ef.QuantizationType.FP8}
    q = ef.quantize(jnp.ones((16, 8)), dtype="int8", **names)
    ef.save(tmp_path / "w.safetensors", {"w": q})
    found = ef.load(tmp_path / "w.safetensors")["w"]
    assert jax.tree.structure(found) == jax.tree.structure(q)
    assert (type(found.activations), found.backward) == (str, "fp8")


def test_it_is_saved_and_checked(key: jax.Array, tmp_path: Any) -> None:
    q, dense = scaled(key, (16, 8), (16, 1))
    ef.save(tmp_path / "w.safetensors", {"w": q})
    np.testing.assert_array_equal(ef.load(tmp_path / "w.safetensors")["w"].materialize(), dense)
    with pytest.raises(ValueError, match=r"factor float32\[8\] does not fit w of shape \[16, 8\]"):
        ScaledArray(q.w, jnp.ones(8))
