"""Products that round x to 8 bits, against the definition computed by NumPy in wide integers and floats."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eformer._kernels import qragged_dot
from eformer._kernels.activations import corrected, nearest, rounded

from .cases import BLOCKED, FORMS, SCALES, Case, make_case, relative_error
from .hlo_cases import GROUPS, SIZES, by_groups, collectives, compiled, mesh_of, put, seeded
from .hlo_cases import Row as Split

TINY = np.finfo(np.float32).tiny
LARGEST = {"int8": np.float32(127), "fp8": np.float32(448)}
EVERY = [
    f if f in ("nf4", "int8", "binary", "int4", "fp8_e4m3") else pytest.param(f, marks=pytest.mark.thorough)
    for f in ("nf4", "int8", "ternary", "binary", *BLOCKED, "fp8_e4m3", "fp8_e5m2")
]


def kind_of(fmt: str) -> str:
    return "fp8" if fmt.startswith("fp8") else "int8"


def limit_of(fmt: str) -> float:
    """Entries of the table of NF4 may be taken as integers of two bytes."""
    return 1e-4 if fmt == "nf4" else 1e-6


def twin(x: Any, activations: str, scale: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of every row, in float32 as the definition says; a bad row has a scale of NaN."""
    x = np.asarray(x, np.float32)
    with np.errstate(all="ignore"):
        largest = np.abs(x).max(-1)
        scale = np.maximum(largest / LARGEST[activations], TINY) if scale is None else scale
        scale = np.where(np.isfinite(largest), scale, np.float32(np.nan)).astype(np.float32)
        codes = np.clip(x / scale[..., None], -LARGEST[activations], LARGEST[activations])
        small = codes.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) if activations == "fp8" else np.rint(codes)
    return np.nan_to_num(small.astype(np.float64)), scale


def expected(case: Case, x: Any, form: str, activations: str, scale: Any = None) -> np.ndarray:
    """The codes of x times the true values of the weight, in float64."""
    codes, factor = twin(x, activations, scale)
    return case.expected(codes, form) * factor[..., None].astype(np.float64)


ROWS_OF_X = {
    "random": lambda rng, x: x,
    "outlier": lambda rng, x: np.where(rng.random(x.shape) < 0.01, 300 * x, x),
    "zero": lambda rng, x: np.where(np.arange(len(x))[:, None] % 2, x, 0),
    "small": lambda rng, x: x * np.float32(1e-36),
    "huge": lambda rng, x: x * np.float32(5e37),
    "not finite": lambda rng, x: np.where(np.arange(x.size).reshape(x.shape) % 1999 == 5, np.inf, x),
    "none": lambda rng, x: np.where(np.arange(x.size).reshape(x.shape) % 1999 == 5, np.nan, x),
    "two thirds": lambda rng, x: rng.integers(-127, 128, x.shape) * np.float32(2 / 3),  # ties, and exact codes
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ROWS_OF_X)
def test_int8_is_exact_bit_for_bit(kind: str, form: str, dtype: Any) -> None:
    rng = seeded(kind, form)
    case = make_case(rng, "int8", 1100, 1300, scale="row" if form == "dot" else "column")
    if kind == "huge":
        case = dataclasses.replace(case, scale=case.scale * np.float32(1e-6))
    x = ROWS_OF_X[kind](rng, rng.standard_normal((5, 1300 if form == "dot" else 1100)).astype(np.float32))
    x = np.where(np.isinf(x), x, np.clip(x, jnp.finfo(dtype).min, jnp.finfo(dtype).max))  # not huge in float16
    x = jnp.asarray(x.astype(np.float32)).astype(dtype)
    codes, factor = twin(x, "int8")
    sums = codes.astype(np.int64) @ (case.codes.T if form == "dot" else case.codes).astype(np.int64)
    sums, scale = sums.astype(np.float32), case.scale.reshape(1, -1)
    first = np.where(factor[:, None] < 2.0**-64, factor[:, None], np.float32(1))
    with np.errstate(over="ignore"):
        y = (sums * first) * (np.where(factor[:, None] < 2.0**-64, np.float32(1), factor[:, None]) * scale)
    found = case.product(x, form, activations="int8", preference="xla")
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(jnp.asarray(y).astype(dtype), np.float32))
    np.testing.assert_array_equal(np.isnan(found).all(-1), ~np.isfinite(np.asarray(x, np.float32)).all(-1))
    if kind in ("random", "huge"):
        assert np.isfinite(y).all()
        reference = case.product(x, form, activations="int8", preference="reference", out_dtype=jnp.float32)
        assert relative_error(reference, y) < 1e-6


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", EVERY)
def test_every_format_lies_within_rounding(fmt: str, form: str) -> None:
    rng, kind = seeded(fmt, form), kind_of(fmt)
    for scale in SCALES[fmt]:
        case = make_case(rng, fmt, 48, 80, block=16, scale=scale)
        x = rng.standard_normal((6, 80 if form == "dot" else 48)).astype(np.float32)
        x[1], x[2, 3] = 0, np.nan
        y = np.asarray(case.product(x, form, activations=kind))
        good = [0, 1, 3, 4, 5]
        assert relative_error(y[good], expected(case, x[good], form, kind)) < limit_of(fmt)
        assert np.isnan(y[2]).all()
        assert not y[1].any()
        given = rng.uniform(0.002, 0.02, 6).astype(np.float32)  # cuts the largest values off
        y = case.product(x[good], form, activations=kind, x_scale=given[good])
        assert relative_error(y, expected(case, x[good], form, kind, given[good])) < limit_of(fmt)


