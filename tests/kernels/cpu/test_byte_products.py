"""Products whose x is rounded to int8: kernels of every instruction set against the definition, in exact integers."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._kernels import cpu, qragged_dot
from eformer._kernels.parameters import product_problem
from eformer._record import recorder

from ..cases import BITS, Case, make_case
from ..hlo_cases import seeded
from ..test_activations import ROWS_OF_X, twin
from .calls import THREADS, isas, poisoned

WHOLE = ("int8", "ternary", "binary")
BLOCKED = ("nf4", "int4", "iq4_nl", "fp4", "int8_block", *BITS)
# Entries of NF4 are taken as integers of two bytes, those of the other tables are exact.
LIMITS = {fmt: 4e-5 if fmt == "nf4" else 1e-6 for fmt in BLOCKED}
BLOCKS = (8, 16, 32, 64, 128, 256, 512)
# (rows of D, columns of D): several panels and tiles, and ragged ends of every kind
SIZES = ((1, 1), (3, 130), (64, 63), (65, 257), (300, 7), (130, 1030))
M = (1, 2, 3, 4, 5, 8, 9, 13, 24, 40)


def compute(
    case: Case, form: str, x: Any, *, x_scale: Any = None, out_dtype: Any = None, threads: int = 0
) -> list[np.ndarray]:
    """The results of all instruction sets, written over NaN."""
    options = {"fmt": case.fmt, "form": form, "cols": case.cols, "activations": "int8", "out_dtype": out_dtype}
    scale = np.ones((*case.codes.shape[:-2], 1, 1), np.float32) if case.scale is None else case.scale
    problem = product_problem(x, case.codes, scale, "cpu", **options)
    assert cpu.refuses_rounded(problem) is None
    n = case.dense.shape[-2 if form == "dot" else -1]
    poison = poisoned(*[((*x.shape[:-1], n), problem.out_dtype)] * len(isas()))

    def program(poison: Any, x: Any, codes: Any, scale: Any, x_scale: Any) -> list[jax.Array]:
        del poison
        given = (x, codes, scale, x_scale)
        return [cpu.byte_matmul(problem, *given, isa=isa, threads=threads) for isa in isas()]

    arguments = (jnp.asarray(x), case.codes, scale, x_scale)
    return [np.asarray(y) for y in jax.jit(program, donate_argnums=0, keep_unused=True)(poison, *arguments)]


def exact(case: Case, form: str, x: Any, scale: Any = None) -> np.ndarray:
    """What a product with one scale per output is, bit for bit in float32."""
    codes, factor = twin(x, "int8", scale)
    weights = case.dense if case.scale is None else np.rint(case.dense / case.scale.astype(np.float64))
    sums = codes.astype(np.int64) @ (weights.T if form == "dot" else weights).astype(np.int64)
    small = factor[:, None] < 2.0**-64
    along = np.ones((1, 1), np.float32) if case.scale is None else np.asarray(case.scale, np.float32).reshape(1, -1)
    with np.errstate(over="ignore"):
        first = sums.astype(np.float32) * np.where(small, factor[:, None], np.float32(1))
        return first * (np.where(small, np.float32(1), factor[:, None]) * along)


def check_blocks(case: Case, x: Any, results: list[np.ndarray], scale: Any = None) -> None:
    """In units of |c| @ |w|, which rounding errors of every term are relative to."""
    codes, factor = twin(x, "int8", scale)
    good = ~np.isnan(factor)
    want, unit = (
        (c @ np.swapaxes(d, -1, -2)) * factor[..., None]
        for c, d in ((codes, case.dense), (abs(codes), abs(case.dense)))
    )
    for y in results:
        error = np.abs(y.astype(np.float64) - want)[good] / np.maximum(unit[good], 1e-30)
        assert error.max(initial=0) <= LIMITS[case.fmt]
        assert np.isnan(y[~good]).all()


def random_x(rng: np.random.Generator, case: Case, form: str, m: int) -> np.ndarray:
    *batch, rows, cols = case.dense.shape
    return rng.standard_normal((*batch, m, cols if form == "dot" else rows)).astype(np.float32)


@pytest.mark.parametrize(("fmt", "form"), [*itertools.product(WHOLE, ["dot"]), ("int8", "axpy")])
def test_every_m_and_size_is_exact(fmt: str, form: str) -> None:
    rng = seeded(fmt, form)
    kinds = itertools.cycle(("row" if form == "dot" else "column", "one", *(() if fmt == "int8" else ("none",))))
    for i, (rows, cols) in enumerate(SIZES):
        for m in M[i % 2 :: 2] if i < len(SIZES) - 1 else M:
            case = make_case(rng, fmt, rows, cols, scale=next(kinds))
            if fmt == "int8":
                extreme = rng.random(case.codes.shape) < 0.1
                case.codes[extreme] = -128  # the one code whose negative is no int8
                case.dense[...] = case.codes * case.scale.astype(np.float64)
            x = random_x(rng, case, form, m)
            want = exact(case, form, x)
            for y in compute(case, form, x, threads=THREADS[m % 3]):
                np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize(
    "fmt", [f if f in ("nf4", "int4", "int3") else pytest.param(f, marks=pytest.mark.thorough) for f in BLOCKED]
)
def test_every_block_lies_within_rounding(fmt: str) -> None:
    rng = seeded(fmt)
    sizes = itertools.cycle(SIZES)
    for block, m in itertools.product((4, *BLOCKS) if fmt == "int8_block" else BLOCKS, (1, 4, 5, 13)):
        case = make_case(rng, fmt, *next(sizes), block=block)
        x = random_x(rng, case, "dot", m)
        check_blocks(case, x, compute(case, "dot", x, threads=THREADS[m % 3]))


@pytest.mark.parametrize(("fmt", "form"), [("int8", "dot"), ("int8", "axpy"), ("ternary", "dot")])
def test_extreme_codes_do_not_saturate(fmt: str, form: str) -> None:
    """All products of one sign and the largest magnitude, which is where 16 bits overflow first."""
    for value, sign in itertools.product((-128, 127) if fmt == "int8" else (-1,), (1, -1)):
        codes = np.full((70, 300), value, np.int8) if fmt == "int8" else np.zeros((70, 75), np.uint8)
        case = Case(fmt, 300, codes, np.ones((1, 1), np.float32), np.full((70, 300), value, np.float64))
        x = np.full((9, 300 if form == "dot" else 70), sign, np.float32)
        for m in (1, 4, 9):
            for y in compute(case, form, x[:m]):
                np.testing.assert_array_equal(y, exact(case, form, x[:m]))


@pytest.mark.parametrize("kind", ROWS_OF_X)
def test_rows_of_every_kind(kind: str) -> None:
    rng = seeded(kind)
    for form, m in itertools.product(("dot", "axpy"), (3, 7)):
        case = make_case(rng, "int8", 130, 200, scale="row" if form == "dot" else "column")
        if kind == "huge":
            case.scale[...] *= np.float32(1e-6)
            case.dense[...] *= np.float32(1e-6)
        x = ROWS_OF_X[kind](rng, random_x(rng, case, form, m)).astype(np.float32)
        for y in compute(case, form, x):
            np.testing.assert_array_equal(y, exact(case, form, x))
    case = make_case(rng, "nf4", 130, 200)
    x = ROWS_OF_X[kind](rng, random_x(rng, case, "dot", 5)).astype(np.float32)
    if kind != "huge":
        check_blocks(case, x, compute(case, "dot", x))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_x_scales_and_results(dtype: Any) -> None:
    rng = seeded(dtype)
    for form, m in itertools.product(("dot", "axpy"), (2, 6)):
        case = make_case(rng, "int8", 70, 190, scale="row" if form == "dot" else "column", scale_dtype=dtype)
        x = jnp.asarray(random_x(rng, case, form, m) / 16).astype(dtype)
        want = exact(case, form, np.asarray(x, np.float32))
        for y in compute(case, form, x, out_dtype=jnp.float32):
            np.testing.assert_array_equal(y, want)
        for y in compute(case, form, x):
            np.testing.assert_array_equal(y, np.asarray(jnp.asarray(want).astype(dtype)))
    case = make_case(rng, "int4", 70, 190, scale_dtype=dtype)
    x = random_x(rng, case, "dot", 6)
    check_blocks(case, x, compute(case, "dot", x))


@pytest.mark.parametrize("m", [3, 11])
def test_given_scales(m: int) -> None:
    """They cut the largest values off; a NaN among them is a row of NaN."""
    rng = seeded(m)
    case = make_case(rng, "int8", 70, 190)
    x, given = random_x(rng, case, "dot", m), rng.uniform(0.002, 0.02, m).astype(np.float32)
    given[1] = np.nan
    for y in compute(case, "dot", x, x_scale=given):
        np.testing.assert_array_equal(y, exact(case, "dot", x, given))
    case = make_case(rng, "nf4", 70, 190)
    check_blocks(case, x, compute(case, "dot", x, x_scale=given), given)


def test_batches() -> None:
    rng = seeded("batches")
    for fmt, (form, m, threads) in itertools.product(("int8", "int4"), (("dot", 2, 0), ("dot", 9, 2), ("axpy", 3, 1))):
        if (fmt, form) == ("int4", "axpy"):
            continue
        case = make_case(rng, fmt, 70, 90, batch=(3,), block=32, scale="row" if form == "dot" else "column")
        x = random_x(rng, case, form, m)
        given = np.abs(x).max(-1) / np.float32(110)
        for scale in (None, given):
            results = compute(case, form, x, x_scale=scale, threads=threads)
            for i in range(3):
                one = Case(fmt, 90, case.codes[i], case.scale[i], case.dense[i])
                part, known = [y[i] for y in results], None if scale is None else scale[i]
                if fmt == "int4":
                    check_blocks(one, x[i], part, known)
                    continue
                for y in part:
                    np.testing.assert_array_equal(y, exact(one, form, x[i], known))


@pytest.mark.parametrize("form", ["dot", "axpy"])
def test_more_rows_than_are_taken_at_once(form: str) -> None:
    rng = seeded(form)
    case = make_case(rng, "int8", 70, 90, scale="row" if form == "dot" else "column")
    x = random_x(rng, case, form, 390)
    given = np.abs(x).max(-1) / np.float32(120)
    for y in compute(case, form, x, x_scale=given):
        np.testing.assert_array_equal(y, exact(case, form, x, given))


@pytest.mark.parametrize("fmt", ["int8", "nf4"])
def test_groups(fmt: str) -> None:
    rng = seeded(fmt)
    case = make_case(rng, fmt, 40, 64, batch=(3,))
    x, sizes = rng.standard_normal((30, 64)).astype(np.float32), np.array([2, 0, 21])
    for given in (None, np.abs(x).max(-1) / np.float32(100)):
        options = {"fmt": fmt, "form": "dot", "cols": 64, "activations": "int8", "preference": "native"}
        y = np.asarray(qragged_dot(x, case.codes, case.scale, sizes, x_scale=given, **options))
        assert not y[23:].any()
        for i, rows in ((0, slice(0, 2)), (2, slice(2, 23))):
            one = Case(fmt, 64, case.codes[i], case.scale[i], case.dense[i])
            known = None if given is None else given[rows]
            if fmt == "int8":
                np.testing.assert_array_equal(y[rows], exact(one, "dot", x[rows], known))
            else:
                check_blocks(one, x[rows], [y[rows]], known)


@pytest.mark.parametrize("form", ["dot", "axpy"])
def test_the_same_as_in_plain_jax(form: str) -> None:
    rng = seeded(form)
    case = make_case(rng, "int8", 530, 1090, scale="row" if form == "dot" else "column")
    for m in (1, 6):
        x = random_x(rng, case, form, m)
        native, plain = (case.product(x, form, activations="int8", preference=p) for p in ("native", "xla"))
        np.testing.assert_array_equal(native, plain)


def problem_of(fmt: str, form: str, **options: Any) -> Any:
    case = make_case(seeded(), fmt, 48, 96, **options)
    x = np.zeros((2, 96 if form == "dot" else 48), np.float32)
    return product_problem(x, case.codes, case.scale, "cpu", fmt=fmt, form=form, cols=96, activations="int8")


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (problem_of("nf4", "dot", block=12), "blocks of 12 values"),
        (problem_of("nf4", "dot", block=48), "blocks of 48 values"),
        (problem_of("nf4", "axpy"), "packed along"),
        (problem_of("int8", "dot", scale="column"), "scales differ"),
        (problem_of("int8", "axpy", scale="full"), "scales differ"),
        (problem_of("fp8_e4m3", "dot"), "no kernels for fp8_e4m3"),
        (problem_of("int8", "dot").replace(activations="fp8"), "not to fp8"),
        (problem_of("int8", "dot").replace(cols=(1 << 17) + 1), "do not fit 32 bits"),
        (problem_of("int8", "dot").replace(platform="cuda"), "run on the CPU"),
    ],
)
def test_what_it_does_not_take(problem: Any, why: str) -> None:
    assert why in (cpu.refuses_rounded(problem) or "")


def test_the_library_checks_too() -> None:
    rng = seeded()
    for case in (make_case(rng, "nf4", 8, 96, block=12), make_case(rng, "int8", 8, 96, scale="column")):
        x = np.ones((2, 96), np.float32)
        problem = product_problem(
            x, case.codes, case.scale, "cpu", fmt=case.fmt, form="dot", cols=96, activations="int8"
        )
        with pytest.raises(jax.errors.JaxRuntimeError, match="x cannot be rounded"):
            cpu.byte_matmul(problem, x, case.codes, case.scale)


@pytest.mark.parametrize(("fmt", "form"), [("fp8_e4m3", "dot"), ("fp8_e4m3", "axpy"), ("fp8_e4m3_block", "dot")])
def test_rows_rounded_to_fp8_are_multiplied_natively(fmt: str, form: str) -> None:
    """Their products are exact in float32, whose sums are compared in units of |c| @ |w|; in batches too."""
    rng = seeded(fmt, form)
    for kind, batch in (("random", (2,)), ("outlier", ()), ("zero", ()), ("tiny", ()), ("none", ())):
        case = make_case(rng, fmt, 130, 290, scale="row" if form == "dot" else "column", batch=batch)
        x = random_x(rng, case, form, 5)
        x = x * np.float32(2.0**-90) if kind == "tiny" else ROWS_OF_X[kind](rng, x)
        options: Any = {"activations": "fp8", "preference": "native"}
        with recorder() as events:
            y = np.asarray(case.product(jnp.asarray(x), form, **options), np.float64)
        assert [event.name for event in events] == ["native_cpu"]
        codes, factor = twin(x, "fp8")
        matrix = np.swapaxes(case.dense, -1, -2) if form == "dot" else case.dense
        good = np.isfinite(factor)
        want, unit = ((c @ d * factor[..., None])[good] for c, d in ((codes, matrix), (abs(codes), abs(matrix))))
        assert (np.abs(y[good] - want) <= 1e-6 * unit).all()
        assert np.isnan(y[~good]).all()
