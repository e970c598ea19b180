"""The unified interface: types, configuration, `quantize` and `straight_through`."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formats.contract import normal, seeded

from eformer._quantize.config import FORMATS, config_of
from eformer.jaximus import explain
from eformer.ops.quantization import (
    Array1B,
    Array8B,
    ArrayInt,
    ArrayNF4,
    QuantizationConfig,
    QuantizationType,
    quantize,
    straight_through,
)

W = normal(seeded("config"), 70, 12)
KINDS = list(QuantizationType)
# Formats of the same class as another one here are left to `make test-all`.
_OFTEN = ("nf4", "int8", "ternary", "binary", "int4")
EVERY = [kind if kind in _OFTEN else pytest.param(kind, marks=pytest.mark.thorough) for kind in KINDS]


def test_types() -> None:
    documented = ["nf4", "int8", "ternary", "binary"]
    assert [t.value for t in QuantizationType][:4] == documented
    assert [t.name for t in QuantizationType] == [t.value.upper() for t in QuantizationType]
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
    for field in ("simulate", "use_kernel", "scaled", "double_quant", "symmetric", "biased"):
        with pytest.raises(TypeError, match=field):
            QuantizationConfig(**{field: "yes"})
    with pytest.raises(ValueError, match="Supported types: nf4, int8, ternary, binary, int2"):
        QuantizationConfig("nf5")


@pytest.mark.parametrize("kind", KINDS)
def test_config_through_json(kind: QuantizationType) -> None:
    takes = FORMATS[kind].options
    own = FORMATS[kind].default_block
    blocks = {"block_size": 32} if "block_size" in takes and own == 64 else {}
    config = QuantizationConfig(kind, simulate=True, use_kernel=False, **blocks)
    text = config.to_json()
    assert QuantizationConfig.from_json(text) == config
    block = blocks.get("block_size", own)
    assert json.loads(text) == {"dtype": kind.value, "block_size": block, "simulate": True, "use_kernel": False}
    option = {"double_quant": True} if "double_quant" in takes else {"axis": (0, 1)}
    more = dataclasses.replace(config, **option)
    assert QuantizationConfig.from_json(more.to_json()) == more != config
    old = json.dumps(
        {"dtype": kind.value, "block_size": own if own == 16 else 32, "simulate": False, "use_kernel": True}
    )
    assert QuantizationConfig.from_json(old) == QuantizationConfig(kind, **blocks)
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
    for kind in (kind for kind in KINDS if "block_size" not in FORMATS[kind].options):
        with pytest.raises(ValueError, match=f"block_size=32 has no meaning for '{kind}': it is an option of \"nf4\""):
            quantize(W, dtype=kind, block_size=32)
        assert QuantizationConfig(kind, 64).block_size == 64
    with pytest.raises(TypeError, match="axis='0' is of type str"):
        QuantizationConfig(axis="0")  # pyright: ignore[reportArgumentType]


def test_int8_is_in_blocks_only_if_asked() -> None:
    plain, blocks = QuantizationConfig("int8"), QuantizationConfig("int8", 64)
    assert (plain.block_size, blocks.block_size) == (None, 64)
    assert plain != blocks
    assert type(quantize(W, plain)) is type(quantize(W, dtype="int8")) is Array8B
    for q in (quantize(W, blocks), quantize(W, dtype="int8", block_size=64), quantize(W, dtype="int8", block_size=32)):
        assert (type(q), q.format, q.bits) == (ArrayInt, "int8", 8)
    assert q.block_size == 32
    assert config_of(q) == QuantizationConfig("int8", 32, axis=-2)
    assert config_of(quantize(W, plain)) == QuantizationConfig("int8", axis=(-1,))
    for config in (
        plain,
        blocks,
        dataclasses.replace(blocks, axis=-1),
        QuantizationConfig("int8", 32, symmetric=False),
        QuantizationConfig("int8", 32, biased=True),
    ):
        assert QuantizationConfig.from_json(config.to_json()) == config
        assert dataclasses.replace(config) == config == pickle.loads(pickle.dumps(config))
    with pytest.raises(ValueError, match=r"symmetric=False .*give a block_size"):
        quantize(W, dtype="int8", symmetric=False)
    with pytest.raises(ValueError, match=r"biased=True .*give a block_size"):
        quantize(W, QuantizationConfig("int8", biased=True))


def test_options_of_integers() -> None:
    assert quantize(W, dtype="int4").zero is None
    assert quantize(W, dtype="int4", symmetric=False).zero is not None
    config = QuantizationConfig("int4", biased=True)
    assert config_of(quantize(W, dtype="int4", biased=True)) == dataclasses.replace(config, axis=-2)
    np.testing.assert_array_equal(straight_through(W, dtype="int4", biased=True), quantize(W, config).materialize())
    assert not config.symmetric
    q = quantize(W, config)
    assert (q.zero, q.bias.dtype, q.scale.dtype) == (None, jnp.bfloat16, jnp.bfloat16)
    assert config_of(q) == dataclasses.replace(config, axis=-2)
    with pytest.raises(ValueError, match="biased=True has no meaning for 'nf4'"):
        QuantizationConfig(biased=True)
    whole = quantize(W, dtype="int4", block_size=None)
    assert whole.scale.shape == (12, 1)
    with pytest.raises(ValueError, match="symmetric=False has no meaning for 'nf4'"):
        quantize(W, symmetric=False)
    for wrong in (0, 8, 20, -64, 1 << 21):
        with pytest.raises(ValueError, match=f"block_size={wrong} is not allowed: integers .*multiple of 8"):
            QuantizationConfig("int3", wrong)
    for wrong in ("64", 64.0, True):
        with pytest.raises(TypeError, match="block_size="):
            QuantizationConfig("int4", wrong)
    with pytest.raises(TypeError, match="block_size=None"):
        QuantizationConfig("nf4", None)


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
        *((f"int{bits}", ArrayInt, f"int{bits}") for bits in (2, 3, 4, 5, 6)),
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
            wrong = {"double_quant": True} if "double_quant" not in FORMATS[kind].options else {"scaled": False}
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
@pytest.mark.parametrize("kind", EVERY)
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


@pytest.mark.parametrize("kind", EVERY)
def test_straight_through_gradient_is_the_identity(kind: QuantizationType) -> None:
    ct = normal(seeded("ct"), *W.shape)
    for f in (straight_through, lambda w, dtype: quantize(w, dtype=dtype, simulate=True)):
        grad = jax.grad(lambda w, f=f: (ct * f(w, dtype=kind)).sum())(W)
        np.testing.assert_array_equal(grad, ct)
    _, tangent = jax.jvp(lambda w: straight_through(w, dtype=kind), (W,), (ct,))
    np.testing.assert_array_equal(tangent, ct)


@pytest.mark.parametrize("kind", EVERY)
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