@pytest.mark.parametrize("ulps", [-3, 0, 3])
def test_int8_is_rounded_as_defined_where_divisions_are_not_exact(ulps: int) -> None:
    """As on GPUs: of quotients that are off, codes and scales are those of exact ones. Random rows, and near ties."""
    rng = np.random.default_rng(7)

    def off(x: np.ndarray) -> jax.Array:
        return jnp.asarray((x.view(np.int32) + np.int32(ulps)).view(np.float32) if ulps else x)

    size = 300_000
    scale = (rng.uniform(1, 2, size) * 2.0 ** rng.integers(-126, 119, size)).astype(np.float32)
    middle = rng.integers(0, 127, size) + 0.5
    x = (scale * middle.astype(np.float64)).astype(np.float32)
    near = (x.view(np.int32) + rng.integers(-2, 3, size).astype(np.int32)).view(np.float32)
    anywhere = (scale * rng.uniform(0.1, 127, size)).astype(np.float32)
    ties = (np.float32(2.0) ** rng.integers(-20, 20, size) * middle).astype(np.float32)
    power = (ties / middle).astype(np.float32)
    for values, factor in ((x, scale), (near, scale), (anywhere, scale), (ties, power)):
        values = np.where(values < TINY, np.float32(0), values) * rng.choice(np.array([-1, 1], np.float32), size)
        quotient = values / factor
        found = nearest(jnp.where(quotient == 0, 0, off(quotient)), jnp.asarray(values), jnp.asarray(factor), 127)
        np.testing.assert_array_equal(np.asarray(found), np.clip(np.rint(quotient), -127, 127))
    for limit in LARGEST.values():
        values = (rng.uniform(1, 2, size) * 2.0 ** rng.integers(0, 60, size)).astype(np.float32)
        found = corrected(off(values / limit), jnp.asarray(values), int(limit))
        np.testing.assert_array_equal(np.asarray(found), values / limit)


def test_rounding_to_e4m3_is_to_nearest_even() -> None:
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    values = np.sort(values[np.isfinite(values)])
    middle = (values[1:] + values[:-1]) / 2
    x = np.concatenate([values, middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf), [448]])
    codes, factor = rounded(jnp.asarray(x.astype(np.float32)), None, "fp8")
    assert factor == 1
    np.testing.assert_array_equal(
        codes.astype(jnp.float32), x.astype(np.float32).astype(codes.dtype).astype(np.float32)
    )


