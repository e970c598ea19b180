"""Wrong input: a clear error, or the right answer."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.jaximus import SlicedBelowCoreError
from eformer.ops.quantization import (
    Array1B,
    Array8B,
    ArrayNF4,
    QuantizationConfig,
    dequantize,
    quantize,
    straight_through,
)

from .contract import EVERY_KIND, normal, seeded

W = normal(seeded("bad"), 64, 8)
KINDS = ("nf4", "int8", "ternary", "binary")


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32, jnp.uint8, jnp.bool_, jnp.complex64])
def test_only_floating_input(kind: str, dtype) -> None:
    for call in (quantize, straight_through, jax.jit(quantize, static_argnames="dtype")):
        with pytest.raises(TypeError, match=r"(?i)floating.*" + jnp.dtype(dtype).name):
            call(jnp.ones((4, 4), dtype), dtype=kind)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_scalars_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="rank 1 or more"):
        quantize(jnp.float32(1), dtype=kind)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_codes_that_became_other_numbers_are_not_decoded(kind: str) -> None:
    """As `jax.tree.map` makes them: a cast of a model, or an average of two."""
    q = quantize(W, dtype=kind)
    averaged = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, q, q)
    for bad in (averaged, jax.tree.map(lambda a: a.astype(jnp.int32), q)):
        for use in (lambda b: b.materialize(), lambda b: b[jnp.array([1])], lambda b: W.T @ b):
            with pytest.raises(TypeError, match=r"codes .* instead of u?int8: .*tree_map_with_implicit"):
                use(bad)


@pytest.mark.parametrize("bad", [0, -2, 7, 1 << 20])
def test_block_sizes(bad: int) -> None:
    for call in (
        lambda: ArrayNF4.quantize(W, bad),
        lambda: quantize(W, block_size=bad),
        lambda: QuantizationConfig(block_size=bad),
        lambda: straight_through(W, block_size=bad),
        lambda: ArrayNF4(W, None, bad),
        lambda: ArrayNF4(U8, jnp.ones((8, 1)), bad),
    ):
        with pytest.raises(ValueError, match=f"block_size={bad}"):
            call()


@pytest.mark.parametrize("axis", [2, -3, 5])
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_axis_out_of_range(kind: str, axis: int) -> None:
    with pytest.raises(ValueError, match=rf"{axis}.*out of range for.*rank 2"):
        quantize(W, dtype=kind, axis=axis)


def test_axes_twice_or_too_many() -> None:
    for axes in ((-1, -1), (1, -1), (0, -2)):
        with pytest.raises(ValueError, match="twice"):
            Array8B.quantize(W, axis=axes)
    with pytest.raises(ValueError, match="at least one axis"):
        Array8B.quantize(W, axis=())
    for call in (ArrayNF4.quantize, Array1B.from_float):
        with pytest.raises(ValueError, match="exactly one"):
            call(W, axis=(0, 1))


@pytest.mark.parametrize("values", [[2, 0], [0.5, 1.0], [np.nan, 1.0], [-128, 0]])
def test_values_that_are_no_codes(values: list[float]) -> None:
    with pytest.raises(ValueError, match=r"packs values in"):
        Array1B.quantize(jnp.asarray(values))
    with pytest.raises(ValueError, match=r"packs values in"):
        Array1B.quantize(jnp.asarray([0, 1]), bits=1)
    with pytest.raises(ValueError, match=r"bits=3"):
        Array1B.quantize(jnp.asarray([0, 1]), bits=3)


U8 = jnp.zeros((8, 1, 32), jnp.uint8)
STORAGE = {
    "nf4 dtype": (lambda: ArrayNF4(jnp.zeros((8, 1, 32), jnp.int32), jnp.ones((8, 1)), 64), TypeError, "uint8"),
    "nf4 absmax dtype": (lambda: ArrayNF4(U8, jnp.ones((8, 1), int), 64), TypeError, "floating"),
    "nf4 absmax shape": (lambda: ArrayNF4(U8, jnp.ones((8, 2)), 64), ValueError, "fit together"),
    "nf4 block": (lambda: ArrayNF4(U8, jnp.ones((8, 1)), 32), ValueError, "fit together"),
    "nf4 no absmax": (lambda: ArrayNF4(U8), (TypeError, ValueError), "absmax"),
    "nf4 shape": (lambda: ArrayNF4(U8, jnp.ones((8, 1)), 64, shape=(65, 8)), ValueError, "65"),
    "nf4 other axis": (lambda: ArrayNF4(U8, jnp.ones((8, 1)), 64, shape=(64, 9)), ValueError, "9"),
    "nf4 rank": (lambda: ArrayNF4(U8, jnp.ones((8, 1)), 64, shape=(64,)), ValueError, "axes"),
    "nf4 pad": (lambda: ArrayNF4(U8, jnp.ones((8, 1)), 64, pad=64), ValueError, "pad"),
    "int8 dtype": (lambda: Array8B(jnp.ones((4, 1)), jnp.ones((4, 3), jnp.int32)), TypeError, "int8"),
    "int8 scale dtype": (lambda: Array8B(jnp.ones((4, 1), int), jnp.ones((4, 3), jnp.int8)), TypeError, "floating"),
    "int8 scale shape": (lambda: Array8B(jnp.ones((4, 2)), jnp.ones((4, 3), jnp.int8)), ValueError, "broadcast"),
    "int8 axis": (lambda: Array8B(jnp.ones((4, 1)), jnp.ones((4, 3), jnp.int8), (-2,)), ValueError, "shared along"),
    "int8 shape": (lambda: Array8B(jnp.ones((4, 1)), jnp.ones((4, 3), jnp.int8), shape=(4, 4)), ValueError, "4, 4"),
    "1bit scale shape": (lambda: Array1B(jnp.zeros((8, 2), jnp.uint8), scale=jnp.ones((7, 1))), ValueError, "scale"),
    "1bit scale dtype": (
        lambda: Array1B(jnp.zeros((8, 2), jnp.uint8), scale=jnp.ones((8, 1), int)), (TypeError, ValueError), "floating"
    ),
    "1bit bits": (lambda: Array1B(jnp.zeros((8, 2), jnp.uint8), bits=4), ValueError, "bits=4"),
    "1bit shape": (lambda: Array1B(jnp.zeros((8, 2), jnp.uint8), shape=(9, 8)), ValueError, "9"),
    "1bit scalar": (lambda: Array1B(jnp.zeros((), jnp.uint8)), ValueError, "scalar"),
    "1bit pad": (lambda: Array1B(jnp.zeros((8, 2), jnp.uint8), pad=4), ValueError, "pad"),
    "kind": (lambda: Array1B.from_float(W, "quaternary"), ValueError, "'ternary', 'binary'"),
    "threshold": (lambda: Array1B.from_float(W, threshold=-1.0), ValueError, "threshold"),
    "scale kind": (lambda: Array1B.from_float(W, scale="row"), ValueError, "channel"),
}  # fmt: skip


@pytest.mark.parametrize("case", STORAGE)
def test_storage_that_does_not_fit(case: str) -> None:
    call, error, message = STORAGE[case]
    with pytest.raises(error, match=message):
        call()


NF4, INT8, TERNARY = (quantize(W, dtype=kind) for kind in ("nf4", "int8", "ternary"))
CODES = jnp.asarray(seeded("codes").integers(-1, 2, (64, 8)), jnp.int8)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.bool_, jnp.complex64])
def test_logical_dtypes_that_cannot_be_decoded_to(dtype) -> None:
    """Products decode in floating point, so an array of integers would not be what its `materialize` says."""
    calls = [
        lambda: ArrayNF4(NF4.packed, NF4.absmax, 64, dtype=dtype),
        lambda: ArrayNF4(W, dtype=dtype),
        lambda: ArrayNF4.quantize(W, dtype=dtype),
        lambda: Array8B(INT8.scale, INT8.weight, dtype=dtype),
        lambda: Array1B(TERNARY.weight, scale=TERNARY.scale, dtype=dtype),
        lambda: Array1B(W, dtype=dtype),
        *[lambda q=q: dataclasses.replace(q, dtype=dtype) for q in (NF4, INT8, TERNARY)],
    ]
    if dtype != jnp.int32:  # bare codes may be signed integers
        calls += [lambda: Array1B.quantize(CODES, dtype), lambda: Array1B(CODES, dtype=dtype)]
    for call in calls:
        with pytest.raises(TypeError, match=rf"dtype={jnp.dtype(dtype).name} is not allowed: .* floating values"):
            call()


def test_dtypes_that_stay() -> None:
    """Signed codes, unsigned ones given a signed dtype, and conversions of the values, which are dense as ever."""
    x = normal(seeded("stay"), 3, 64)
    for dtype in (jnp.int8, jnp.int32, jnp.bfloat16):
        for q in (Array1B.quantize(CODES, dtype), dataclasses.replace(Array1B.quantize(CODES), dtype=dtype)):
            assert q.dtype == dtype
            np.testing.assert_allclose(x @ q, x @ CODES.astype(jnp.float32), rtol=1e-5, atol=1e-5)
    unsigned = jnp.abs(CODES).astype(jnp.uint8)
    with pytest.raises(TypeError, match=r"uint8 is not allowed.*dtype=jnp\.int8"):
        Array1B.quantize(unsigned)
    np.testing.assert_array_equal(Array1B.quantize(unsigned, jnp.int8).materialize(), unsigned)
    for q in (NF4, INT8, TERNARY, Array1B.quantize(CODES)):
        for dtype in (jnp.int32, jnp.uint8, jnp.bool_):
            np.testing.assert_array_equal(q.astype(dtype), q.materialize().astype(dtype))


def test_int8_arrays_are_rebuilt_from_what_they_say() -> None:
    """Also where the scale is shared along no axis: one column, or a scale for every value."""
    column = Array8B.quantize(W[:, :1])
    each = Array8B(jnp.abs(W), INT8.weight)
    for q in (column, each, INT8, INT8[:, 3:4], jax.jit(lambda q: q[:, 3:4])(INT8), Array8B.quantize(W, axis=(0, 1))):
        rebuilt = Array8B(q.scale, q.weight, q.axis)
        assert jax.tree.structure(rebuilt) == jax.tree.structure(q)
        np.testing.assert_array_equal(rebuilt.materialize(), q.materialize())
        assert dataclasses.replace(q, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    assert column.axis == each.axis == ()


ABSTRACT = jax.ShapeDtypeStruct((4, 4), jnp.float32)
NOT_EVEN_CLOSE = {
    "block_size=64.0": lambda: ArrayNF4.quantize(W, 64.0),
    "block_size='64'": lambda: QuantizationConfig(block_size="64"),
    "block_size=None": lambda: ArrayNF4(W, None, None),
    "block_size=32.0": lambda: ArrayNF4(NF4.packed, NF4.absmax, 32.0),
    "axis=1.0": lambda: quantize(W, axis=1.0),
    "axis='a'": lambda: Array8B.quantize(W, axis="a"),
    "axis=True": lambda: Array1B.from_float(W, axis=True),
    "axis=False": lambda: Array8B.quantize(W, axis=(False,)),
    "axis=2.0": lambda: Array8B(INT8.scale, INT8.weight, 2.0),
    "pad=1.5": lambda: ArrayNF4(NF4.packed, NF4.absmax, 64, pad=1.5),
    "shape=5": lambda: ArrayNF4(NF4.packed, NF4.absmax, 64, shape=5),
    "shape='ab'": lambda: Array8B(INT8.scale, INT8.weight, shape="ab"),
    r"packed=\[\[1.0, 2.0": lambda: ArrayNF4([[1.0, 2.0]]),
    "packed=None": lambda: ArrayNF4(None),
    r"absmax=\[1.0": lambda: ArrayNF4(NF4.packed, [1.0]),
    "scale=2.0": lambda: Array8B(2.0, INT8.weight),
    "weight=.1, 0": lambda: Array1B((1, 0)),
    r"float32\[4, 4\] alone": lambda: ArrayNF4(ABSTRACT),
    "ShapeDtypeStruct.*eval_shape": lambda: quantize(ABSTRACT),
    "got None": lambda: quantize(None, dtype="int8"),
    "got 'abc'": lambda: quantize("abc", dtype="binary"),
    "sharding='garbage'": lambda: ArrayNF4(NF4.packed, NF4.absmax, 64, sharding="garbage"),
    "sharding=3": lambda: Array8B(INT8.scale, INT8.weight, sharding=3),
    "sharding='x'": lambda: Array1B(TERNARY.weight, sharding="x"),
}


@pytest.mark.parametrize("message", NOT_EVEN_CLOSE)
def test_wrong_types_are_named(message: str) -> None:
    with pytest.raises(TypeError, match=message):
        NOT_EVEN_CLOSE[message]()


def test_arrays_that_hold_no_device_memory() -> None:
    for kind in KINDS:
        q = quantize(W, dtype=kind)
        abstract = jax.eval_shape(lambda w, kind=kind: quantize(w, dtype=kind), W)
        assert (abstract.nbytes, repr(abstract)) == (q.nbytes, repr(q))
        on_host = jax.tree.map(np.asarray, q)
        assert (on_host.devices(), q.devices()) == (set(), W.devices())
        on_host.delete()
        np.testing.assert_array_equal(on_host.materialize(), q.materialize())


def test_slicing_below_the_core_says_so() -> None:
    with pytest.raises(SlicedBelowCoreError, match=r"ranks \(2, 1\), too few for the 2 trailing axes"):
        _ = jax.tree.map(lambda a: a[0], NF4).shape


def test_unknown_format() -> None:
    for call in (
        lambda: quantize(W, dtype="int7"),
        lambda: quantize(W, dtype=""),
        lambda: straight_through(W, dtype=""),
        lambda: straight_through(W, dtype="fp12"),
        lambda: QuantizationConfig("q4"),
    ):
        with pytest.raises(ValueError, match="nf4, int8, ternary, binary"):
            call()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_nan_and_infinity_stay_visible(kind: str, bad: float) -> None:
    """NaN comes out as NaN in what shares its scale, and only there; an infinity is never a finite number."""
    q = quantize(W.at[3, 5].set(bad), dtype=kind)
    d = np.asarray(q.materialize())
    assert not np.isfinite(d[3, 5])
    if kind == "int8":
        assert np.isfinite(np.delete(d, 3, axis=0)).all()
    elif kind != "ternary":  # its threshold is one for the whole array
        assert np.isfinite(np.delete(d, 5, axis=1)).all()


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_extreme_magnitudes(kind: str) -> None:
    for magnitude in (1e-38, 1e-30, 1e30, 3e38):
        w = jnp.asarray([[magnitude, -magnitude], [magnitude, 0]], jnp.float32)
        if kind == "ternary" and magnitude > 1e19:
            continue  # the variance leaves float32; documented as NaN
        if kind == "binary" and magnitude > 1e38:
            continue
        d = np.asarray(quantize(w, dtype=kind).materialize(), np.float64)
        assert np.isfinite(d).all()
        rounding = {"mxfp4": 1 / 4, "mxfp8": 1 / 16, "mxfp8_e5m2": 1 / 8}.get(kind, 0.01)  # half a step of an element
        assert np.abs(d).max() <= (1 + rounding) * magnitude


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_overflow_on_the_way_is_seen(kind: str) -> None:
    """A product or a factor that leaves float32 on the way is never another finite number, as every page says."""
    q = quantize(jnp.abs(W) * 1e-3, dtype=kind)
    d = np.asarray(q.materialize(), np.float64)
    for x in (np.full((2, 64), 1e37, np.float32), np.full((2, 64), 3e38, np.float32)):
        found, dense = np.asarray(x @ q, np.float64), x.astype(np.float64) @ d
        dense[np.abs(dense) > np.finfo(np.float32).max] = np.inf
        assert (np.isclose(found, dense, rtol=1e-5) | ~np.isfinite(found)).all()
    for factor in (1e37, 3e38):
        found, dense = np.asarray(dequantize(q * factor), np.float64), d * np.float64(np.float32(factor))
        dense[np.abs(dense) > np.finfo(np.float32).max] = np.inf
        assert (np.isclose(found, dense, rtol=1e-5) | ~np.isfinite(found)).all()


def test_nothing_can_be_assigned() -> None:
    for kind in KINDS:
        q = quantize(W, dtype=kind)
        for field in ("sharding", "use_kernel", "dtype", "anything"):
            with pytest.raises((AttributeError, TypeError)):
                setattr(q, field, None)


def test_shapes_that_do_not_contract() -> None:
    for kind in KINDS:
        with pytest.raises(TypeError, match="contracting dimensions"):
            jnp.ones((3, 65)) @ quantize(W, dtype=kind)


def test_gradient_of_a_quantized_weight_points_elsewhere() -> None:
    for kind in KINDS:
        q, x = quantize(W, dtype=kind), jnp.ones((2, 64))
        with pytest.raises(TypeError, match="straight_through"):
            jax.grad(lambda q, x=x: (x @ q).sum(), allow_int=True)(q)
