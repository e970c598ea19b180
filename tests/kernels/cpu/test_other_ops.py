"""The smaller operations against their JAX twins and against numpy: grouped products, lookups, the NF4 encoder."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formats import references

from eformer._formats.nf4 import codec
from eformer._kernels import cpu, qgather, qragged_dot
from eformer._kernels.formats import FORMATS as STORED
from eformer._kernels.parameters import Problem, product_problem
from eformer._record import recorder

from ..cases import FORMATS, FORMS, SCALES, make_case, relative_error
from .calls import FLOAT32_LIMIT, THREADS, isas, poisoned

M = 13
MORE = (*FORMATS, "int3", "int4", "int6", "int8_block", "fp8_e4m3", "fp8_e4m3_block")
SIZES = ([3, 0, 4, 1, 5], [0, 0, 13, 0, 0], [2, 1, 0, 0, 1], [0] * 5, [0, 13, 5, 0, 0])


def grouped(case, form: str, x, sizes) -> np.ndarray:
    """The grouped product in float64; groups that do not fit into x are cut."""
    matrices = case.dense.swapaxes(1, 2) if form == "dot" else case.dense
    y, start = np.zeros((x.shape[0], matrices.shape[2])), 0
    for matrix, size in zip(matrices, sizes, strict=True):
        rows = slice(start, start + size)
        y[rows] = np.asarray(x[rows], np.float64) @ matrix
        start += size
    return y


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", MORE)
def test_groups(fmt: str, form: str, rng: np.random.Generator) -> None:
    """Every instruction set, over poisoned memory, in one program that takes all the sizes."""
    scale = SCALES[fmt][int(rng.integers(len(SCALES[fmt])))]
    case = make_case(rng, fmt, 70, 90, block=16, scale=scale, batch=(5,))
    x = jnp.asarray(rng.standard_normal((M, 90 if form == "dot" else 70)), jnp.float32)
    problem = product_problem(x, case.codes, case.scale, "cpu", fmt=fmt, form=form, cols=90)
    ways = list(itertools.product(isas(), THREADS[:2]))

    def program(poison, x, codes, scale, sizes):
        del poison
        return [cpu.qragged(problem, x, codes, sizes, scale, isa=isa, threads=t) for isa, t in ways]

    run = jax.jit(program, donate_argnums=0, keep_unused=True)
    for sizes in SIZES:
        poison = poisoned(*[((M, 70 if form == "dot" else 90), jnp.float32)] * len(ways))
        for way, found in zip(ways, run(poison, x, case.codes, case.scale, np.array(sizes)), strict=True):
            assert relative_error(found, grouped(case, form, x, sizes)) <= FLOAT32_LIMIT, (sizes, way)


def test_grouped_products_are_chosen_and_differentiate(rng: np.random.Generator) -> None:
    case = make_case(rng, "nf4", 70, 128, batch=(3,))
    x = (rng.standard_normal((9, 128)) / 20).astype(np.float32)
    sizes = jnp.array([4, 0, 3])
    dense = jnp.asarray(case.dense.swapaxes(1, 2), jnp.float32)

    def ours(x, codes=case.codes):
        return qragged_dot(x, codes, case.scale, sizes, fmt="nf4", form="dot", cols=128)

    def loss(product):
        return lambda x: jnp.sin(product(x)).sum()

    with recorder() as events:
        gradient = jax.jit(jax.grad(loss(ours)))(x)
    assert [(e.op, e.name, e.problem.form) for e in events] == [
        ("qragged_dot", "native_cpu", "dot"), ("qragged_dot", "native_cpu", "axpy"),
    ]  # fmt: skip
    theirs = loss(lambda x: jax.lax.ragged_dot(x, dense, sizes))
    assert relative_error(gradient, jax.grad(theirs)(x)) < 5e-6
    assert relative_error(*(jax.jvp(f, (x,), (gradient,))[1] for f in (loss(ours), theirs))) < 5e-6
    # mapped over x, and over x and the experts
    stack = np.stack([x, -x])
    expected = np.stack([grouped(case, "dot", v, sizes) for v in stack])
    assert relative_error(jax.vmap(ours)(stack), expected) <= FLOAT32_LIMIT
    both = jax.vmap(ours)(stack, np.stack([case.codes, case.codes]))
    assert relative_error(both, expected) <= FLOAT32_LIMIT


def test_grouped_products_agree_with_the_twin(rng: np.random.Generator) -> None:
    case = make_case(rng, "int8", 70, 128, batch=(4,))
    x = rng.standard_normal((20, 128)).astype(np.float32)
    for dtype in (jnp.float32, jnp.bfloat16):
        native, twin = (
            qragged_dot(
                jnp.asarray(x, dtype), case.codes, case.scale, np.array([5, 0, 9, 2]), fmt="int8", form="dot", cols=128,
                out_dtype=jnp.float32, preference=preference,
            )
            for preference in ("native", "xla")
        )  # fmt: skip
        assert relative_error(native, np.asarray(twin, np.float64)) < 5e-6


@pytest.mark.parametrize("fmt", MORE)
def test_lookups(fmt: str, rng: np.random.Generator) -> None:
    for scale, dtype in itertools.product(SCALES[fmt], (jnp.float32, jnp.bfloat16)):
        case = make_case(rng, fmt, 50, 75, block=16, scale=scale)
        indices = rng.integers(0, 50, 33)
        scale_dtype = None if case.scale is None else case.scale.dtype
        lookup = Problem(
            fmt,
            "lookup",
            75,
            16 if STORED[fmt].blocked else None,
            np.dtype(dtype),
            m=33,
            rows=50,
            scale_dtype=scale_dtype,
        )
        ways = list(itertools.product(isas(), THREADS[:2]))

        def program(poison, codes, scale, indices, lookup=lookup, ways=ways):
            del poison
            return [cpu.qgather(lookup, codes, indices, scale, isa=isa, threads=t) for isa, t in ways]

        poison = poisoned(*[((33, 75), dtype)] * len(ways))
        run = jax.jit(program, donate_argnums=0, keep_unused=True)
        exact = jnp.asarray(case.dense[indices].astype(np.float32)).astype(dtype)
        for way, rows in zip(ways, run(poison, case.codes, case.scale, indices), strict=True):
            assert rows.dtype == dtype
            assert relative_error(rows.astype(jnp.float32), exact) <= (1e-7 if dtype == jnp.float32 else 4e-3), way


def test_lookups_are_chosen_and_mapped(rng: np.random.Generator) -> None:
    case = make_case(rng, "nf4", 500, 128)
    indices = rng.integers(-500, 500, (3, 4))

    def look_up(indices, codes=case.codes):
        return qgather(codes, case.scale, indices, fmt="nf4", cols=128)

    with recorder() as events:
        rows = jax.jit(look_up)(indices)
    assert [(e.op, e.name) for e in events] == [("qgather", "native_cpu")]
    assert relative_error(rows, case.dense[indices]) < 1e-7
    assert relative_error(jax.vmap(look_up)(indices), case.dense[indices]) < 1e-7
    tables = np.stack([case.codes, case.codes])
    assert relative_error(jax.vmap(lambda c: look_up(indices, c))(tables)[1], case.dense[indices]) < 1e-7
    outside = look_up(np.array([-501, -500, 499, 10**6]))
    assert relative_error(outside, case.dense[[0, 0, 499, 499]]) < 1e-7


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda t: t.__name__)
def test_codes_and_absmax_equal_those_of_the_codec(dtype, rng: np.random.Generator) -> None:
    """Byte by byte, with blocks of zeros, subnormals, huge values, ties, infinities and NaN among them."""
    special = np.array([0.0, 1e-40, 1e30, 3e38, np.inf, -np.inf, np.nan, -0.0, 2.0**-126, 2.0**-149], np.float32)
    # Blocks of 2, 6 or 64 and columns that need not be a multiple.
    for block, cols in ((2, 7), (6, 100), (64, 64), (64, 333), (128, 1000), (512, 700)):
        x = rng.standard_normal((24, cols)).astype(np.float32)
        x = np.where(rng.random(x.shape) < 0.02, rng.choice(special, x.shape), x)
        x[3:5] = rng.standard_normal((2, cols)) * [[1e-39], [1e36]]
        x[5, : cols // 2] = 0
        x[6] = (codec.THRESHOLDS[rng.integers(0, 15, cols)] * 2).astype(np.float32)
        x[6, ::2] = 2.0
        x[7, 0], x[8, cols - 1] = np.nan, np.inf
        array = jnp.asarray(x).astype(dtype)
        expected = references.nf4_encode(np.asarray(array.astype(jnp.float32)), axis=-1, block_size=block)
        encoding = Problem("nf4", "encode", cols, block, np.dtype(np.uint8), rows=24, x_dtype=np.dtype(dtype))
        ways = list(itertools.product(isas(), THREADS[:2]))

        def program(poison, x, encoding=encoding, ways=ways):
            del poison
            return [cpu.nf4_encode(encoding, x, isa=isa, threads=threads) for isa, threads in ways]

        run = jax.jit(program, donate_argnums=0, keep_unused=True)
        poison = [(jnp.full(c.shape, 255, c.dtype), jnp.full(a.shape, 7e7, a.dtype)) for c, a in [expected] * len(ways)]
        for way, (codes, absmax) in zip(ways, run(poison, array), strict=True):
            np.testing.assert_array_equal(absmax, expected[1], err_msg=f"{block=} {way=}")
            np.testing.assert_array_equal(codes, expected[0], err_msg=f"{block=} {way=}")


def test_the_encoder_is_chosen(rng: np.random.Generator) -> None:
    w = jnp.asarray(rng.standard_normal((40, 130)), jnp.float32)
    jax.clear_caches()
    with recorder() as events:
        packed, absmax = codec.encode(w, axis=-1, block_size=32)
    assert [(e.op, e.name) for e in events] == [("nf4_encode", "native_cpu")]
    codes, scales = references.nf4_encode(np.asarray(w), axis=-1, block_size=32)
    np.testing.assert_array_equal(packed, codes)
    np.testing.assert_array_equal(absmax, scales)
    stack = jnp.stack([w, 2 * w])
    mapped = jax.vmap(lambda w: codec.encode(w, axis=-1, block_size=32))(stack)
    np.testing.assert_array_equal(mapped[0][1], codes)
    np.testing.assert_array_equal(mapped[1][1], 2 * scales)