def test_sums_longer_than_an_int32_holds() -> None:
    codes = np.full((1, 140_000), 127, np.int8)
    case = Case("int8", 140_000, codes, np.ones((1, 1), np.float32), codes.astype(np.float64))
    y = case.product(np.ones((1, 140_000), np.float32), activations="int8")
    assert relative_error(y, [[127 * 140_000.0]]) < 1e-6


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", ["nf4", "int8"])
def test_derivatives_go_straight_through(fmt: str, form: str) -> None:
    rng = seeded(fmt, form)
    case = make_case(rng, fmt, 48, 80, block=16, scale="row" if form == "dot" else "column")
    x, t = (rng.standard_normal((6, 80 if form == "dot" else 48)).astype(np.float32) for _ in range(2))
    product = lambda x: case.product(x, form, activations="int8")  # noqa: E731
    y, y_dot = jax.jvp(product, (x,), (t,))
    assert relative_error(y, expected(case, x, form, "int8")) < limit_of(fmt)
    assert relative_error(y_dot, case.expected(t, form)) < 1e-6
    ct = rng.standard_normal(y.shape).astype(np.float32)
    other = "axpy" if form == "dot" else "dot"
    (x_bar,) = jax.jit(lambda x, ct: jax.vjp(jax.checkpoint(product), x)[1](ct))(x, ct)
    assert relative_error(x_bar, case.expected(ct, other)) < 1e-6


@pytest.mark.parametrize("backward", ["int8", "fp8"])
@pytest.mark.parametrize("fmt", ["nf4", "int8"])
def test_the_gradient_is_rounded_too(fmt: str, backward: str) -> None:
    """Times the scale of every column, where that is how the weight is scaled: codes are multiplied with codes."""
    rng = seeded(fmt, backward)
    case = make_case(rng, fmt, 48, 80, block=16, scale="row")
    x, ct = rng.standard_normal((6, 80)).astype(np.float32), rng.standard_normal((6, 48)).astype(np.float32)
    _, back = jax.vjp(lambda x: case.product(x, activations="int8", backward=backward), x)
    bare = Case(fmt, 80, case.codes, None, case.codes.astype(np.float64)) if fmt == "int8" else case
    scaled = ct * case.scale.T if fmt == "int8" else ct
    assert relative_error(back(ct)[0], expected(bare, scaled, "axpy", backward)) < 1e-6


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("axes", [(0, None), (1, None), (None, 0), (1, 0), (0, 1)], ids=str)
def test_vmap(axes: tuple[Any, Any], given: bool) -> None:
    rng = seeded(*axes)
    case = make_case(rng, "int4", 16, 32, block=16, batch=(3,))
    x_axis, codes_axis = axes
    x = rng.standard_normal((3, 5, 32) if x_axis is not None else (5, 32)).astype(np.float32)
    scale = np.abs(x).max(-1) / np.float32(120)
    codes, scales = (case.codes, case.scale) if codes_axis is not None else (case.codes[0], case.scale[0])
    one = lambda x, c, s, xs: case.product(x, codes=c, scale=s, activations="int8", x_scale=xs)  # noqa: E731
    moved = lambda a, to: a if to is None else np.moveaxis(a, 0, to)  # noqa: E731
    into = (x_axis, codes_axis, codes_axis, x_axis if given else None)
    arguments = (moved(x, x_axis), moved(codes, codes_axis), moved(scales, codes_axis))
    y = jax.vmap(one, in_axes=into)(*arguments, moved(scale, x_axis) if given else None)
    for i in range(3):
        part = Case("int4", 32, case.codes, None, case.dense[i if codes_axis is not None else 0])
        rows, known = (x, scale) if x_axis is None else (x[i], scale[i])
        assert relative_error(y[i], expected(part, rows, "dot", "int8", known if given else None)) < 1e-6


