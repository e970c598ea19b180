"""The unified interface: types, configuration, `quantize` and `straight_through`."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formats.contract import normal, seeded

from eformer.jaximus import explain
from eformer.ops.quantization import (
    Array1B,
    Array8B,
    ArrayNF4,
    QuantizationConfig,
    QuantizationType,
    quantize,
    straight_through,
)

W = normal(seeded("config"), 70, 12)
KINDS = list(QuantizationType)


def test_types() -> None:
    assert [t.value for t in QuantizationType] == ["nf4", "int8", "ternary", "binary"]
    assert [t.name for t in QuantizationType] == ["NF4", "INT8", "TERNARY", "BINARY"]
    assert QuantizationType("nf4") == "nf4"


def test_config_defaults_and_coercion() -> None:
    config = QuantizationConfig()
    assert dataclasses.astuple(config)[:4] == (QuantizationType.NF4, 64, False, True)
    assert (config.axis, config.scaled, config.double_quant) == (None, True, False)
    assert QuantizationConfig("binary").dtype is QuantizationType.BINARY
    assert QuantizationConfig("int8") == QuantizationConfig(QuantizationType.INT8)
    assert hash(QuantizationConfig("int8")) == hash(QuantizationConfig(QuantizationType.INT8))


def test_config_is_frozen_and_checked() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        QuantizationConfig().block_size = 32  # pyright: ignore[reportAttributeAccessIssue]
    for field in ("simulate", "use_kernel", "scaled", "double_quant"):
        with pytest.raises(TypeError, match=field):
            QuantizationConfig(**{field: "yes"})
    with pytest.raises(ValueError, match="Supported types: nf4, int8, ternary, binary"):
        QuantizationConfig("nf5")


@pytest.mark.parametrize("kind", KINDS)
def test_config_through_json(kind: QuantizationType) -> None:
    blocks = 32 if kind is QuantizationType.NF4 else 64
    config = QuantizationConfig(kind, blocks, True, False)
    text = config.to_json()
    assert QuantizationConfig.from_json(text) == config
    assert json.loads(text) == {"dtype": kind.value, "block_size": blocks, "simulate": True, "use_kernel": False}
    option = {"double_quant": True} if kind is QuantizationType.NF4 else {"axis": (0, 1)}
    more = dataclasses.replace(config, **option)
    assert QuantizationConfig.from_json(more.to_json()) == more != config
    old = json.dumps({"dtype": kind.value, "block_size": 32, "simulate": False, "use_kernel": True})
    assert QuantizationConfig.from_json(old) == QuantizationConfig(kind, blocks)
    for text in ('{"speed": 3}', "[1]", "null", '"nf4"'):
        with pytest.raises(TypeError, match=r"JSON object .*block_size.*" + re.escape(text)):
            QuantizationConfig.from_json(text)


def test_options_beside_a_configuration() -> None:
    config = QuantizationConfig("nf4", 32, axis=-1, double_quant=True)
    for call in (quantize, straight_through):
        with pytest.raises(ValueError, match="axis=0 contradicts the configuration, which has axis=-1"):
            call(W, config, axis=0)
        with pytest.raises(TypeError, match="scaled must be True or False"):
            call(W, config, scaled=1)
    for q in (quantize(W, config), quantize(W, config, axis=-1), quantize(W, QuantizationConfig(), axis=-1)):
        assert q.axis == -1
    assert type(quantize(W, QuantizationConfig(), double_quant=True).absmax) is type(quantize(W, config).absmax)
    for kind in KINDS[1:]:
        with pytest.raises(ValueError, match=f"block_size=32 has no meaning for '{kind}': it is an option of \"nf4\""):
            quantize(W, dtype=kind, block_size=32)
        assert QuantizationConfig(kind, 64).block_size == 64
    with pytest.raises(TypeError, match="axis='0' is of type str"):
        QuantizationConfig(axis="0")  # pyright: ignore[reportArgumentType]


def test_every_field_does_something() -> None:
    base = quantize(W, QuantizationConfig())
    assert isinstance(base, ArrayNF4)
    assert base.block_size == 64
    assert isinstance(quantize(W, QuantizationConfig("int8")), Array8B)
    assert quantize(W, QuantizationConfig(block_size=32)).block_size == 32
    simulated = quantize(W, QuantizationConfig(simulate=True))
    assert isinstance(simulated, jax.Array)
    np.testing.assert_array_equal(simulated, base.materialize())
    slow = quantize(W, QuantizationConfig(use_kernel=False))
    assert not slow.use_kernel
    x = jnp.ones((2, 70))
    reasons = [explain(lambda q=q: x @ q)().kernels[0].fields["reason"] for q in (base, slow)]
    assert "preference='xla'" in reasons[1]
    assert reasons[0] != reasons[1]


@pytest.mark.parametrize(
    ("kind", "cls", "fmt"),
    [
        ("nf4", ArrayNF4, "nf4"),
        ("int8", Array8B, "int8"),
        ("ternary", Array1B, "ternary"),
        ("binary", Array1B, "binary"),
    ],
)
def test_quantize(kind: str, cls: type, fmt: str) -> None:
    by_name, by_type = quantize(W, dtype=kind), quantize(W, dtype=QuantizationType(kind))
    by_config = quantize(W, QuantizationConfig(kind), dtype="binary")  # the configuration wins
    for q in (by_name, by_type, by_config):
        assert type(q) is cls
        assert q.format == fmt
        assert (q.shape, q.dtype) == (W.shape, W.dtype)
        np.testing.assert_array_equal(q.materialize(), by_name.materialize())


def test_default_type_is_nf4() -> None:
    assert isinstance(quantize(W), ArrayNF4)
    np.testing.assert_array_equal(straight_through(W), quantize(W).materialize())


def test_options() -> None:
    assert quantize(W, dtype="ternary", scaled=False).scale is None
    assert set(np.unique(quantize(W, dtype="ternary", scaled=False).materialize())) <= {-1, 0, 1}
    assert quantize(W, axis=-1).axis == -1
    assert quantize(W, dtype="int8", axis=(0, 1)).scale.size == 1
    small, large = quantize(W, block_size=2, double_quant=True), quantize(W, block_size=2)
    assert small.nbytes < large.nbytes
    simulated = quantize(W, block_size=2, simulate=True, double_quant=True)
    np.testing.assert_array_equal(simulated, small.materialize())


def test_what_is_no_configuration() -> None:
    for call in (quantize, straight_through):
        for config in ("nf4", {}, {"dtype": "nf4"}, QuantizationType.INT8, 64):
            with pytest.raises(TypeError, match=r"config=.* must be a QuantizationConfig or None.*dtype="):
                call(W, config)


def test_options_a_format_would_ignore() -> None:
    for call in (quantize, straight_through, lambda w, **o: quantize(w, simulate=True, **o)):
        for kind in KINDS:
            wrong = {"double_quant": True} if kind is not QuantizationType.NF4 else {"scaled": False}
            with pytest.raises(ValueError, match=f"no meaning for '{kind}'"):
                call(W, dtype=kind, **wrong)
            for option in ({"scaled": "x"}, {"scaled": None}, {"double_quant": 1}):
                with pytest.raises(TypeError, match=f"{next(iter(option))} must be True or False"):
                    call(W, dtype=kind, **option)
        with pytest.raises(ValueError, match="no meaning for 'int8'"):
            call(W, dtype="int8", scaled=False)


def test_star_imports_bring_public_names_only() -> None:
    for door in ("", "._config", ".kernels", ".implicit_array_nf4", ".implicit_array_8bit", ".implicit_array_1bit"):
        names: dict[str, object] = {}
        exec(f"from eformer.ops.quantization{door} import *", names)
        found = set(names) - {"__builtins__"}
        assert found
        assert all(getattr(names[name], "__module__", "").startswith("eformer") for name in found), door


def test_ternary_uses_the_documented_threshold() -> None:
    codes = quantize(W, dtype="ternary", scaled=False).materialize()
    np.testing.assert_array_equal(codes, np.sign(W) * (np.abs(W) > 0.5 * np.std(W)))


def test_scales_are_least_squares() -> None:
    """No other scale per column is nearer to the weights."""
    for kind in ("ternary", "binary"):
        codes, q = np.asarray(quantize(W, dtype=kind, scaled=False).materialize()), quantize(W, dtype=kind)
        best = (codes * np.asarray(W)).sum(0) / (codes * codes).sum(0)
        np.testing.assert_allclose(q.materialize(), codes * best, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_straight_through_forward_is_exact(kind: QuantizationType, dtype) -> None:
    w = W.astype(dtype)
    for options in ({}, {"axis": -1}):
        want = quantize(w, dtype=kind, **options).materialize()
        for got in (
            straight_through(w, dtype=kind, **options),
            jax.jit(lambda w, o=options: straight_through(w, dtype=kind, **o))(w),
            quantize(w, dtype=kind, simulate=True, **options),
            straight_through(w, QuantizationConfig(kind), **options),
        ):
            assert got.dtype == dtype
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_straight_through_gradient_is_the_identity(kind: QuantizationType) -> None:
    ct = normal(seeded("ct"), *W.shape)
    for f in (straight_through, lambda w, dtype: quantize(w, dtype=dtype, simulate=True)):
        grad = jax.grad(lambda w, f=f: (ct * f(w, dtype=kind)).sum())(W)
        np.testing.assert_array_equal(grad, ct)
    _, tangent = jax.jvp(lambda w: straight_through(w, dtype=kind), (W,), (ct,))
    np.testing.assert_array_equal(tangent, ct)


@pytest.mark.parametrize("kind", KINDS)
def test_transformations_of_quantize(kind: QuantizationType) -> None:
    ws = normal(seeded(kind), 3, 70, 12)
    shape = jax.eval_shape(lambda w: quantize(w, dtype=kind), ws)
    assert (shape.shape, shape.dtype) == (ws.shape, ws.dtype)
    assert jax.eval_shape(lambda w: straight_through(w, dtype=kind), ws).shape == ws.shape
    one_by_one = jnp.stack([quantize(w, dtype=kind).materialize() for w in ws])
    mapped = jax.vmap(lambda w: quantize(w, dtype=kind))(ws)
    assert mapped.shape == ws.shape
    np.testing.assert_array_equal(mapped.materialize(), one_by_one)
    through = jax.vmap(lambda w: straight_through(w, dtype=kind))(ws)
    np.testing.assert_array_equal(through, one_by_one)
    jitted = jax.jit(lambda w: quantize(w, dtype=kind))(ws[0])
    assert jax.tree.structure(jitted) == jax.tree.structure(quantize(ws[0], dtype=kind))
    np.testing.assert_array_equal(jitted.materialize(), one_by_one[0])
