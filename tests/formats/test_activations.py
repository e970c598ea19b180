"""Products with `activations=`: against the definition in NumPy, whatever is contracted; bad input; files; models."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import eformer as ef
from eformer._formats.activations.array import ActivationArray
from eformer._formats.activations.stochastic import rounded_at_random
from eformer._formats.permuted.array import PermutedArray
from eformer.jaximus import implicit, materialization_policy
from eformer.ops.quantization import quantize, quantize_tree
from eformer.ops.quantization.kernels import export_checks

from .contract import normal, seeded
from .rounding import LARGEST, error, rounded

PAIRS = [
    ("int8", "int8"), ("nf4", "int8"), ("int4", "int8"), ("ternary", "int8"), ("fp8", "fp8"),
    *(pytest.param(*pair, marks=pytest.mark.thorough) for pair in [
        ("binary", "int8"), ("int2", "int8"), ("int6", "int8"), ("iq4_nl", "int8"), ("mxfp4", "int8"), ("nvfp4", "fp8"),
        ("mxfp8", "fp8"), ("fp8_e5m2", "fp8"),
    ]),
]  # fmt: skip


def near(fmt: str) -> float:
    """A kernel may take integers for the entries of a table that has fractions."""
    return 1e-4 if fmt == "nf4" else 1e-6


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