@pytest.mark.parametrize("fmt", ["int8", "nf4", pytest.param("fp8_e4m3", marks=pytest.mark.thorough)])
def test_groups(fmt: str) -> None:
    rng, kind = seeded(fmt), kind_of(fmt)
    case = make_case(rng, fmt, 24, 64, block=16, batch=(GROUPS,))
    x = rng.standard_normal((16, 64)).astype(np.float32)
    options = {"fmt": fmt, "form": "dot", "cols": 64, "activations": kind}
    for scale in (None, np.abs(x).max(-1) / np.float32(100)):
        codes, factor = twin(x, kind, scale)
        want = by_groups(codes, case.dense.swapaxes(1, 2)) * factor[:, None]
        y, back = jax.vjp(lambda x, s=scale: qragged_dot(x, case.codes, case.scale, SIZES, x_scale=s, **options), x)
        assert relative_error(y, want) < limit_of(fmt)
        ct = rng.standard_normal(y.shape).astype(np.float32)
        assert relative_error(back(ct)[0], by_groups(ct, case.dense)) < 1e-6


SPLITS = {
    "rows of x": (P("a"), P(), 0),
    "columns": (P(), P(None, "a"), 2),
    "columns of x": (P(None, "a"), P(), 2),
    "rows": (P(), P("a"), 0),
    "both": (P(), P("b", "a"), 2),
}


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("fmt", ["int8", "nf4", pytest.param("ternary", marks=pytest.mark.thorough)])
def test_split_over_devices(fmt: str, name: str) -> None:
    """Where rows of x are split, devices agree on their maxima and add up results; codes stay where they are."""
    rng, mesh = seeded(fmt, name), mesh_of()
    x_spec, codes_spec, reduces = SPLITS[name]
    case = make_case(rng, fmt, 32, 128, block=16)
    x = rng.standard_normal((16, 128)).astype(np.float32)
    x[3, 5], x[4] = np.nan, 0
    operands = put(mesh, case, x, Split(x_spec, codes_spec, None))
    y, text = compiled(lambda x, c, s: case.product(x, codes=c, scale=s, activations="int8"), *operands)
    assert sum(collectives(text).values()) == reduces
    good = [i for i in range(16) if i != 3]
    assert relative_error(np.asarray(y)[good], expected(case, x[good], "dot", "int8")) < limit_of(fmt)
    assert np.isnan(np.asarray(y)[3]).all()


def test_groups_split_over_devices() -> None:
    rng, mesh = seeded("groups"), mesh_of()
    case = make_case(rng, "int8", 32, 128, batch=(GROUPS,))
    x = rng.standard_normal((16, 128)).astype(np.float32)
    codes, factor = twin(x, "int8")
    want = by_groups(codes, case.dense.swapaxes(1, 2)) * factor[:, None]
    options = {"fmt": "int8", "form": "dot", "cols": 128, "activations": "int8"}
    for x_spec, spec in ((P(), P("a")), (P(None, "a"), P(None, None, "a")), (P("b"), P("a"))):
        placed = [jax.device_put(v, NamedSharding(mesh, s)) for v, s in ((x, x_spec), (case.codes, spec))]
        y, text = compiled(lambda x, c: qragged_dot(x, c, case.scale, SIZES, **options), *placed)
        collectives(text)
        assert relative_error(y, want) < 1e-6


def test_bad_arguments() -> None:
    case = make_case(seeded(), "int8", 8, 16)
    with pytest.raises(TypeError, match="x is int32, and activations='int8' rounds rows of floating values"):
        case.product(np.ones((2, 16), np.int32), activations="int8")
    with pytest.raises(ValueError, match="activations='int7' is unknown; allowed values are None, 'int8', 'fp8'"):
        case.product(np.ones((2, 16), np.float32), activations="int7")
    with pytest.raises(ValueError, match="one number per row"):
        case.product(np.ones((2, 16), np.float32), activations="int8", x_scale=np.ones(3, np.float32))
