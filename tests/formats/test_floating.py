"""`ArrayFloat`: arrays of codes that exist, their checks, files, lookups, adapters."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import eformer as ef
from eformer._quantize.config import config_of
from tests.formats import references
from tests.formats.contract import check, normal, seeded

KINDS = ("fp8", "fp8_e5m2", "mxfp4", "mxfp8", "mxfp8_e5m2", "nvfp4", "iq4_nl")
ELEMENTS = {"mxfp4": "fp4", "mxfp8": "fp8_e4m3", "mxfp8_e5m2": "fp8_e5m2", "nvfp4": "fp4", "iq4_nl": "iq4_nl"}


def stored(kind: str, *shape: int, axis: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes and scales of a checkpoint, and the values they stand for, in f64."""
    rng, block = seeded(kind, shape), 16 if kind == "nvfp4" else 32
    table = references.element_table(ELEMENTS[kind])
    codes = rng.choice(np.flatnonzero(np.isfinite(table)), shape).astype(np.uint8)
    sizes = list(shape)
    sizes[axis] = -(-shape[axis] // block)
    if kind == "iq4_nl":
        scale = rng.standard_normal(sizes).astype(np.float16)
        numbers = scale.astype(np.float64)
    else:
        numbered = references.e8m0_table() if kind.startswith("mx") else references.element_table("fp8_e4m3")
        scale = rng.integers(110, 126, sizes).astype(np.uint8)
        numbers = numbered[scale]
        scale = scale if kind.startswith("mx") else scale.view(ml_dtypes.float8_e4m3fn)
    spread = np.take(np.repeat(numbers, block, axis=axis), range(shape[axis]), axis=axis)
    return codes, scale, table[codes] * spread


@pytest.mark.parametrize("axis", [-1, pytest.param(-2, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kind", ELEMENTS)
def test_codes_of_a_checkpoint_are_kept(kind: str, axis: int) -> None:
    codes, scale, values = stored(kind, 3, 70, 50, axis=axis)
    q = ef.ArrayFloat.from_codes(codes, scale, kind=kind, axis=axis)
    assert (q.shape, q.dtype, q.format) == ((3, 70, 50), jnp.float32, kind)
    np.testing.assert_array_equal(q.materialize(), values.astype(np.float32))
    x = normal(seeded(kind), 3, 4, 70)
    with ef.materialization_policy("error"):
        y = x @ q
    check(y, x @ q.materialize())


def test_scales_of_tensors() -> None:
    codes, scale, values = stored("nvfp4", 3, 32, 20, axis=-2)
    for whole in (np.float32(0.3), np.array([0.3, 2, 5], np.float32), np.full((3, 1, 1), 0.25, np.float32)):
        q = ef.ArrayFloat.from_codes(codes, scale, kind="nvfp4", tensor_scale=whole, axis=-2)
        factor = np.float64(whole).reshape(-1, *[1] * 2)
        np.testing.assert_allclose(q.materialize(), values * factor, rtol=2e-7)
    one = jax.tree.map(lambda leaf: leaf[1], q)  # of a stack, with its scale
    np.testing.assert_allclose(one.materialize(), values[1] * 0.25, rtol=2e-7)


@pytest.mark.parametrize("kind", ["fp8", pytest.param("fp8_e5m2", marks=pytest.mark.thorough)])
def test_layouts_of_fp8_checkpoints(kind: str) -> None:
    """One scale for a tensor, for each row, and for each block of 128 × 128 (`weight_scale_inv`)."""
    rng, dtype = seeded(kind), ml_dtypes.float8_e4m3fn if kind == "fp8" else ml_dtypes.float8_e5m2
    weight = rng.standard_normal((300, 200)).astype(dtype)
    x = normal(rng, 5, 200)
    for sizes in ((), (1, 1), (300, 1), (3, 2), (300, 2), (3, 1), (1, 2)):
        scale = rng.uniform(0.5, 2, sizes).astype(np.float32)
        q = ef.ArrayFloat.from_codes(weight, scale, kind=kind, axis=-1, dtype=jnp.float32)
        spread = scale
        for axis, (size, n) in enumerate(zip(sizes, weight.shape, strict=False)):
            spread = np.repeat(spread, 128, axis=axis).take(range(n), axis=axis) if size in (2, 3) else spread
        wanted = weight.astype(np.float32) * spread
        np.testing.assert_array_equal(q.materialize(), wanted)
        assert q.nbytes <= weight.size * (1.28 if {2, 3} & {*sizes} else 1.0) + 4 * 600  # 256 columns are held
        check(x @ q.T, x @ wanted.T)
        check(ef.implicit(lambda q: q[128:256, :128])(q), wanted[128:256, :128])
        check(ef.implicit(lambda q: q[jnp.array([7, 299])])(q), wanted[np.array([7, 299])])


def test_e8m0_may_be_floats() -> None:
    codes, scale, values = stored("mxfp4", 4, 64, axis=-1)
    q = ef.ArrayFloat.from_codes(codes, scale.view(ml_dtypes.float8_e8m0fnu), kind="mxfp4", axis=-1)
    assert q.scale.dtype == jnp.uint8
    np.testing.assert_array_equal(q.materialize(), values.astype(np.float32))


def test_nan_scales_stay_nan() -> None:
    codes, scale, values = stored("mxfp4", 4, 64, axis=-1)
    scale[1, 1] = 255
    q = ef.ArrayFloat.from_codes(codes, scale, kind="mxfp4", axis=-1)
    values[1, 32:] = np.nan
    np.testing.assert_array_equal(q.materialize(), values.astype(np.float32))
    y = np.asarray(q @ jnp.ones((64, 2)))
    assert np.isnan(y[1]).all()
    assert np.isfinite(np.delete(y, 1, axis=0)).all()
    stack = ef.implicit(lambda q: jnp.stack([q, q]).at[jnp.array([0, 5])].get(mode="fill"))(q)
    assert np.isnan(stack.materialize()[1]).all()
    np.testing.assert_array_equal(stack.materialize()[0], values.astype(np.float32))


CODES = np.zeros((64, 32), np.uint8)
REFUSED = {
    "kind='fp6' is unknown": lambda: ef.ArrayFloat.from_codes(CODES, 1.0, kind="fp6"),
    r"kind='mxpf4' is unknown; .* Did you mean 'mxfp4'\?": lambda: ef.ArrayFloat.quantize(jnp.ones((4, 4)), "mxpf4"),
    r"a scale \[2, 1\] does not fit codes of mxfp4 \[64, 32\] along axis -1: it must be \[64, 1\]": (
        lambda: ef.ArrayFloat.from_codes(CODES, np.ones((2, 1), np.uint8), kind="mxfp4", axis=-1)
    ),
    "bytes is e8m0, which nvfp4 does not have; its own is float8_e4m3fn": lambda: ef.ArrayFloat.from_codes(
        CODES, np.ones((4, 32), np.uint8), kind="nvfp4"
    ),
    "block_size=None is not allowed for mxfp4": lambda: ef.quantize(jnp.ones((4, 4)), dtype="mxfp4", block_size=None),
    "kind='int4' is unknown": lambda: ef.ArrayFloat.quantize(jnp.ones((4, 4)), "int4"),
    "are 0 to 15, one for each value, got 200": lambda: ef.ArrayFloat.from_codes(
        np.full((64, 32), 200, np.uint8), np.ones((2, 32), np.uint8), kind="mxfp4"
    ),
    "must be uint8, one for each value, got int32": lambda: ef.ArrayFloat.from_codes(
        CODES.astype(np.int32), np.ones((2, 32), np.uint8), kind="mxfp4"
    ),
    "must be uint8 or float8_e4m3fn": lambda: ef.ArrayFloat.from_codes(np.ones((4, 4)), 1.0, kind="fp8"),
    "does not have the rank of the codes": lambda: ef.ArrayFloat.from_codes(CODES, np.ones(2, np.uint8), kind="mxfp4"),
    r"scale \[3, 32\] does not fit codes": lambda: ef.ArrayFloat.from_codes(
        CODES, np.ones((3, 32), np.uint8), kind="mxfp4"
    ),
    "scales that are floating or uint8": lambda: ef.ArrayFloat.from_codes(
        CODES, np.ones((2, 32), np.int32), kind="mxfp4"
    ),
    "tensor_scale .* does not fit": lambda: ef.ArrayFloat.from_codes(
        CODES, jnp.ones((4, 32), jnp.float8_e4m3fn), kind="nvfp4", tensor_scale=np.ones((2, 1))
    ),
    "axis=3 is out of range": lambda: ef.ArrayFloat.quantize(jnp.ones((4, 4)), "mxfp4", axis=3),
    "block_size=64 is not allowed for mxfp4, which has blocks of 32": lambda: ef.quantize(
        jnp.ones((64, 4)), dtype="mxfp4", block_size=64
    ),
    "block_size=64 is not allowed for fp8, which has no blocks, or": lambda: ef.quantize(
        jnp.ones((64, 4)), dtype="fp8", block_size=64
    ),
    "quantizes floating-point arrays": lambda: ef.quantize(jnp.ones((4, 4), jnp.int32), dtype="nvfp4"),
    "are not stored mxfp4": lambda: ef.ArrayFloat(jnp.asarray(CODES), jnp.ones((2, 32)), kind="mxfp4"),
    "does not broadcast against codes": lambda: ef.ArrayFloat(jnp.asarray(CODES), jnp.ones((2, 32)), kind="fp8"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_input(message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        REFUSED[message]()


@pytest.mark.parametrize(
    ("kind", "options"), [*((kind, {}) for kind in KINDS), ("fp8", {"block_size": 128}), ("fp8_e5m2", {"axis": (0, 1)})]
)
def test_files_and_configurations(kind: str, options: dict, tmp_path) -> None:
    w = normal(seeded(kind), 130, 40)
    q = ef.quantize(w, dtype=kind, **options)
    found = ef.load(ef.save(tmp_path / "w.safetensors", {"w": q}))["w"]
    assert jax.tree.structure(found) == jax.tree.structure(q)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(q), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    config = config_of(q)
    assert config is not None
    assert ef.QuantizationConfig.from_json(config.to_json()) == config
    again = ef.quantize(w, dataclasses.replace(config))
    assert jax.tree.structure(again) == jax.tree.structure(q)
    np.testing.assert_array_equal(again.materialize(), q.materialize())
    np.testing.assert_array_equal(ef.straight_through(w, dtype=kind, **options), q.materialize())


@pytest.mark.parametrize(
    ("kind", "bits", "error"),
    [
        ("fp8", 8.02, 0.027), ("fp8_e5m2", 8.02, 0.053), ("mxfp4", 4.25, 0.117), ("mxfp8", 8.25, 0.030),
        ("mxfp8_e5m2", 8.25, 0.056), ("nvfp4", 4.51, 0.096), ("iq4_nl", 4.5, 0.0741),
    ],
)  # fmt: skip
def test_size_and_error_on_a_normal_distribution(kind: str, bits: float, error: float) -> None:
    w = normal(seeded(kind), 2048, 64)
    q = ef.quantize(w, dtype=kind)
    assert q.bits_per_weight <= bits
    found = float(jnp.linalg.norm(q.materialize() - w) / jnp.linalg.norm(w))
    assert 0.9 * error < found < error


@pytest.mark.parametrize("kind", ["mxfp4", *(pytest.param(k, marks=pytest.mark.thorough) for k in KINDS)])
def test_adapters(kind: str) -> None:
    w, x = normal(seeded(kind), 64, 48), normal(seeded(kind, "x"), 5, 64)
    params = ef.quantize_tree({"up": {"kernel": w}}, kind, min_size=0, donate=False)
    lora = ef.add_lora(params, rank=4, key=jax.random.key(0))
    trained, frozen = ef.split_trainable(lora)

    def loss(trained, x):
        return jnp.sum(jnp.tanh(x @ ef.merge(trained, frozen)["up"]["kernel"]) ** 2)

    with ef.materialization_policy("error"):
        gradient = jax.jit(jax.grad(loss))(trained, x)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
    assert any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))
    check(x @ lora["up"]["kernel"], x @ params["up"]["kernel"].materialize())


def test_a_branch_that_chooses_between_weights_in_blocks_of_128() -> None:
    rng = seeded("cond")
    one, other = (ef.quantize(normal(rng, 200, 300), dtype="fp8", block_size=128) for _ in range(2))
    x = normal(rng, 3, 200)
    for choose in (
        lambda i, a, b: jax.lax.cond(i > 0, lambda: a, lambda: b),
        lambda i, a, b: jax.lax.switch(i, [lambda a, b: b, lambda a, b: a], a, b),
    ):
        with ef.materialization_policy("error"):
            chosen = [jax.jit(ef.implicit(lambda i, *q, f=choose: x @ f(i, *q)))(i, one, other) for i in (0, 1)]
        check(chosen, [x @ other.materialize(), x @ one.materialize()], 2e-5)
