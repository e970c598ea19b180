"""Every product kernel against float64, over sizes, blocks, scales, dtypes, instruction sets and threads."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ..cases import BITS, BLOCKED, FORMATS, FORMS, NIBBLES, SCALES, Case, make_case, relative_error
from .calls import FLOAT32_LIMIT, THREADS, Call, compute, errors, isas

SIZES = ((1, 1), (1, 2), (2, 1), (3, 130), (17, 64), (64, 63), (65, 129), (257, 66), (40, 1030), (300, 7), (130, 515))
BLOCKS = (2, 4, 6, 10, 16, 30, 32, 48, 64, 100, 128, 256, 512, 4096)
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def random_x(rng: np.random.Generator, case, form: str, m: int, dtype=jnp.float32):
    *batch, rows, cols = case.dense.shape
    # Small enough that no result overflows in float16.
    values = rng.standard_normal((*batch, m, cols if form == "dot" else rows)) / 16
    return values.astype(np.float32).astype(dtype)


def check(calls: list[Call], limit: float = FLOAT32_LIMIT) -> None:
    for call, error in zip(calls, errors(calls), strict=True):
        assert error <= limit, f"{call}: error {error:.1e}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_m(fmt: str, form: str, rng: np.random.Generator) -> None:
    case = make_case(rng, fmt, 85, 262)
    threads, calls = itertools.cycle(THREADS), []
    for m in range(1, 34):
        x = random_x(rng, case, form, m)
        calls += [Call(case, form, x, isa, next(threads)) for isa in isas()]
    check(calls)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_size_and_scale(fmt: str, form: str, rng: np.random.Generator) -> None:
    calls = []
    for i, (rows, cols) in enumerate(SIZES):
        for scale in SCALES[fmt]:
            case = make_case(rng, fmt, rows, cols, block=32, scale=scale)
            x = random_x(rng, case, form, int(rng.integers(1, 20)))
            calls += [Call(case, form, x, isa, THREADS[(i + isa) % 3]) for isa in isas()]
    check(calls)


@pytest.mark.parametrize("form", FORMS)
def test_every_block_size(form: str, rng: np.random.Generator) -> None:
    calls = []
    for i, block in enumerate(BLOCKS):
        for cols in (block, 2 * block + 3, 333):
            case = make_case(rng, "nf4", 67, cols, block=block)
            for m in (1, int(rng.integers(2, 20))):
                x = random_x(rng, case, form, m)
                calls += [Call(case, form, x, isa, THREADS[i % 3]) for isa in isas()]
    check(calls)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_large(fmt: str, form: str, rng: np.random.Generator) -> None:
    """Sizes that need several panels in every direction, and threads that share them."""
    calls = []
    for rows, cols in ((1030, 650), (520, 1290)):
        case = make_case(rng, fmt, rows, cols)
        for m in (1, 5, 70, 130):
            x = random_x(rng, case, form, m)
            calls += [Call(case, form, x, isa, threads) for isa in isas() for threads in THREADS[:2]]
    check(calls)


@pytest.mark.parametrize("fmt", FORMATS)
def test_many_sums(fmt: str, rng: np.random.Generator) -> None:
    """Axpy form with few rows of x: pieces of the contracted axis whose sums several threads add up."""
    calls = []
    for (rows, cols), m in zip(((1537, 8205), (2050, 4100), (515, 12300)), (4, 3, 2), strict=True):
        case = make_case(rng, fmt, rows, cols)
        x = random_x(rng, case, "axpy", m)
        calls += [Call(case, "axpy", x, isa, threads) for isa in isas() for threads in THREADS[:2]]
    check(calls)
    results = compute(calls)
    for call, pooled, alone in zip(calls[::2], results[::2], results[1::2], strict=True):
        np.testing.assert_array_equal(pooled, alone, err_msg=f"{call}: the number of threads matters")


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=lambda t: t.__name__)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_narrow_x_and_results(fmt: str, form: str, dtype, rng: np.random.Generator) -> None:
    """x is exact in its dtype; the result is rounded once if it is narrow, and sums are float32 if it is not."""
    wide, narrow = [], []
    for rows, cols in SIZES[3:]:
        case = make_case(rng, fmt, rows, cols, block=32)
        x = random_x(rng, case, form, int(rng.integers(1, 20)), dtype)
        wide += [Call(case, form, x, isa, out_dtype=jnp.float32) for isa in isas()]
        narrow += [Call(case, form, x, isa) for isa in isas()]
    check(wide, NARROW_LIMIT)
    check(narrow, float(jnp.finfo(dtype).eps))


# What weights rounded to bfloat16 would cost is far above this.
NARROW_LIMIT = 1e-5


@pytest.mark.parametrize("fmt", FORMATS)
def test_narrow_scales(fmt: str, rng: np.random.Generator) -> None:
    calls = []
    for form, dtype, scale in itertools.product(FORMS, DTYPES[1:], SCALES[fmt]):
        if scale != "none":
            case = make_case(rng, fmt, 70, 190, scale=scale, scale_dtype=dtype)
            calls += [Call(case, form, random_x(rng, case, form, m), isa) for m in (1, 6) for isa in isas()]
    check(calls)


@pytest.mark.parametrize("fmt", FORMATS)
def test_batches(fmt: str, rng: np.random.Generator) -> None:
    calls = []
    for form, batch in itertools.product(FORMS, ((3,), (2, 2))):
        case = make_case(rng, fmt, 70, 90, batch=batch)
        calls += [Call(case, form, random_x(rng, case, form, 4), isa, t) for isa in isas() for t in THREADS]
    check(calls)


@pytest.mark.parametrize("fmt", FORMATS)
def test_values_that_are_not_finite(fmt: str, rng: np.random.Generator) -> None:
    """A NaN of x reaches its own row of the result alone."""
    for form in FORMS:
        case = make_case(rng, fmt, 66, 130)
        x = random_x(rng, case, form, 5)
        x[2, 3] = np.nan
        for found in compute([Call(case, form, x, isa) for isa in isas()]):
            assert np.isnan(found[2]).all()
            assert np.isfinite(np.delete(found, 2, axis=0)).all()


# Rows, columns, block: one step of an instruction and several, blocks longer than a panel, a whole row, ragged ends.
STEPS = ((67, 330, 32), (130, 1000, 64), (64, 96, 96), (16, 65, 64), (33, 650, 704), (70, 2070, 160), (129, 600, 320))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda t: t.__name__)
@pytest.mark.parametrize("fmt", ["nf4", "int8", "fp8_e4m3", "fp8_e5m2", *BLOCKED])
def test_blocks_of_whole_steps(fmt: str, dtype, rng: np.random.Generator) -> None:
    """Sums of a block that are scaled afterwards, for fewer rows of x than a tile holds and for more."""
    calls = []
    for i, (rows, cols, block) in enumerate(STEPS):
        case = make_case(rng, fmt, rows, cols, block=block)
        for m in (5, 6, 16, int(rng.integers(17, 80)), *([130, 600] if i == 0 else [])):
            x = random_x(rng, case, "dot", m, dtype)
            calls += [Call(case, "dot", x, isa, THREADS[(i + m) % 3], out_dtype=jnp.float32) for isa in isas()]
    check(calls)


@pytest.mark.parametrize("fmt", ["nf4", *BLOCKED])
def test_scales_and_x_of_any_size(fmt: str, rng: np.random.Generator) -> None:
    """What one of them has too much of the other takes away: no value in between leaves the range of float32."""
    calls = []
    for power in (-100, -60, 75, 100):
        case = make_case(rng, fmt, 40, 200, block=64)
        dense, scale = case.dense * 2.0**-power, (case.scale.astype(np.float64) * 2.0**-power).astype(np.float32)
        case = dataclasses.replace(case, scale=scale, dense=dense)
        for m in (6, 20):
            x = random_x(rng, case, "dot", m) * np.float32(2.0**power)
            calls += [Call(case, "dot", x, isa) for isa in isas()]
    check(calls)


@pytest.mark.parametrize("fmt", ["nf4", "int8", "fp8_e4m3", *BLOCKED])
def test_infinite_x(fmt: str, rng: np.random.Generator) -> None:
    """Infinities in the row of x that has them, NaN where they meet a zero, as in the dense product."""
    case = make_case(rng, fmt, 66, 130)
    for m in (6, 18, 40):
        x = random_x(rng, case, "dot", m)
        x[1, 3], x[4, 70] = np.inf, -np.inf
        with np.errstate(invalid="ignore"):
            want = case.expected(x.astype(np.float64), "dot")
        assert np.isinf(want[1]).any()
        for found in compute([Call(case, "dot", x, isa) for isa in isas()]):
            for row in (1, 4):
                np.testing.assert_array_equal(found[row], want[row])
            assert relative_error(np.delete(found, (1, 4), 0), np.delete(want, (1, 4), 0)) <= FLOAT32_LIMIT


ONE_BYTE = ("int8_block", "fp8_e4m3_block", "fp8_e5m2_block", "fp8_e4m3", "fp8_e5m2")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", [*NIBBLES, *ONE_BYTE, *BITS])
def test_more_formats(fmt: str, form: str, rng: np.random.Generator) -> None:
    """Formats that share their kernels with another: sizes, blocks, scales and types, each in some combination."""
    calls = []
    for i, (rows, cols) in enumerate(SIZES):
        block, dtype, m = BLOCKS[1 + 5 * i % 12], DTYPES[i % 3], (1, 3, 4, 19, 70)[i % 5]
        block = -(-block // 8) * 8 if fmt in BITS else block
        scale = ("row", "column", "one", "full")[i % 4]
        case = make_case(rng, fmt, rows, cols, block=block, scale=scale, scale_dtype=DTYPES[i // 3 % 3])
        x = random_x(rng, case, form, m, dtype)
        calls += [Call(case, form, x, isa, THREADS[(i + isa) % 3], out_dtype=jnp.float32) for isa in isas()]
    batched = make_case(rng, fmt, 70, 190, batch=(3,))
    calls += [Call(batched, form, random_x(rng, batched, form, 4), isa) for isa in isas()]
    check(calls)


@pytest.mark.parametrize("fmt", ONE_BYTE[1:])
def test_every_code_of_fp8(fmt: str) -> None:
    """Subnormal values, the largest ones, and in a row of their own what is not finite."""
    kind = ml_dtypes.float8_e4m3fn if "e4m3" in fmt else ml_dtypes.float8_e5m2
    known = np.arange(256, dtype=np.uint8).view(kind).astype(np.float32)
    codes = np.arange(256, dtype=np.uint8).reshape((256, 1, 1) if fmt.endswith("block") else (256, 1))
    codes = np.concatenate([codes, np.zeros_like(codes)], axis=-1)
    case = Case(fmt, 2, codes, np.ones((256, 1), np.float32), np.stack([known, np.zeros_like(known)], axis=-1))
    calls = [Call(case, "dot", np.eye(m, 2, dtype=np.float32), isa) for m in (1, 2, 5, 9, 20) for isa in isas()]
    for found in compute(calls):
        np.testing.assert_array_equal(found[0], known)


def test_an_absent_instruction_set_is_refused(rng: np.random.Generator) -> None:
    case = make_case(rng, "int8", 8, 8)
    with pytest.raises(jax.errors.JaxRuntimeError, match="isa=99"):
        compute([Call(case, "dot", random_x(rng, case, "dot", 1), isa=99)])
