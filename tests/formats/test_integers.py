"""Integers in blocks: equal to a readable twin, bounded, exact from codes; zero points and biases in products."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import eformer as ef
from eformer._formats.integer import codec
from eformer.ops.quantization import ArrayInt, QuantizationConfig, quantize
from eformer.serialization import load, save

from . import references
from .contract import check, dense, normal, seeded

BITS = (2, 3, 4, 5, 6, 8)
ANY = st.sampled_from(BITS)


def random(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def stored(codes: np.ndarray, bits: int) -> np.ndarray:
    return (codes.astype(np.int16) - 128).astype(np.int8) if bits == 8 else references.bits_in_a_row(codes, bits)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_fast_equals_reference(bits: int, symmetric: bool) -> None:
    for shape, axis, block in (((40, 6), -2, 16), ((3, 70), -1, 32), ((2, 50, 3), -2, 24), ((0, 5), -2, 16)):
        w = random(bits, *shape)
        how = {"axis": axis, "bits": bits, "block_size": block}
        found, want = (
            codec.encode(w, symmetric=symmetric, **how),
            references.integer_encode(w, symmetric=symmetric, **how),
        )
        np.testing.assert_array_equal(found[0], stored(want[0], bits), strict=True)
        np.testing.assert_array_equal(found[1], want[1], strict=True)
        assert (found[2] is None) == symmetric
        if not symmetric:
            np.testing.assert_array_equal(found[2], want[2], strict=True)
        values = codec.decode(*found, None, axis=axis, size=shape[axis], bits=bits, dtype=jnp.float32)
        blocks = references.integer_decode(*want, None, bits)
        flat = blocks.reshape(*blocks.shape[:-2], -1)[..., : shape[axis]]
        np.testing.assert_array_equal(values, np.moveaxis(flat, -1, axis), strict=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bits", BITS)
def test_biases_equal_the_reference(bits: int, dtype: str) -> None:
    for shape, axis, block in (((40, 6), -2, 16), ((3, 70), -1, 32), ((0, 5), -2, 16)):
        w = random(bits, *shape) + 0.5
        how = {"axis": axis, "bits": bits, "block_size": block, "scale_dtype": dtype, "biased": True}
        found, want = codec.encode(w, **how), references.integer_encode(w, **how)
        for ours, theirs in zip(found, (stored(want[0], bits), *want[1:]), strict=True):
            np.testing.assert_array_equal(ours, theirs, strict=True)
        q = ArrayInt.quantize(w, bits, block, axis=axis, scale_dtype=dtype, biased=True)
        assert (q.zero, q.symmetric, q.bias.dtype.name) == (None, False, dtype)
        step = np.repeat(np.asarray(q.scale, np.float64), block, axis=-1)[..., : shape[axis]]
        limit = 0.5 * (1 + 1e-5) if dtype == "float32" else 0.5 + 2**bits / 128
        assert (np.abs(np.moveaxis(np.asarray(q) - w, axis, -1)) <= limit * step + 1e-6).all()


@given(st.integers(0, 2**32 - 1), ANY, st.booleans(), st.floats(-30, 30))
def test_error_is_half_a_step(seed: int, bits: int, symmetric: bool, exponent: float) -> None:
    """A whole step at the end of the range that a symmetric block does not reach; extremes and 0 are exact."""
    rng = np.random.default_rng(seed)
    w = (rng.standard_normal((70, 3)) * rng.choice([0, 1, 1], (70, 3)) * 10.0**exponent).astype(np.float32)
    q = ArrayInt.quantize(w, bits, 32, symmetric=symmetric)
    found = np.asarray(q.materialize(), np.float64)
    step = np.repeat(np.abs(np.asarray(q.scale, np.float64)), 32, axis=-1)[:, :70].T
    half = 2 ** (bits - 1)
    limit = np.where(symmetric & (np.asarray(q.codes()) == 2**bits - 1), 1.0, 0.5)
    assert (np.abs(found - w) <= limit * step * (1 + 1e-5)).all()
    assert (found[w == 0] == 0).all()
    if symmetric:
        ends = np.pad(np.abs(w), ((0, 26), (0, 0))).reshape(3, 32, 3)
        np.testing.assert_array_equal(np.abs(np.asarray(q.scale)).T * half, ends.max(1))


@given(st.integers(0, 2**32 - 1), ANY)
def test_symmetric_codes_survive_a_round_trip(seed: int, bits: int) -> None:
    q = ArrayInt.quantize(random(seed, 40, 5), bits, 16)
    again = ArrayInt.quantize(q.materialize(), bits, 16)
    np.testing.assert_array_equal(again.packed, q.packed)
    np.testing.assert_array_equal(again.scale, q.scale)


@given(st.integers(0, 2**32 - 1), ANY, st.sampled_from(["", "zero", "float zero", "bias"]), st.sampled_from([0, 1]))
def test_from_codes_is_exact(seed: int, bits: int, kind: str, axis: int) -> None:
    """Codes come back as they are, and values by the equation in f32."""
    rng = np.random.default_rng(seed)
    shape, block = (40, 24), 16
    codes = rng.integers(0, 2**bits, shape)
    small = (3, 24) if axis == 0 else (40, 2)
    scale = rng.standard_normal(small).astype(rng.choice(["float32", "float16"]))
    more: dict[str, Any] = {
        "": {},
        "zero": {"zero": rng.integers(0, 2**bits, small)},
        "float zero": {"zero": rng.standard_normal(small).astype(np.float32)},
        "bias": {"bias": rng.standard_normal(small).astype(np.float16)},
    }[kind]
    q = ArrayInt.from_codes(codes, scale, **more, bits=bits, block_size=block, axis=axis, dtype=jnp.float32)
    np.testing.assert_array_equal(q.codes(), codes)
    last = [np.moveaxis(a, axis, -1) for a in (scale, *more.values())]
    spread = [np.repeat(a.astype(np.float32), block, -1)[..., : shape[axis]] for a in last]
    numbers = dict(zip(("scale", *more), spread, strict=True))
    numbers = (numbers["scale"], numbers.get("zero"), numbers.get("bias"))
    moved = np.moveaxis(codes, axis, -1)[..., None]
    want = references.integer_decode(moved, *numbers, bits)[..., 0]
    np.testing.assert_array_equal(q.materialize(), np.moveaxis(want, -1, axis))
    again = ArrayInt.from_codes(q.codes(), scale, **more, bits=bits, block_size=block, axis=axis, dtype=jnp.float32)
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(q)))


@pytest.mark.parametrize("bits", BITS)
def test_entries_along_the_packed_axis(bits: int) -> None:
    """Codes of three, five and six bits begin in one byte and may end in the next."""
    q = ef.ArrayInt.quantize(jax.random.normal(jax.random.key(bits), (3, 40)), bits, 16, axis=-1, symmetric=False)
    ids = jnp.arange(40)[::-1]
    with ef.materialization_policy("error"):
        found = ef.implicit(lambda q: jnp.take(q, ids, axis=1))(q)
    np.testing.assert_array_equal(found, q.materialize()[:, ids])


def test_not_finite_values_stay_in_their_block() -> None:
    for symmetric in (True, False):
        w = random(1, 64)
        w[3], w[40] = np.nan, np.inf
        found = np.asarray(ArrayInt.quantize(w, 4, 16, symmetric=symmetric).materialize())
        assert np.isnan(found[:16]).all()
        assert np.isnan(found[32:48]).all()
        assert np.isfinite(found[16:32]).all()
        huge = np.asarray(ArrayInt.quantize(np.array([3e38, -3e38] * 8, np.float32), 4, 16, symmetric=symmetric))
        assert np.isfinite(huge).all()
        tiny = ArrayInt.quantize(np.full(16, 1e-39, np.float32), 4, 16, symmetric=symmetric)
        np.testing.assert_array_equal(tiny.materialize(), np.zeros(16))


def test_scale_dtypes_and_whole_rows() -> None:
    w = jnp.asarray(random(2, 200, 48))
    sizes = {d: ArrayInt.quantize(w, scale_dtype=d).nbytes for d in ("float32", "bfloat16", "float16")}
    assert sizes["float32"] - sizes["float16"] == sizes["float32"] - sizes["bfloat16"] == 48 * 4 * 2
    rows = ArrayInt.quantize(w, 8, None)
    assert (rows.scale.shape, rows.block_size, rows.pad) == ((48, 1), 200, 0)
    assert float(jnp.abs(rows.materialize() - w).max()) <= float(jnp.abs(rows.scale).max())
    check(jnp.ones((3, 200)) @ rows, jnp.ones((3, 200)) @ dense(rows))
    large = ArrayInt.quantize(np.full(16, 1e6, np.float32), 4, 16, scale_dtype=jnp.float16)
    assert np.isfinite(np.asarray(large.materialize())).all()  # as large as eight times the largest float16 allows
    with pytest.raises(TypeError, match="scale of dtype float64"):
        ArrayInt.quantize(w, scale_dtype=jnp.float64)


def biased(seed: str) -> ArrayInt:
    q = ArrayInt.quantize(normal(seeded(seed), 70, 26), 4, 32, symmetric=False)
    return q.replaced(zero=None, bias=-q.zero.astype(jnp.float32) * q.scale)


@pytest.mark.parametrize("kind", ["zero", "bias"])
def test_factors_of_arrays_with_offsets_are_differentiated_whole(kind: str) -> None:
    """A factor multiplies zero points and biases too, and so does its gradient."""
    rng = seeded(kind)
    q: Any = biased("factor") if kind == "bias" else ArrayInt.quantize(normal(rng, 64, 26), 4, 32, symmetric=False)
    x = normal(rng, 3, q.shape[0])

    def loss(a: jax.Array, w: Any) -> jax.Array:
        return jnp.sum(jnp.sin(x @ (w * a) * 0.1))

    found, want = jax.grad(loss)(jnp.float32(0.7), q), jax.grad(loss)(jnp.float32(0.7), dense(q))
    assert float(want) != 0
    np.testing.assert_allclose(found, want, rtol=1e-4)


@pytest.mark.parametrize("kind", ["int4", "int4-zero", pytest.param("int3", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P("a", "b")])
def test_split_over_devices(kind: str, spec: P) -> None:
    """Codes stay where they are: no program gathers bytes."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto, AxisType.Auto))
    w, x = normal(seeded(kind), 256, 64), normal(seeded("x"), 8, 256)
    config = QuantizationConfig(kind.split("-")[0], 32, symmetric="zero" not in kind)
    q = quantize(jax.device_put(w, NamedSharding(mesh, spec)), config)
    assert q.is_sharded
    np.testing.assert_array_equal(q.materialize(), quantize(w, config).materialize())
    program = jax.jit(lambda x, q: x @ q).lower(x, q).compile()
    check(program(x, q), x @ dense(quantize(w, config)))
    gathers = [line for line in program.as_text().splitlines() if "all-gather" in line]
    assert not [line for line in gathers if "u8[" in line or "s8[" in line]


