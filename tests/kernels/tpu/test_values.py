"""Interpreted, the TPU kernels compute the product of the matrix the codes stand for."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._kernels import tpu
from eformer._kernels.tpu import tuning

from ..cases import FORMATS, FORMS, make_case, relative_error
from .calls import LIMIT, check, interpreted, problem, random_x

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_products(fmt: str, form: str, rng: np.random.Generator) -> None:
    """Ragged along every axis with several blocks of rows of x; whole blocks and one row."""
    calls = []
    for rows, cols, m, dtype in (
        (300, 2050 if fmt == "binary" else 1100, 20, np.float32),
        (128, 1024, 1, jnp.bfloat16),
    ):
        case = make_case(rng, fmt, rows, cols)
        calls.append((case, form, random_x(rng, case, form, m, dtype)))
    check(calls)


@pytest.mark.parametrize("form", FORMS)
def test_scales(form: str, rng: np.random.Generator) -> None:
    """Along the contraction, along the result, one for all, none; less than a block."""
    calls = []
    for fmt, scale in (
        ("int8", "row"),
        ("int8", "column"),
        ("ternary", "column"),
        ("binary", "one"),
        ("ternary", "none"),
    ):
        case = make_case(rng, fmt, 33, 70, scale=scale)
        calls.append((case, form, random_x(rng, case, form, 2, jnp.bfloat16)))
    check(calls)


@pytest.mark.parametrize("form", FORMS)
def test_block_sizes(form: str, rng: np.random.Generator) -> None:
    """Scales held whole in VMEM, and shared by several steps. (Those of `test_products` are cut like the codes.)"""
    calls = []
    for block, cols in ((128, 1100), (1024, 2500)):
        case = make_case(rng, "nf4", 40, cols, block=block)
        calls.append((case, form, random_x(rng, case, form, 2)))
    kinds = {(g.scales_in_tiles, g.bu < g.units_per_scale) for g in map(_geometry, calls)}
    assert kinds == {(False, False), (False, True)}
    check(calls)


def _geometry(call) -> tuning.Geometry:
    case, form, x = call
    return tuning.geometry(problem(case, form, x), x.shape[-2])


def test_selects_decode_to_the_same_bits(rng: np.random.Generator) -> None:
    case = make_case(rng, "nf4", 130, 256)
    call = [(case, "dot", random_x(rng, case, "dot", 3))]
    np.testing.assert_array_equal(interpreted(call, permute=True)[0], interpreted(call, permute=False)[0])


def test_a_nan_stays_in_its_row(rng: np.random.Generator) -> None:
    case = make_case(rng, "nf4", 130, 640)
    case.scale[7, 3] = np.nan
    x = random_x(rng, case, "dot", 2)
    (y,) = interpreted([(case, "dot", x)])
    np.testing.assert_array_equal(np.isnan(y).any(0), np.arange(130) == 7)


def test_batch_axes(rng: np.random.Generator) -> None:
    calls = []
    for fmt, form in (("nf4", "axpy"), ("int8", "dot")):
        case = make_case(rng, fmt, 40, 130, batch=(2, 3))
        calls.append((case, form, random_x(rng, case, form, 4)))
    check(calls)


@pytest.mark.parametrize(("fmt", "form"), [("nf4", "dot"), ("ternary", "axpy"), ("int8", "dot")])
def test_groups(fmt: str, form: str, rng: np.random.Generator) -> None:
    """Empty groups, a group of several tiles, rows behind the last group, no rows at all."""
    case = make_case(rng, fmt, 136, 200, batch=(4,), scale=None if fmt == "nf4" else "column")
    m = 50
    x = jnp.asarray(rng.standard_normal((m, 200 if form == "dot" else 136)), jnp.float32)
    static = problem(case, form, x)
    stored = jnp.asarray(case.codes), jnp.asarray(case.scale)
    product = jax.jit(lambda sizes: tpu.qragged(static, x, stored[0], sizes, stored[1], interpret=True))
    for sizes in ((3, 0, 40, 1), (0, 0, 0, 50), (17, 16, 0, 0), (0, 0, 0, 0)):
        wanted = np.zeros((m, 136 if form == "dot" else 200))
        for group, (start, size) in enumerate(zip(np.cumsum([0, *sizes]), sizes, strict=False)):
            matrix = case.dense[group].T if form == "dot" else case.dense[group]
            wanted[start : start + size] = np.asarray(x, np.float64)[start : start + size] @ matrix
        assert relative_error(product(jnp.array(sizes)), wanted) < LIMIT, sizes


@pytest.mark.parametrize("fmt", FORMATS)
def test_lookup(fmt: str, rng: np.random.Generator) -> None:
    for rows, cols, scale in ((300, 200, "row"), (20, 70, "column")):
        case = make_case(rng, fmt, rows, cols, scale=scale)
        indices = np.array([rows - 1, 0, 17, 17, rows // 2])
        table = SimpleNamespace(
            fmt=fmt, cols=cols, rows=rows, block=64 if fmt == "nf4" else None, out_dtype=np.dtype(np.float32)
        )
        lookup = jax.jit(lambda codes, scale, i, t=table: tpu.qgather(t, codes, i, scale, interpret=True))
        found = lookup(case.codes, case.scale, indices)
        assert relative_error(found, case.dense[indices]) < 1e-7
