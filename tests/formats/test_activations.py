"""Products with `activations=`: against the definition in NumPy, whatever is contracted; bad input; files; models."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import eformer as ef
from eformer._formats.activations.array import ActivationArray
from eformer._formats.activations.stochastic import rounded_at_random
from eformer._formats.permuted.array import PermutedArray
from eformer._quantize.statistics import LeafStatistics
from eformer.jaximus import explain, implicit, materialization_policy
from eformer.ops.quantization import QuantizationConfig, quantize, quantize_tree, report
from eformer.ops.quantization.kernels import export_checks

from .contract import normal, seeded

LARGEST = {"int8": 127, "fp8": 448}
PAIRS = [
    ("int8", "int8"), ("nf4", "int8"), ("int4", "int8"), ("ternary", "int8"), ("fp8", "fp8"),
    *(pytest.param(*pair, marks=pytest.mark.thorough) for pair in [
        ("binary", "int8"), ("int2", "int8"), ("int6", "int8"), ("iq4_nl", "int8"), ("mxfp4", "int8"), ("nvfp4", "fp8"),
        ("mxfp8", "fp8"), ("fp8_e5m2", "fp8"),
    ]),
]  # fmt: skip


def rounded(x: Any, axes: tuple[int, ...], kind: str, scale: Any = None) -> np.ndarray:
    """What rows of x along these axes are rounded to, in float64."""
    x = np.asarray(x, np.float32)
    if scale is None:
        scale = np.maximum(np.abs(x).max(axes, keepdims=True) / np.float32(LARGEST[kind]), np.finfo(np.float32).tiny)
    codes = np.clip(x / scale, -LARGEST[kind], LARGEST[kind])
    codes = codes.astype(ml_dtypes.float8_e4m3fn) if kind == "fp8" else np.rint(codes)
    return codes.astype(np.float64) * np.asarray(scale, np.float64)


def near(fmt: str) -> float:
    """A kernel may take integers for the entries of a table that has fractions."""
    return 1e-4 if fmt == "nf4" else 1e-6


def error(found: Any, expected: Any) -> float:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(("fmt", "kind"), PAIRS)
def test_products_follow_the_definition(fmt: str, kind: str) -> None:
    rng = seeded(fmt)
    w, x = normal(rng, 96, 40), normal(rng, 3, 5, 96)
    q = quantize(w, dtype=fmt, activations=kind, axis=0)
    true = np.asarray(q.materialize(), np.float64)
    want = rounded(x, (2,), kind) @ true
    with materialization_policy("error"):
        assert error(x @ q, want) < near(fmt)
        assert error(jax.jit(lambda x, q: x @ q)(x[0], q), want[0]) < near(fmt)
        assert error(implicit(lambda q, x: jnp.einsum("kn,bmk->nbm", q, x))(q, x), want.transpose(2, 0, 1)) < near(fmt)
        back = normal(rng, 7, 40)
        assert error(back @ q.T, rounded(back, (1,), kind) @ true.T) < near(fmt)  # contracted along what is not packed
    y, pull = jax.vjp(lambda x: x @ q, x)
    assert error(pull(y)[0], np.asarray(y, np.float64) @ true.T) < 2e-6  # straight through


@pytest.mark.parametrize("kind", ["random", "outlier", "zero", "small", "huge"])
def test_int8_is_exact_bit_for_bit(kind: str) -> None:
    rng = seeded(kind)
    x = rng.standard_normal((6, 300)).astype(np.float32)
    x = {
        "random": x, "outlier": np.where(rng.random(x.shape) < 0.02, 1e4 * x, x), "small": x * np.float32(1e-34),
        "zero": x * (np.arange(6)[:, None] % 2), "huge": x * np.float32(5e37),
    }[kind].astype(np.float32)  # fmt: skip
    q = quantize(normal(rng, 300, 64) * (1e-4 if kind == "huge" else 1), dtype="int8", activations="int8", axis=0)
    scale = np.maximum(np.abs(x).max(1, keepdims=True) / np.float32(127), np.finfo(np.float32).tiny)
    sums = (np.rint(x / scale).astype(np.int64) @ np.asarray(q.w.weight, np.int64)).astype(np.float32)
    first = kind == "small"
    want = (sums * scale) * np.asarray(q.w.scale) if first else sums * (scale * np.asarray(q.w.scale))
    np.testing.assert_array_equal(x @ q, want)
    np.testing.assert_array_equal(jax.jit(lambda x: x @ q)(x), want)


@pytest.mark.parametrize(("fmt", "kind"), [("int8", "int8"), ("nf4", "int8"), ("fp8", "fp8")])
def test_rows_that_are_not_finite_are_nan_and_alone(fmt: str, kind: str) -> None:
    rng = seeded(fmt)
    x = np.array(normal(rng, 4, 64))
    q = quantize(normal(rng, 64, 32), dtype=fmt, activations=kind, axis=0)
    static = dataclasses.replace(q, x_scale=jnp.full((1, 1), 0.05))
    good = np.asarray(x @ q)
    x[1, 3], x[2, 5] = np.nan, -np.inf
    for made in (q, static, quantize(normal(rng, 64, 32), dtype=fmt, activations=kind, axis=0).T.T):
        y = np.asarray(x @ made)
        assert np.isnan(y[1:3]).all()
        assert np.isfinite(y[[0, 3]]).all()
    np.testing.assert_array_equal(np.asarray(x @ q)[[0, 3]], good[[0, 3]])


EINSUMS = {
    "bmk,bkn->bmn": ((3, 5, 36), (3, 36, 20), (2,)),
    "mhk,hkn->mn": ((5, 3, 36), (3, 36, 20), (1, 2)),
    "mk,hkn->mhn": ((5, 36), (3, 36, 20), (1,)),
    "mhn,hkn->mk": ((5, 3, 20), (3, 36, 20), (1, 2)),
    "mkn,hkn->hm": ((2, 36, 20), (3, 36, 20), (1, 2)),
    "knm,kn->m": ((36, 20, 5), (36, 20), (0, 1)),
}


@pytest.mark.parametrize("spec", EINSUMS)
@pytest.mark.parametrize("fmt", ["nf4", "int8", pytest.param("int4", marks=pytest.mark.thorough)])
def test_a_row_is_all_that_is_contracted(fmt: str, spec: str) -> None:
    x_shape, shape, axes = EINSUMS[spec]
    rng = seeded(fmt, spec)
    x, w = normal(rng, *x_shape), normal(rng, *shape)
    options = {"symmetric": False, "block_size": 16} if fmt == "int4" else {}
    q = quantize(w, dtype=fmt, activations="int8", axis=-2, **options)
    true = np.asarray(q.materialize(), np.float64)
    with materialization_policy("error"):
        y, dy = jax.jvp(lambda x: implicit(jnp.einsum)(spec, x, q), (x,), (x,))
    assert error(y, np.einsum(spec, rounded(x, axes, "int8"), true)) < near(fmt)
    assert error(dy, np.einsum(spec, np.asarray(x, np.float64), true)) < 1e-6


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3b11fnuz", "float4_e2m1fn"])
def test_codes_are_not_rounded_to_a_narrow_type_of_x(dtype: str) -> None:
    rng, numbers = seeded(dtype), (((1,), (0,)), ((), ()))
    x, w = normal(rng, 5, 64).astype(dtype), normal(rng, 64, 24)
    for fmt, kind in (("int8", "int8"), ("nf4", "int8"), ("fp8", "fp8"), ("mxfp8", "fp8")):
        q = quantize(w, dtype=fmt, activations=kind, axis=0)
        around = ActivationArray(PermutedArray(q.w, jnp.arange(64), axis=-2), activations=kind)
        stack = jax.tree.map(lambda part: part[None], q)
        want = rounded(x.astype(jnp.float32), (1,), kind) @ np.asarray(q.materialize(), np.float64)
        assert error(implicit(lax.dot_general)(x, q, numbers), want) < near(fmt)
        assert error(implicit(lax.dot_general)(x, around, numbers), want) < near(fmt)
        assert error(implicit(lax.ragged_dot)(x, stack, jnp.array([5])), want) < near(fmt)


@pytest.mark.parametrize("activations", [None, "int8"])
def test_groups_have_the_dtype_that_jax_gives_them(activations: str | None) -> None:
    q = quantize(jnp.ones((2, 32, 8), jnp.bfloat16), dtype="nf4", activations=activations)
    x, sizes = jnp.ones((4, 32), jnp.float16), jnp.array([1, 3])
    y = implicit(lax.ragged_dot)(x, q, sizes)
    assert y.dtype == lax.ragged_dot(x, q.materialize(), sizes).dtype == jnp.bfloat16


def test_other_weights_round_around_their_own_product() -> None:
    rng = seeded()
    x, w, order = normal(rng, 4, 32), normal(rng, 32, 16), jnp.asarray(rng.permutation(32), jnp.int32)
    inner = PermutedArray(quantize(w, dtype="int8", axis=0), order, axis=-2)
    q = ActivationArray(inner, activations="int8")
    true = np.asarray(q.materialize(), np.float64)
    assert error(x @ q, rounded(x, (1,), "int8") @ true) < 1e-6
    assert error(jax.grad(lambda x: (x @ q)[0, 0])(x)[0], true[:, 0]) < 1e-6
    outer = PermutedArray(ActivationArray(inner.w, activations="int8"), order, axis=-2)
    assert error(x @ outer, rounded(x, (1,), "int8") @ true) < 1e-6


def test_factors_have_gradients() -> None:
    rng = seeded("factors")
    x, w, a = normal(rng, 4, 32), normal(rng, 32, 16), normal(rng, 16)
    q = quantize(w, dtype="int8", activations="int8", axis=0)
    true = np.asarray(q.materialize(), np.float64)
    y, (x_bar, a_bar) = jax.value_and_grad(lambda x, a: implicit(lambda: (x @ (q * a)).sum())(), (0, 1))(x, a)
    assert error(y, (rounded(x, (1,), "int8") @ (true * np.asarray(a))).sum()) < 1e-5
    assert error(a_bar, (rounded(x, (1,), "int8") @ true).sum(0)) < 1e-5
    assert error(x_bar[0], (true * np.asarray(a)).sum(1)) < 1e-5


def test_groups_of_experts() -> None:
    rng, sizes = seeded("experts"), jnp.asarray([4, 0, 5])
    x, w = normal(rng, 10, 32), normal(rng, 3, 32, 16)
    for fmt, options in (("int8", {}), ("int4", {"symmetric": False}), ("nf4", {})):
        q = quantize(w, dtype=fmt, activations="int8", axis=-2, **options)
        true = np.asarray(q.materialize(), np.float64)
        for scale in (None, jnp.asarray([0.01, 1.0, 0.02]).reshape(3, 1, 1)):
            each = None if scale is None else np.repeat([0.01, 0.02], [4, 6])[:, None].astype(np.float32)
            values = rounded(x, (1,), "int8", each)
            want = np.concatenate([values[:4] @ true[0], values[4:9] @ true[2], np.zeros((1, 16))])
            assert error(implicit(lax.ragged_dot)(x, dataclasses.replace(q, x_scale=scale), sizes), want) < near(fmt)


def test_gradients_in_eight_bits() -> None:
    rng = seeded("gradients")
    x, w, g = normal(rng, 6, 48), normal(rng, 48, 32), normal(rng, 6, 32)
    for fmt, kind in (("int8", "int8"), ("nf4", "int8"), ("fp8", "fp8")):
        q = quantize(w, dtype=fmt, activations=kind, backward=kind, axis=0)
        true = np.asarray(q.materialize(), np.float64)
        (x_bar,) = jax.vjp(lambda x, q=q: x @ q, x)[1](g)
        exact = np.asarray(g, np.float64) @ true.T
        scaled = np.asarray(g) * np.asarray(q.w.scale) if fmt != "nf4" else g
        codes = np.asarray(q.w.materialize() / q.w.scale, np.float64) if fmt != "nf4" else true
        assert error(x_bar, rounded(scaled, (1,), kind) @ codes.T) < 2e-6
        assert 1e-4 < error(x_bar, exact) < 0.05
        assert "gradient in" in repr(q)

        def pulled(key: Any, q: Any = q) -> Any:
            return jax.vjp(lambda x: x @ q.with_key(key), x)[1](g)[0]

        many = jax.vmap(pulled)(jax.random.split(jax.random.key(1), 400))
        assert error(many.mean(0), exact) < 0.01 < error(many[0], exact) + 0.008  # right on average
        np.testing.assert_array_equal(pulled(jax.random.key(3)), pulled(jax.random.key(3)))
    with pytest.raises(ValueError, match="a key is for gradients that are rounded"):
        quantize(w, dtype="int8", activations="int8").with_key(jax.random.key(0))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_small_gradients_are_rounded_to_a_neighbour(kind: str) -> None:
    """Under jit, too, where XLA makes one division of two: rows of zeros and of the smallest numbers."""
    rng = seeded(kind)
    g = jnp.stack([normal(rng, 64) * 10.0**power for power in (-44, -40, -37, -33, -20, 0, 20, 37)])
    g = g.at[4].set(0).at[5, :32].set(0)
    made = jax.jit(rounded_at_random, static_argnums=(2, 3))(g, jax.random.key(1), (1,), kind)
    made, exact = np.asarray(made, np.float64), np.asarray(g, np.float64)
    scale = np.maximum(np.abs(exact).max(1, keepdims=True) / LARGEST[kind], 2.0**-126)
    power = np.floor(np.log2(np.maximum(np.abs(exact / scale), 1e-300))) - 3
    step = scale * (2.0 ** np.maximum(power, -9) if kind == "fp8" else 1)
    assert np.isfinite(made).all()
    assert (np.abs(made - exact) <= step * (1 + 1e-5) + 2.0**-125).all()
    np.testing.assert_array_equal(made[exact == 0], 0)


MESH = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P("a", "b"), P("b", "a")], ids=str)
@pytest.mark.parametrize("fmt", ["int8", pytest.param("int4", marks=pytest.mark.thorough)])
def test_sharded_weights_stay_where_they_are(fmt: str, spec: P) -> None:
    rng = seeded(fmt, spec)
    x, w = normal(rng, 8, 256), normal(rng, 256, 64)
    options = {"block_size": 16} if fmt == "int4" else {}
    q = quantize(w, dtype=fmt, activations="int8", axis=0, **options)
    placed = q.with_sharding(NamedSharding(MESH, spec))
    run = jax.jit(lambda x, q: x @ q).lower(x, placed).compile()
    assert error(run(x, placed), rounded(x, (1,), "int8") @ np.asarray(q.materialize(), np.float64)) < 1e-6
    moved = [line for line in run.as_text().splitlines() if "all-gather" in line or "all-to-all" in line]
    assert not [line for line in moved if "s8[" in line or "u8[" in line]


def test_shard_map_and_export() -> None:
    rng = seeded("export")
    x, w = normal(rng, 8, 64), normal(rng, 64, 32)
    q = quantize(w, dtype="nf4", activations="int8", axis=0)
    want = rounded(x, (1,), "int8") @ np.asarray(q.materialize(), np.float64)
    mapped = implicit(
        jax.shard_map(lambda x, q: x @ q, mesh=MESH, in_specs=(P("a"), P(None, "b")), out_specs=P("a", "b"))
    )
    assert error(mapped(x, q), want) < near("nf4")
    made = export.export(jax.jit(lambda x: x @ q), disabled_checks=export_checks())(x)
    assert error(made.call(x), want) < near("nf4")


def test_lora_over_it() -> None:
    rng = seeded("lora")
    x, w = normal(rng, 5, 64), normal(rng, 64, 64)
    model = {"dense": {"kernel": w}}
    quantized = quantize_tree(model, {"*": {"dtype": "int8", "activations": "int8"}}, min_size=0, donate=False)
    adapted = ef.add_lora(quantized, "*", rank=4, key=jax.random.key(0))
    q = adapted["dense"]["kernel"]
    q = dataclasses.replace(q, b=normal(rng, 4, 64))
    true, values = np.asarray(q.w.materialize(), np.float64), rounded(x, (1,), "int8")
    want = values @ true + np.asarray(x, np.float64) @ np.asarray(q.a @ q.b, np.float64) * q.scale
    assert error(x @ q, want) < 1e-5
    merged, _ = ef.merge_lora({"dense": {"kernel": q}})
    assert merged["dense"]["kernel"].format == "int8 x int8"


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
    for value, words in ((2.0, "not a number from 0"), ("0.5", "not a number from 0"), (0.5, "needs statistics")):
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