def test_explicit_meshes() -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    plain = ArrayInt.quantize(normal(seeded("explicit"), 256, 64), 4, 32, symmetric=False)
    x = normal(seeded("x"), 8, 256)
    with jax.set_mesh(mesh):
        for spec in (P("a", None), P(None, "b")):
            q = plain.with_sharding(NamedSharding(mesh, spec))
            split = jax.device_put(x, NamedSharding(mesh, P(None, spec[0])))
            y = jax.jit(lambda x, q: jnp.einsum("mk,kn->mn", x, q, out_sharding=P(None, None)))(split, q)
            check(jnp.asarray(np.asarray(y)), jnp.asarray(np.asarray(x) @ np.asarray(dense(plain))))


def test_files_and_adapters(tmp_path: Any) -> None:
    w = normal(seeded("files"), 70, 26)
    tree = {
        "plain": ArrayInt.quantize(w),
        "zero": ArrayInt.quantize(w, 3, 16, symmetric=False, scale_dtype=jnp.bfloat16),
        "bias": biased("file"),
        "bytes": ArrayInt.quantize(w, 8, 32, axis=-1),
    }
    found = load(save(tmp_path / "m.safetensors", tree))
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        np.testing.assert_array_equal(a, b, strict=True)
    params = ef.quantize_tree({"up": {"kernel": normal(seeded("up"), 128, 64)}}, "int4", min_size=0)
    assert type(params["up"]["kernel"]) is ArrayInt
    adapted = ef.add_lora(params, rank=4, key=jax.random.key(0))
    trainable, frozen = ef.split_trainable(adapted)
    x = normal(seeded("in"), 3, 128)

    def loss(trainable: Any) -> jax.Array:
        return jnp.sum((x @ ef.merge(trainable, frozen)["up"]["kernel"]) ** 2)

    grads = jax.tree.leaves(jax.grad(loss)(trainable))
    assert any(float(jnp.abs(g).max()) > 0 for g in grads)


