"""Scales read as they are stored, in every kernel: bytes (e8m0, e4m3), and a factor of all scales of a matrix."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eformer as ef
from eformer import implicit
from eformer._kernels import cpu, qgather, qmatmul, qragged_dot
from eformer._kernels.formats import decode, float_scale
from eformer._kernels.parameters import Parameters, Problem, product_problem

from ..cases import FORMS, Case, make_case, relative_error, with_byte_scales
from ..hlo_cases import seeded
from .calls import FLOAT32_LIMIT, THREADS, Call, compute, errors, isas

KINDS = ("e8m0", "e4m3")
FORMATS = ("fp4", "fp8_e4m3_block", "nf4", "int8_block", "int3")
MOST = [fmt if fmt.startswith("fp") else pytest.param(fmt, marks=pytest.mark.thorough) for fmt in FORMATS]
# Rows, columns, block: one block and several in a vector, blocks that cut vectors, ragged ends, several panels.
SHAPES = ((3, 130, 16), (65, 129, 32), (40, 1030, 128), (70, 90, 48), (17, 40, 24), (257, 96, 32), (130, 2070, 16))


def byte_case(rng: np.random.Generator, fmt: str, kind: str, rows: int, cols: int, block: int, **how: Any) -> Case:
    return with_byte_scales(rng, make_case(rng, fmt, rows, cols, block=block, **how), kind)


def check(calls: list[Call], limit: float = FLOAT32_LIMIT) -> None:
    for call, error in zip(calls, errors(calls), strict=True):
        assert error <= limit, f"{call}: error {error:.1e}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", MOST)
def test_products(fmt: str, kind: str, form: str) -> None:
    rng, threads, calls = seeded(fmt, kind, form), itertools.cycle(THREADS), []
    for rows, cols, block in SHAPES:
        case = byte_case(rng, fmt, kind, rows, cols, block)
        for m in (1, int(rng.integers(2, 5)), int(rng.integers(5, 40))):
            x = rng.standard_normal((m, cols if form == "dot" else rows)).astype(np.float32)
            calls += [Call(case, form, x, isa, next(threads)) for isa in isas()]
    check(calls)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_m(kind: str, form: str) -> None:
    rng, calls = seeded(kind, form), []
    case = byte_case(rng, "fp4", kind, 85, 262, 32 if kind == "e8m0" else 16)
    for m in (*range(1, 34), 64, 128, 130):
        dtype = (jnp.float32, jnp.bfloat16)[m % 2]
        x = (rng.standard_normal((m, 262 if form == "dot" else 85))).astype(dtype)
        calls += [Call(case, form, x, isa, THREADS[m % 3], out_dtype=jnp.float32) for isa in isas()]
    check(calls, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_have_a_factor_each(kind: str) -> None:
    rng, calls = seeded(kind), []
    for form, fmt in itertools.product(FORMS, ("fp4", "fp8_e4m3_block")):
        case = byte_case(rng, fmt, kind, 33, 72, 16, batch=(3,))
        x = rng.standard_normal((3, 25, 72 if form == "dot" else 33)).astype(np.float32)
        calls += [Call(case, form, x, isa) for isa in isas()]
    check(calls)


def by_the_specification(kind: str) -> np.ndarray:
    """What the 256 codes stand for: OCP Microscaling 1.0 section 5.4.1, OCP 8-bit floating point 1.0 table 1."""
    if kind == "e8m0":
        return np.array([*(2.0 ** (code - 127) for code in range(255)), np.nan])
    half = [(m / 8 if e == 0 else 1 + m / 8) * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8)]
    half[127] = np.nan
    return np.array([*half, *(-value for value in half)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_every_code_of_a_scale(form: str, kind: str) -> None:
    """A row of D for each code, with as many blocks as take all the ways to convert, and one code that stands for 1."""
    known = by_the_specification(kind)
    stored = np.arange(256, dtype=np.uint8) if kind == "e8m0" else np.arange(256, dtype=np.uint8).view("float8_e4m3fn")
    for blocks, fmt, one in ((1, "fp4", 0x22), (70, "fp4", 0x22), (70, "fp8_e4m3_block", 0x38)):
        block = 16 if fmt == "fp4" else 32
        codes = np.full((256, blocks, block // 2 if fmt == "fp4" else block), one, np.uint8)
        scale = np.repeat(stored[:, None], blocks, axis=1)
        case = Case(fmt, blocks * block, codes, scale, np.ones((256, blocks * block)))
        for m in (1, 3, 9):
            x = np.zeros((m, 256 if form == "axpy" else blocks * block), np.float32)
            if form == "dot":
                x[:, 0] = 1
                found = compute([Call(case, form, x, isa) for isa in isas()])
                rows = [y[0] for y in found]
            else:  # a NaN anywhere in a column is one in all of it: one row of D at a time
                cases = [dataclasses.replace(case, codes=codes[i : i + 1], scale=scale[i : i + 1]) for i in range(256)]
                cases = [dataclasses.replace(c, dense=case.dense[:1]) for c in cases]
                calls = [Call(c, form, np.ones((m, 1), np.float32), isas()[-1]) for c in cases]
                rows = [np.array([y[0, -1] for y in compute(calls)])] if m == 1 and blocks > 1 else []
            for row in rows:
                normal = np.isnan(known) | (np.abs(known) >= 2.0**-126) | (known == 0)
                np.testing.assert_array_equal(row[normal], known[normal].astype(np.float32))
                assert set(row[~normal].tolist()) <= {0.0, *known[~normal].tolist()}  # threads of XLA flush it


def test_scales_far_apart_in_one_row() -> None:
    """Each row of x takes one value out of D, whatever the scales of the blocks beside it."""
    rng = seeded("apart")
    case = make_case(rng, "fp4", 70, 20 * 32, block=32)
    values = case.dense / np.repeat(case.scale.astype(np.float64), 32, axis=1)
    scale = rng.integers(2, 252, case.scale.shape).astype(np.uint8)
    dense = values * np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, axis=1)
    case = dataclasses.replace(case, scale=scale, dense=dense)
    for m in (5, 9, 20):
        x, at = np.zeros((m, 640), np.float32), rng.permutation(640)[:m]
        x[np.arange(m), at] = 1
        for found in compute([Call(case, "dot", x, isa) for isa in isas()]):
            np.testing.assert_array_equal(found, dense[:, at].T.astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_that_is_nan_stays_in_its_block(kind: str) -> None:
    rng = seeded(kind)
    case = byte_case(rng, "fp4", kind, 70, 200, 16)
    scale = case.scale.copy()
    scale.view(np.uint8)[33, 5] = 255 if kind == "e8m0" else 127
    case = dataclasses.replace(case, scale=scale)
    for m in (1, 4, 5, 19):
        x = rng.standard_normal((m, 200)).astype(np.float32)
        for found in compute([Call(case, "dot", x, isa) for isa in isas()]):
            assert np.isnan(found[:, 33]).all()
            assert np.isfinite(np.delete(found, 33, axis=1)).all()
        for found in compute([Call(case, "axpy", x[:, :70], isa) for isa in isas()]):
            assert np.isnan(found[:, 80:96]).all()
            assert np.isfinite(np.delete(found, range(80, 96), axis=1)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_groups_and_stacks(form: str, kind: str) -> None:
    rng = seeded(form, kind)
    case = byte_case(rng, "fp4", kind, 70, 96, 16, batch=(3,))
    x = rng.standard_normal((9, 96 if form == "dot" else 70)).astype(np.float32)
    options: Any = {"fmt": "fp4", "form": form, "cols": 96}
    problem = product_problem(x, case.codes, case.scale, "cpu", factor=case.factor, **options)
    matrices = case.dense.swapaxes(1, 2) if form == "dot" else case.dense
    want = np.concatenate([x[:4] @ matrices[0], x[4:7] @ matrices[2], np.zeros((2, matrices.shape[2]))])
    factor = None if case.factor is None else case.factor[0]
    one = product_problem(x, case.codes[0], case.scale[0], "cpu", factor=factor, **options)
    sizes, factor = np.array([4, 0, 3]), None if case.factor is None else jnp.asarray(case.factor)
    for isa in isas():
        found = cpu.qragged(problem, x, case.codes, sizes, case.scale, factor=factor, isa=isa)
        assert relative_error(found, want) <= FLOAT32_LIMIT
        for i in range(3):
            how: Any = {"factor": factor, "index": jnp.int32(i), "isa": isa}
            found = cpu.qmatmul(one, jnp.asarray(x), jnp.asarray(case.codes), jnp.asarray(case.scale), **how)
            assert relative_error(found, x @ matrices[i]) <= FLOAT32_LIMIT
    both = [
        qragged_dot(x, case.codes, case.scale, sizes, factor=factor, preference=how, **options)
        for how in ("native", "xla")
    ]
    assert relative_error(both[0], want) <= FLOAT32_LIMIT
    assert relative_error(both[1], want) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", ["fp4", "fp8_e4m3_block"])
def test_lookups_give_the_bits_of_the_definition(fmt: str, kind: str) -> None:
    rng = seeded(fmt, kind)
    for rows, cols, block in SHAPES:
        case = byte_case(rng, fmt, kind, rows, cols, block)
        ids = rng.integers(0, rows, 7).astype(np.int32)
        parameters = Parameters(fmt, "lookup", cols, block, np.dtype(np.float32), factored=case.factor is not None)
        problem = Problem(**parameters.common(), m=7, rows=rows, scale_shape=case.scale.shape)
        scale = float_scale(jnp.asarray(case.scale), case.factor)
        want = jax.jit(lambda *stored, cols=cols: decode(*stored, fmt=fmt, cols=cols))(case.codes, scale)[ids]
        assert relative_error(want, case.dense[ids]) < 1e-6
        for isa in isas():
            found = cpu.qgather(problem, case.codes, ids, case.scale, factor=case.factor, isa=isa)
            np.testing.assert_array_equal(found, want, err_msg=f"{rows, cols, block} {isa}")
        found = qgather(case.codes, case.scale, ids, factor=case.factor, fmt=fmt, cols=cols, preference="xla")
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [1, 3, 8, 20])
def test_x_of_8_bits_gives_the_bits_it_gives_with_float_scales(m: int, kind: str) -> None:
    rng = seeded(m, kind)
    for rows, cols, block in ((70, 320, 32), (33, 1000, 16)):
        case = byte_case(rng, "fp4", kind, rows, cols, block)
        x = jnp.asarray(rng.standard_normal((m, cols)), jnp.float32)
        options: Any = {"fmt": "fp4", "form": "dot", "cols": cols, "activations": "int8"}
        floats = float_scale(jnp.asarray(case.scale), case.factor)
        problem = product_problem(x, case.codes, case.scale, "cpu", factor=case.factor, **options)
        plain = product_problem(x, case.codes, floats, "cpu", **options)
        for isa in isas():
            found = cpu.byte_matmul(problem, x, case.codes, case.scale, factor=case.factor, isa=isa)
            np.testing.assert_array_equal(found, cpu.byte_matmul(plain, x, case.codes, floats, isa=isa))


@pytest.mark.parametrize(
    ("dtype", "activations"),
    [*itertools.product(("mxfp4", "nvfp4"), (None, "int8", "fp8")), ("mxfp8", None), ("mxfp8", "fp8")],
)
def test_arrays_hand_over_what_they_store(key, dtype: str, activations: str | None) -> None:
    """No float of a scale is made in a program."""
    w = ef.quantize(jax.random.normal(key, (256, 128)), dtype=dtype, activations=activations)
    x = jax.random.normal(key, (5, 256), jnp.bfloat16)
    run = jax.jit(implicit(lambda x, w: x @ w))
    text = run.lower(x, w).compile().as_text()
    assert "eformer_cpu" in text
    assert f"f32[128,{256 // (16 if dtype == 'nvfp4' else 32)}]" not in text
    want = x.astype(jnp.float32) @ w.materialize()
    np.testing.assert_allclose(run(x, w).astype(jnp.float32), want, rtol=0.1, atol=3)


def test_what_does_not_fit_is_refused() -> None:
    rng = seeded("refused")
    case = byte_case(rng, "fp4", "e4m3", 8, 64, 16)
    x, options = np.ones((2, 64), np.float32), {"fmt": "fp4", "form": "dot", "cols": 64}
    with pytest.raises(ValueError, match=r"a factor of the scales must be float32 \(1, 1\)"):
        qmatmul(x, case.codes, case.scale, factor=np.ones((8, 1), np.float32), **options)
    ints = make_case(rng, "int4", 8, 64, block=16)
    zeros = np.zeros(ints.scale.shape, np.uint8)
    with pytest.raises(TypeError, match="a matrix with an offset has floating scales"):
        qmatmul(x, ints.codes, zeros, offset=zeros, fmt="int4", form="dot", cols=64)
    problem = product_problem(x, case.codes, case.scale, "cpu", factor=case.factor, **options)
    with pytest.raises(Exception, match="factor has 2 entries for the scales of 1 matrices"):
        jax.block_until_ready(cpu.qmatmul(problem, x, case.codes, case.scale, factor=np.ones(2, np.float32)))
