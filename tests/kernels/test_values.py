"""Every implementation computes the product of the matrix the codes stand for."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._kernels import qgather, qragged_dot
from eformer._kernels.formats import decode
from eformer._kernels.xla import panel

from .cases import FORMATS, FORMS, SCALES, make_case, relative_error

IMPLEMENTATIONS = ("xla", "reference")
SHAPES = ((1, 1), (3, 130), (70, 33), (257, 66), (40, 515))
ODD_M = (1, 2, 7, 16, 33)


def random_x(rng: np.random.Generator, case, form: str, m: int, *, batch=()) -> np.ndarray:
    rows, cols = case.dense.shape[-2:]
    return rng.standard_normal((*batch, m, cols if form == "dot" else rows)).astype(np.float32)


@pytest.mark.parametrize("fmt", FORMATS)
def test_decode_is_exact(fmt: str, rng: np.random.Generator) -> None:
    for scale in SCALES[fmt]:
        case = make_case(rng, fmt, 9, 77, block=16, scale=scale, batch=(2,))
        with jax.enable_x64(True):
            dense = decode(jnp.asarray(case.codes), case.scale, fmt=fmt, cols=77, dtype=jnp.float64)
            np.testing.assert_array_equal(dense, case.dense)


@pytest.mark.parametrize("preference", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_product(fmt: str, form: str, preference: str, rng: np.random.Generator) -> None:
    scales = itertools.cycle(SCALES[fmt])
    cases = [make_case(rng, fmt, *shape, block=32, scale=scale) for shape, scale in zip(SHAPES, scales, strict=False)]
    xs = [random_x(rng, case, form, m) for case, m in zip(cases, ODD_M, strict=True)]
    ys = jax.jit(lambda xs: [case.product(x, form, preference=preference) for case, x in zip(cases, xs, strict=True)])(
        xs
    )
    for case, x, y in zip(cases, xs, ys, strict=True):
        assert y.dtype == jnp.float32
        assert relative_error(y, case.expected(x, form)) < 3e-6, (case.dense.shape, x.shape)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", ["int8", "ternary"])
def test_scale_shapes(fmt: str, form: str, rng: np.random.Generator) -> None:
    for scale in SCALES[fmt]:
        for m in (1, 2):
            case = make_case(rng, fmt, 35, 41, scale=scale)
            x = random_x(rng, case, form, m)
            assert relative_error(case.product(x, form, preference="xla"), case.expected(x, form)) < 3e-6, (scale, m)


@pytest.mark.parametrize("form", FORMS)
def test_every_m(form: str, rng: np.random.Generator) -> None:
    case = make_case(rng, "nf4", 81, 90)
    xs = [random_x(rng, case, form, m) for m in range(1, 34)]
    ys = jax.jit(lambda xs: [case.product(x, form, preference="xla") for x in xs])(xs)
    for x, y in zip(xs, ys, strict=True):
        assert relative_error(y, case.expected(x, form)) < 3e-6, x.shape


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_several_panels(fmt: str, form: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row counts that are, and are not, a multiple of the panel; columns that need several fused groups."""
    monkeypatch.setattr(panel, "_PANEL_BYTES", 256 << 10)
    for (rows, cols), m in itertools.product(((512, 1024), (523, 1033)), (1, 3)):
        case = make_case(rng, fmt, rows, cols)
        assert panel.panel_rows(case.problem(m, form)) * 4 < rows
        x = random_x(rng, case, form, m)
        assert relative_error(case.product(x, form, preference="xla"), case.expected(x, form)) < 3e-6, (rows, cols)


@pytest.mark.parametrize("block", [2, 6, 16, 48, 64, 74, 4096])
@pytest.mark.parametrize("form", FORMS)
def test_block_sizes(form: str, block: int, rng: np.random.Generator) -> None:
    case = make_case(rng, "nf4", 65, 130, block=block)
    for m in (1, 3):
        x = random_x(rng, case, form, m)
        assert relative_error(case.product(x, form, block=block, preference="xla"), case.expected(x, form)) < 3e-6, m


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_one_long_row(fmt: str, form: str, rng: np.random.Generator) -> None:
    """One row of x has loops of its own: long enough here for several of each, and for what is left over."""
    case = make_case(rng, fmt, 261 if form == "axpy" else 33, 4500)
    x = random_x(rng, case, form, 1)
    assert relative_error(case.product(x, form, preference="xla"), case.expected(x, form)) < 3e-6
    with jax.enable_x64(True):
        wide = rng.standard_normal(x.shape)
        assert relative_error(case.product(wide, form, preference="xla"), case.expected(wide, form)) < 1e-12