def test_bad_input() -> None:
    codes, scale = np.zeros((64, 4), int), np.ones((1, 4), np.float32)
    good = {"bits": 4, "block_size": 64}
    for arguments, error, words in (
        ((codes, scale, {"bits": 7, "block_size": 64}), ValueError, "bits=7 is not allowed: .* 2, 3, 4, 5, 6 or 8"),
        ((codes, scale, {"bits": 4, "block_size": 12}), ValueError, "block_size=12 is not allowed"),
        ((codes[0, 0], scale, good), ValueError, "codes are arrays of rank 1 or more"),
        ((codes + 16, scale, good), ValueError, "codes from 16 to 16 are out of range: allowed are 0 to 15"),
        ((codes - 1, scale, good), ValueError, "codes from -1 to -1"),
        ((codes.astype(float), scale, good), TypeError, "codes must be integers"),
        ((codes, scale[:, :2], good), ValueError, r"scale has shape \[1, 2\]; .*need \[1, 4\]"),
        ((codes, scale, {**good, "zero": np.full((1, 4), 17)}), ValueError, "zero from 17 to 17 .* 0 to 16"),
        ((codes, scale, {**good, "zero": np.zeros((2, 4), int)}), ValueError, r"zero has shape \[2, 4\]"),
        ((codes, scale, {**good, "zero": scale, "bias": scale}), ValueError, "a zero point or a bias, not both"),
        ((codes, scale.astype(int), good), TypeError, "scale of dtype int"),
        ((codes, scale, {**good, "axis": 2}), ValueError, "axis=2 is out of range"),
    ):
        with pytest.raises(error, match=words):
            ArrayInt.from_codes(*arguments[:2], **arguments[2])
    q = ArrayInt.quantize(jnp.ones((64, 4)))
    with pytest.raises(TypeError, match="packed must be uint8 storage for bits=4"):
        ArrayInt(q.packed.astype(jnp.int8), q.scale)
    with pytest.raises(ValueError, match=r"must be \(..., blocks, 16\)"):
        ArrayInt(q.packed, q.scale, block_size=32)
    with pytest.raises(TypeError, match="biased must be True or False"):
        ArrayInt.quantize(jnp.ones((64, 4)), biased=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="symmetric must be True or False"):
        ArrayInt.quantize(jnp.ones((64, 4)), symmetric=None)  # pyright: ignore[reportArgumentType]


def test_codes_in_the_middle_between_two() -> None:
    """Values of few bits often are: a quotient that is one ulp off takes the other code."""
    w = np.asarray(jnp.asarray(random(9, 64, 2048)).astype(jnp.bfloat16).astype(jnp.float32))
    for bits, symmetric in ((4, False), (8, False), (8, True)):
        found = codec.encode(w, axis=-1, bits=bits, block_size=32, symmetric=symmetric)
        want = references.integer_encode(w, axis=-1, bits=bits, block_size=32, symmetric=symmetric)
        np.testing.assert_array_equal(found[0], stored(want[0], bits))
