"""The kernel for matrices of any size (csrc/cuda/odd.cuh) against float64. Runs with EFORMER_TEST_PLATFORM=cuda."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._kernels import cuda
from eformer._kernels.cuda import _odd
from eformer._kernels.parameters import product_problem

from ..cases import FORMS, Case, make_case
from .test_gpu_kernels import error
from .test_gpu_kernels import library as library
from .test_selection import FORMATS, IN_BLOCKS

pytestmark = pytest.mark.gpu

# Rows, columns, M and the block: whole stages and nothing whole, every width of a block, one of everything.
SIZES = (
    (3001, 1000, 1, 64), (1000, 3001, 5, 64), (333, 70, 3, 32), (70, 333, 16, 96), (130, 500, 64, 128),
    (500, 131, 70, 64), (64, 520, 130, 32), (300, 77, 129, 64), (1, 1, 1, 64), (2880, 360, 17, 128),
    (257, 2049, 300, 64), (960, 2880, 2, 64),
)  # fmt: skip
KINDS = ("along", "one", "across", "along")
SCALES = (np.float32, jnp.bfloat16, np.float16)
LIMIT = 3e-3  # relative error in the norm: 16-bit operands and results


def limit_of(y: jax.Array) -> float:
    """A norm of few results does not average: w and y are rounded once each, by up to half an eps."""
    return LIMIT if y.size >= 64 else max(LIMIT, float(jnp.finfo(y.dtype).eps))


def case_of(rng: np.random.Generator, i: int, fmt: str, form: str) -> Case:
    rows, cols, _, block = SIZES[i]
    along, across = ("row", "column") if form == "dot" else ("column", "row")
    kind = {"along": along, "across": across, "one": "one"}[KINDS[i % 4]]
    options: dict[str, Any] = {"block": block} if fmt in IN_BLOCKS else {"scale": kind}
    return make_case(rng, fmt, rows, cols, scale_dtype=SCALES[i % 3], **options)


def product(case: Case, x: Any, form: str, codes: Any = None, scale: Any = None, index: Any = None, **how: Any) -> Any:
    """By this kernel, whatever the rules say."""
    codes, scale = (case.codes, case.scale) if codes is None else (codes, scale)
    one = (codes, scale) if index is None else (codes[0], scale[0])
    problem = product_problem(x, *one, "cuda", fmt=case.fmt, form=form, cols=case.cols, **how)
    assert _odd.can_take(problem)
    return cuda.qmatmul(problem, x, codes, scale, index=index, way="odd")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_products(fmt: str, form: str) -> None:
    rng = np.random.default_rng(FORMATS.index(fmt) + 10 * (form == "axpy"))
    made = [case_of(rng, i, fmt, form) for i in range(len(SIZES))]
    dtypes: list[Any] = [jnp.bfloat16, jnp.float16, *([] if fmt in IN_BLOCKS else [jnp.float32])]
    for dtype in dtypes:
        if fmt == "fp8_e5m2" and dtype == jnp.float16:
            continue  # it does not hold the results
        xs = [jnp.asarray(rng.standard_normal((m, c.dense.shape[-1 if form == "dot" else -2])), dtype)
              for c, (_, _, m, _) in zip(made, SIZES, strict=True)]  # fmt: skip
        stored = [(jnp.asarray(c.codes), jnp.asarray(c.scale)) for c in made]

        def program(xs: list[Any], stored: list[Any]) -> list[Any]:
            return [product(c, x, form, *given) for c, x, given in zip(made, xs, stored, strict=True)]

        for c, x, y, size in zip(made, xs, jax.jit(program)(xs, stored), SIZES, strict=True):
            assert y.dtype == x.dtype
            assert error(y, c.expected(np.asarray(x, np.float64), form)) <= limit_of(y), (dtype, size)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", ["nf4", "int8", "binary"])
def test_cuts_batches_and_stacks(fmt: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All cuts give the same product of a batch, of which a stack has an entry."""
    rng = np.random.default_rng(30)
    options: dict[str, Any] = {} if fmt == "nf4" else {"scale": "row" if form == "dot" else "column"}
    case = make_case(rng, fmt, 613, 1027, batch=(3,), **options)
    x = jnp.asarray(rng.standard_normal((3, 40, 1027 if form == "dot" else 613)), jnp.bfloat16)
    expected = case.expected(np.asarray(x, np.float64), form)
    stored = jnp.asarray(case.codes), jnp.asarray(case.scale)
    for i in range(3):
        run = jax.jit(lambda x, i, *stored: product(case, x, form, *stored, index=i))
        assert error(run(x[i], jnp.int32(i), *stored), expected[i]) <= LIMIT
    for width, splits in itertools.product((64, 128), (1, 2, 3, 8)):
        forced = _odd.Cut(width, splits)
        monkeypatch.setattr(_odd, "cut", lambda *_, forced=forced: forced)
        assert error(jax.jit(lambda x, *stored: product(case, x, form, *stored))(x, *stored), expected) <= LIMIT


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", ["nf4", "int8", "ternary"])
def test_what_is_not_finite_stays_where_it_belongs(fmt: str, form: str) -> None:
    rng = np.random.default_rng(31)
    options: dict[str, Any] = {} if fmt == "nf4" else {"scale": "row" if form == "dot" else "column"}
    case = make_case(rng, fmt, 133, 219, **options)
    x = np.asarray(rng.standard_normal((20, 219 if form == "dot" else 133)), np.float32)
    x[3, 5], x[7, 100], x[9, 0] = np.inf, np.nan, -np.inf
    found = np.asarray(product(case, jnp.asarray(x, jnp.bfloat16), form), np.float64)
    with np.errstate(invalid="ignore"):
        expected = case.expected(jnp.asarray(x, jnp.bfloat16), form)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_array_equal(found[np.isinf(expected)], expected[np.isinf(expected)])
    scale = case.scale.copy()
    scale[scale.shape[0] // 2, scale.shape[1] // 2] = np.nan
    found = np.isnan(
        np.asarray(product(case, jnp.ones((2, x.shape[1]), jnp.bfloat16), form, case.codes, scale), np.float32)
    )
    wide = np.repeat(scale, 64, axis=1)[:, :219] if fmt == "nf4" else np.broadcast_to(scale, case.dense.shape)
    np.testing.assert_array_equal(found, np.broadcast_to(np.isnan(wide).any(1 if form == "dot" else 0), found.shape))