@pytest.mark.parametrize("fmt", FORMATS)
def test_one_row_keeps_nan_and_infinity(fmt: str, rng: np.random.Generator) -> None:
    """Where the dense product has no finite value this one has none, and no other value is touched."""
    case = make_case(rng, fmt, 40, 600)
    scale = case.scale.copy()
    scale[3, 0], scale[4, 0] = np.nan, np.inf
    for special in (0.0, np.nan, np.inf, -np.inf):
        x = random_x(rng, case, "dot", 1)
        x[0, 17] = special
        y, expected = (np.asarray(case.product(x, scale=scale, preference=p)) for p in IMPLEMENTATIONS)
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(np.isfinite(y), finite)
        assert np.isnan(y[0, 3])
        if np.isnan(special):
            assert np.isnan(y).all()
        if special == 0:
            assert finite.sum() == case.codes.shape[0] - 2
            assert relative_error(y[finite], expected[finite]) < 3e-6


@pytest.mark.parametrize("preference", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_batch_axes(fmt: str, form: str, preference: str, rng: np.random.Generator) -> None:
    case = make_case(rng, fmt, 20, 70, batch=(2, 3))
    x = random_x(rng, case, form, 4, batch=(2, 3))
    assert relative_error(case.product(x, form, preference=preference), case.expected(x, form)) < 3e-6


def test_leading_axes_of_x(rng: np.random.Generator) -> None:
    case = make_case(rng, "nf4", 20, 70)
    for lead in ((), (3,), (2, 0), (2, 3, 4)):
        x = rng.standard_normal((*lead, 70)).astype(np.float32)
        y = case.product(x)
        assert y.shape == (*lead, 20)
        assert relative_error(y, case.expected(x)) < 3e-6


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("form", FORMS)
def test_empty(fmt: str, form: str, rng: np.random.Generator) -> None:
    for rows, cols in ((0, 64), (8, 0)):
        case = make_case(rng, fmt, rows, cols)
        x = random_x(rng, case, form, 2)
        np.testing.assert_array_equal(case.product(x, form), np.zeros((2, rows if form == "dot" else cols)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("form", FORMS)
def test_narrow_x_accumulates_wide(form: str, dtype, rng: np.random.Generator) -> None:
    case = make_case(rng, "nf4", 40, 300)
    x = jnp.asarray(random_x(rng, case, form, 3) / 100, dtype)
    expected = case.expected(np.asarray(x, np.float64), form)
    assert case.product(x, form).dtype == dtype
    assert relative_error(case.product(x, form, out_dtype=jnp.float32), expected) < 3e-6
    assert relative_error(case.product(x, form), expected) < float(jnp.finfo(dtype).eps)


@pytest.mark.parametrize("fmt", FORMATS)
def test_double_precision(fmt: str, rng: np.random.Generator) -> None:
    case = make_case(rng, fmt, 40, 300)
    with jax.enable_x64(True):
        for preference in IMPLEMENTATIONS:
            x = rng.standard_normal((3, 300))
            y = case.product(x, preference=preference)
            assert y.dtype == jnp.float64
            # The codebook and the scales are float32 values, so products are exact in float64.
            assert relative_error(y, case.expected(x)) < 1e-13


@pytest.mark.parametrize("fmt", ["nf4", "int8"])
@pytest.mark.parametrize("scale_dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_scales(fmt: str, scale_dtype, rng: np.random.Generator) -> None:
    case = make_case(rng, fmt, 30, 100, scale_dtype=scale_dtype)
    x = random_x(rng, case, "dot", 2)
    assert relative_error(case.product(x, preference="xla"), case.expected(x)) < 3e-6


def test_complex_and_integer_x(rng: np.random.Generator) -> None:
    case = make_case(rng, "nf4", 30, 100)
    x = (rng.standard_normal((2, 100)) + 1j * rng.standard_normal((2, 100))).astype(np.complex64)
    y = case.product(x)
    assert y.dtype == jnp.complex64
    assert relative_error(y, x.astype(np.complex128) @ case.dense.T) < 3e-6
    counts = rng.integers(-3, 4, (2, 100))
    assert relative_error(case.product(jnp.asarray(counts, jnp.int32)), case.expected(counts)) < 3e-6


def test_precision_reaches_the_product(rng: np.random.Generator) -> None:
    case = make_case(rng, "int8", 300, 300)
    x = random_x(rng, case, "dot", 4)
    for preference in ("xla", "reference"):
        text = jax.jit(lambda x, p=preference: case.product(x, precision="highest", preference=p)).lower(x).as_text()
        assert "HIGHEST" in text


@pytest.mark.parametrize("fmt", FORMATS)
def test_gather_decodes_rows(fmt: str, rng: np.random.Generator) -> None:
    for scale in SCALES[fmt]:
        case = make_case(rng, fmt, 50, 75, block=16, scale=scale)
        indices = rng.integers(-50, 50, (3, 4))
        rows = qgather(case.codes, case.scale, indices, fmt=fmt, cols=75)
        assert rows.shape == (3, 4, 75)
        assert relative_error(rows, case.dense[indices]) < 1e-7


def test_rows_for_indices_the_caller_has_checked(rng: np.random.Generator) -> None:
    case = make_case(rng, "int8", 50, 75)
    for indices in (np.array(7), rng.integers(0, 50, (2, 3, 2), dtype=np.uint8)):
        rows = qgather(case.codes, case.scale, indices, fmt="int8", cols=75, in_bounds=True)
        assert relative_error(rows, case.dense[indices]) < 1e-7
    program = str(jax.make_jaxpr(lambda i: qgather(case.codes, case.scale, i, fmt="int8", cols=75, in_bounds=True))(7))
    assert not any(name in program for name in ("clamp", "select_n", " max ", " min "))


def test_scales_shared_along_batch_axes(rng: np.random.Generator) -> None:
    """Each batch axis of a scale may be 1, or all may be left out."""
    case = make_case(rng, "int8", 6, 10, batch=(2, 3))
    x = rng.standard_normal((2, 3, 4, 10)).astype(np.float32)
    values = case.codes.astype(np.float64).swapaxes(-1, -2)
    for scale in (case.scale[:1], case.scale[:, :1], case.scale[0, 0]):
        want = x @ (values * scale.astype(np.float64).swapaxes(-1, -2))
        assert relative_error(case.product(x, scale=scale), want) < 3e-6
    with pytest.raises(ValueError, match=r"each may be 1"):
        case.product(x, scale=case.scale[0])


def test_gather_of_a_large_table_makes_no_table(rng: np.random.Generator) -> None:
    case = make_case(rng, "nf4", 4096, 256)
    gather = jax.jit(lambda codes, scale, i: qgather(codes, scale, i, fmt="nf4", cols=256))
    used = gather.lower(case.codes, case.scale, np.arange(8)).compile().memory_analysis().temp_size_in_bytes
    assert used < 8 * 256 * 4 * 8


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_ragged_dot(fmt: str, form: str, rng: np.random.Generator) -> None:
    case = make_case(rng, fmt, 24, 40, block=16, batch=(5,))
    product = jax.jit(lambda x, sizes: qragged_dot(x, case.codes, case.scale, sizes, fmt=fmt, form=form, cols=40))
    for sizes in ([3, 0, 4, 1, 5], [0, 0, 13, 0, 0], [2, 1, 0, 0, 1], [0] * 5):
        x = random_x(rng, case, form, 13)
        expected = np.zeros((13, 24 if form == "dot" else 40))
        for group, (start, size) in enumerate(zip(np.cumsum([0, *sizes]), sizes, strict=False)):
            matrix = case.dense[group].T if form == "dot" else case.dense[group]
            expected[start : start + size] = x[start : start + size] @ matrix
        assert relative_error(product(x, np.array(sizes)), expected) < 3e-6, sizes


def test_ragged_dot_agrees_with_jax_and_differentiates(rng: np.random.Generator) -> None:
    case = make_case(rng, "nf4", 24, 64, batch=(3,))
    x = random_x(rng, case, "dot", 9)
    dense = jnp.asarray(case.dense.swapaxes(1, 2), jnp.float32)
    sizes = jnp.array([4, 0, 3])

    def loss(product):
        return lambda x: jnp.sin(product(x)).sum()

    ours = loss(lambda x: qragged_dot(x, case.codes, case.scale, sizes, fmt="nf4", form="dot", cols=64))
    theirs = loss(lambda x: jax.lax.ragged_dot(x, dense, sizes))
    assert relative_error(jax.jit(jax.grad(ours))(x), jax.grad(theirs)(x)) < 3e-6


def test_ragged_dot_never_holds_the_stack(rng: np.random.Generator) -> None:
    case = make_case(rng, "nf4", 512, 512, batch=(16,))
    product = jax.jit(
        lambda x, codes, scale, sizes: qragged_dot(x, codes, scale, sizes, fmt="nf4", form="dot", cols=512)
    )
    x, sizes = random_x(rng, case, "dot", 32), np.full(16, 2)
    used = product.lower(x, case.codes, case.scale, sizes).compile().memory_analysis().temp_size_in_bytes
    assert used < 3 * 512 * 512 * 4  # the dense stack would take 16 of these
