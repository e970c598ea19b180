"""Zero points and biases in every kernel that takes them: products, groups, lookups and stacks against float64."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._kernels import cpu
from eformer._kernels.formats import decode
from eformer._kernels.parameters import Parameters, Problem, product_problem

from ..cases import FORMS, INTEGERS, OFFSETS, Case, make_case, relative_error, with_offset
from ..hlo_cases import seeded
from .calls import FLOAT32_LIMIT, THREADS, Call, compute, errors, isas

# Rows, columns, block: one block and several in a vector, blocks that cut vectors, ragged ends, several panels.
SHAPES = ((3, 130, 16), (65, 129, 64), (40, 1030, 128), (70, 90, 48), (17, 40, 24), (257, 96, 32), (70, 650, 704))

# The kernels of int4, of bytes, and of bits that become bytes.
MOST = [fmt if fmt in ("int4", "int3") else pytest.param(fmt, marks=pytest.mark.thorough) for fmt in INTEGERS]


def offset_case(rng: np.random.Generator, fmt: str, kind: str, shape: tuple[int, int, int], **how: Any) -> Case:
    rows, cols, block = shape
    dtype = rng.choice([np.float32, np.float16, jnp.bfloat16])
    return with_offset(rng, make_case(rng, fmt, rows, cols, block=block, **how), kind, dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", MOST)
def test_products(fmt: str, form: str) -> None:
    rng, threads, calls = seeded(fmt, form), itertools.cycle(THREADS), []
    for kind, shape in itertools.product(OFFSETS, SHAPES):
        case = offset_case(rng, fmt, kind, shape, scale_dtype=rng.choice([np.float32, np.float16]))
        for m in (1, int(rng.integers(2, 5)), 5, int(rng.integers(6, 40))):
            x = rng.standard_normal((m, shape[1 if form == "dot" else 0])).astype(np.float32)
            calls += [Call(case, form, x, isa, next(threads)) for isa in isas()]
    for call, error in zip(calls, errors(calls), strict=True):
        assert error <= FLOAT32_LIMIT, f"{call}: error {error:.1e}"


@pytest.mark.parametrize("kind", OFFSETS)
@pytest.mark.parametrize("fmt", MOST)
def test_infinite_x(fmt: str, kind: str) -> None:
    """An infinity in x meets what a value is with its offset, not the two of them one after the other."""
    rng = seeded(fmt, kind)
    case = offset_case(rng, fmt, kind, (65, 129, 64))
    for m in (6, 20):
        x = rng.standard_normal((m, 129)).astype(np.float32)
        x[2, 100] = np.inf
        with np.errstate(invalid="ignore"):
            want = case.expected(x.astype(np.float64), "dot")[2]
        for found in compute([Call(case, "dot", x, isa) for isa in isas()]):
            zero = np.isnan(want)  # a value that is zero but for the rounding of its two parts
            np.testing.assert_array_equal(found[2][~zero], want[~zero])
            assert not np.isfinite(found[2]).any()
            assert np.isfinite(np.delete(found, 2, axis=0)).all()


@pytest.mark.parametrize("kind", OFFSETS)
def test_batches_and_narrow_types(kind: str) -> None:
    rng, calls = seeded(kind), []
    for form, fmt in itertools.product(FORMS, ("int4", "int8_block")):
        case = offset_case(rng, fmt, kind, (33, 72, 16), batch=(3,))
        x = rng.standard_normal((3, 25, 72 if form == "dot" else 33)).astype(jnp.bfloat16)
        calls += [Call(case, form, x, isa, out_dtype=jnp.float32) for isa in isas()]
    assert max(errors(calls)) <= FLOAT32_LIMIT


@pytest.mark.parametrize("kind", OFFSETS)
@pytest.mark.parametrize("form", FORMS)
def test_groups_and_stacks(form: str, kind: str) -> None:
    """Each group and each entry of a stack has offsets of its own."""
    rng = seeded(form, kind)
    case = offset_case(rng, "int4", kind, (70, 90, 16), batch=(3,))
    x = rng.standard_normal((9, 90 if form == "dot" else 70)).astype(np.float32)
    options: Any = {"fmt": "int4", "form": form, "cols": 90}
    problem = product_problem(x, case.codes, case.scale, "cpu", offset=case.offset, **options)
    matrices = case.dense.swapaxes(1, 2) if form == "dot" else case.dense
    want = np.concatenate([x[:4] @ matrices[0], x[4:7] @ matrices[2], np.zeros((2, matrices.shape[2]))])
    one = product_problem(x, case.codes[0], case.scale[0], "cpu", offset=case.offset[0], **options)
    for isa in isas():
        found = cpu.qragged(problem, x, case.codes, np.array([4, 0, 3]), case.scale, offset=case.offset, isa=isa)
        assert relative_error(found, want) <= FLOAT32_LIMIT
        for i in range(3):
            how: Any = {"offset": case.offset, "index": jnp.int32(i), "isa": isa}
            found = cpu.qmatmul(one, jnp.asarray(x), jnp.asarray(case.codes), jnp.asarray(case.scale), **how)
            assert relative_error(found, x @ matrices[i]) <= FLOAT32_LIMIT


@pytest.mark.parametrize("kind", OFFSETS)
@pytest.mark.parametrize("fmt", MOST)
def test_lookups_give_the_bits_of_the_definition(fmt: str, kind: str) -> None:
    rng = seeded(fmt, kind)
    for shape in SHAPES:
        case, cols = offset_case(rng, fmt, kind, shape), shape[1]
        ids = rng.integers(0, shape[0], 7).astype(np.int32)
        parameters = Parameters(fmt, "lookup", cols, shape[2], np.dtype(np.float32), offset=case.offset.dtype)
        problem = Problem(**parameters.common(), m=7, rows=shape[0], scale_shape=case.scale.shape)
        stored = (jnp.asarray(array) for array in (case.codes, case.scale, case.offset))
        want = jax.jit(lambda *stored, cols=cols: decode(*stored, fmt=fmt, cols=cols))(*stored)[ids]
        assert relative_error(want, case.dense[ids]) < 1e-6
        for isa in isas():
            found = cpu.qgather(problem, case.codes, ids, case.scale, offset=case.offset, isa=isa)
            np.testing.assert_array_equal(found, want, err_msg=f"{shape} {isa}")


def test_handlers_refuse_offsets_that_do_not_fit() -> None:
    rng = seeded("refused")
    x, case = np.ones((2, 64), np.float32), make_case(rng, "int4", 8, 64, block=32)
    problem = product_problem(x, case.codes, case.scale, "cpu", fmt="int4", form="dot", cols=64)
    for offset in (np.zeros((8, 3), np.uint8), np.zeros((8, 2), np.int32)):
        with pytest.raises(Exception, match=r"offset .* must be u8, f32, bf16 or f16 of the shape of scale"):
            jax.block_until_ready(cpu.qmatmul(problem, jnp.asarray(x), case.codes, case.scale, offset=offset))
    nf4 = make_case(rng, "nf4", 8, 64, block=32)
    problem = product_problem(x, nf4.codes, nf4.scale, "cpu", fmt="nf4", form="dot", cols=64)
    with pytest.raises(Exception, match=r"for integers in blocks; fmt=0"):
        jax.block_until_ready(
            cpu.qmatmul(problem, jnp.asarray(x), nf4.codes, nf4.scale, offset=np.zeros((8, 2), np.uint8))
        )
