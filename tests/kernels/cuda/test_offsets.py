"""Offsets and blocks of bytes in every CUDA kernel, against float64. Runs with EFORMER_TEST_PLATFORM=cuda."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eformer as ef
from eformer._kernels import qgather, qragged_dot
from eformer._kernels.cuda import _wide, tuning

from ..cases import FORMS, INTEGERS, OFFSETS, Case, make_case, with_offset
from .test_gpu_kernels import chosen, error
from .test_gpu_kernels import library as library
from .test_selection import lowered

pytestmark = pytest.mark.gpu

# Relative error in the norm: 16-bit operands and results; float32 in two parts, or TF32 behind a decoded matrix.
LIMITS = {jnp.bfloat16: 3e-3, jnp.float16: 3e-3, jnp.float32: 1e-3}
# Rows, columns, block, M, and what takes the bfloat16 product in the dot form: whole stages and blocks; ragged ones.
SIZES = (
    (128, 4096, 64, 1, "qmatmul"), (130, 1024, 128, 8, "qmatmul"), (136, 2048, 32, 16, "qmatmul"),
    (301, 776, 64, 9, "qmatmul"), (257, 2056, 96, 16, "qmatmul"), (72, 520, 64, 2, "qmatmul"),
    (520, 1152, 64, 17, "wide"), (200, 2176, 128, 100, "wide"), (136, 640, 256, 129, "wide"),
    (640, 1280, 64, 300, "wide"), (104, 200, 16, 40, "dequant"), (256, 512, 64, 5000, "dequant"),
)  # fmt: skip
SCALES = (np.float32, jnp.bfloat16, np.float16)
BIASES = (np.float32, np.float16, jnp.bfloat16)


def cases(rng: np.random.Generator, kind: str) -> list[Case]:
    made = []
    for i, (rows, cols, block, *_) in enumerate(SIZES):
        case = make_case(rng, "int4", rows, cols, block=block, scale_dtype=SCALES[i % 3])
        made.append(with_offset(rng, case, kind, BIASES[i % 3]))
    return made


def targets(function: Any, *args: Any) -> list[str]:
    return re.findall(r"@eformer_cuda_(\w+)", lowered(function, *args))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", OFFSETS)
def test_products(kind: str, form: str) -> None:
    """x of both signs and positive ones, whose sums the offsets multiply."""
    rng = np.random.default_rng(60 + OFFSETS.index(kind) + 2 * FORMS.index(form))
    made = cases(rng, kind)
    for dtype, out in ((jnp.bfloat16, None), (jnp.float16, None), (jnp.float32, None), (jnp.bfloat16, jnp.float32)):
        xs = []
        for i, (rows, cols, _, m, _) in enumerate(SIZES):
            x = rng.standard_normal((m, cols if form == "dot" else rows)) / 8
            xs.append(jnp.asarray(np.abs(x) if i % 2 else x, dtype))

        def program(xs: list[Any], given: list[Any], out: Any = out) -> list[Any]:
            how: Any = {"form": form, "out_dtype": out}
            return [
                case.product(x, codes=codes, scale=scale, offset=offset, **how)
                for case, x, (codes, scale, offset) in zip(made, xs, given, strict=True)
            ]

        given = [[jnp.asarray(array) for array in (case.codes, case.scale, case.offset)] for case in made]
        if dtype == jnp.bfloat16 and out is None and form == "dot":
            assert targets(program, xs, given) == [way for *_, way in SIZES]
        for case, x, y, size in zip(made, xs, jax.jit(program)(xs, given), SIZES, strict=True):
            assert y.dtype == (out or dtype)
            bound = 1e-3 if jnp.float32 in (out, dtype) else LIMITS[dtype]
            assert error(y, case.expected(x, form)) <= bound, (dtype, out, size)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", tuning.BYTE_BLOCKS)
def test_bytes_in_blocks(fmt: str, form: str) -> None:
    rng = np.random.default_rng(70 + tuning.BYTE_BLOCKS.index(fmt) + 2 * FORMS.index(form))
    sizes = (
        (776, 2304, 128, 17),
        (520, 1000, 64, 40),
        (264, 4096, 32, 130),
        (640, 1280, 96, 300),
        (136, 1024, 128, 64),
    )
    for rows, cols, block, m in sizes:
        case = make_case(rng, fmt, rows, cols, block=block, scale_dtype=(np.float32, jnp.bfloat16)[m % 2])
        x = jnp.asarray(np.abs(rng.standard_normal((m, cols if form == "dot" else rows))), jnp.bfloat16)
        run = jax.jit(functools.partial(case.product, form=form))
        assert targets(run, x) == ["wide"]
        assert error(run(x), case.expected(x, form)) <= LIMITS[jnp.bfloat16], (rows, cols, block, m)
    if form == "axpy":
        few = jnp.asarray(rng.standard_normal((1, 136)), jnp.bfloat16)
        assert targets(functools.partial(case.product, form=form), few) == ["wide"]
        assert error(case.product(few, form), case.expected(few, form)) <= LIMITS[jnp.bfloat16]


@pytest.mark.parametrize("kind", [*OFFSETS, *tuning.BYTE_BLOCKS])
def test_every_cut_of_the_wide_kernel(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(80)
    fmt = "int4" if kind in OFFSETS else kind
    case = make_case(rng, fmt, 648, 2432)
    case = with_offset(rng, case, kind) if kind in OFFSETS else case
    for form in FORMS:
        x = jnp.asarray(rng.standard_normal((75, 2432 if form == "dot" else 648)), jnp.bfloat16)
        expected = case.expected(x, form)
        tiles = _wide.costs_of(_wide.Kind(fmt, form, shifted=kind in OFFSETS))
        for (width, outs), splits in itertools.product(tiles, (1, 3)):
            monkeypatch.setattr(_wide, "cut", functools.partial(chosen, _wide.Cut(width, outs, splits)))
            jax.clear_caches()  # equal products share a program
            y = jax.jit(functools.partial(case.product, form=form))(x)
            assert error(y, expected) <= LIMITS[jnp.bfloat16], (form, width, outs, splits)
    jax.clear_caches()


@pytest.mark.parametrize("kind", OFFSETS)
def test_every_integer_groups_and_lookups(kind: str) -> None:
    """Other integers are decoded first, or (bytes) multiplied by the kernel for few rows; rows are looked up."""
    rng = np.random.default_rng(90 + OFFSETS.index(kind))
    for fmt, m in itertools.product(INTEGERS, (3, 40)):
        case = with_offset(rng, make_case(rng, fmt, 136, 1024, block=128), kind)
        x = jnp.asarray(np.abs(rng.standard_normal((m, 1024))), jnp.bfloat16)
        assert error(jax.jit(case.product)(x), case.expected(x)) <= LIMITS[jnp.bfloat16], (fmt, m)
        at = jnp.asarray(rng.integers(0, 136, 33))
        look = jax.jit(functools.partial(qgather, fmt=fmt, cols=1024, offset=case.offset, dtype=jnp.float32))
        assert targets(look, case.codes, case.scale, at) == ["gather"]
        assert error(look(case.codes, case.scale, at), case.dense[np.asarray(at)]) <= 1e-6
    experts = with_offset(rng, make_case(rng, "int4", 80, 320, batch=(5,)), kind)
    sizes, x = np.array([3, 0, 20, 1, 5]), jnp.asarray(np.abs(rng.standard_normal((32, 320))), jnp.bfloat16)
    run = jax.jit(functools.partial(qragged_dot, fmt="int4", form="dot", cols=320, offset=jnp.asarray(experts.offset)))
    assert targets(run, x, experts.codes, experts.scale, sizes) == ["ragged"]
    y = run(x, experts.codes, experts.scale, sizes)
    owner = np.repeat(np.arange(5), sizes)
    expected = np.einsum("mk,mrk->mr", np.asarray(x[:29], np.float64), experts.dense[owner])
    assert error(y[:29], expected) <= LIMITS[jnp.bfloat16]
    assert not np.asarray(y[29:], np.float32).any()


@pytest.mark.parametrize("m", [1, 40, 1500])
def test_scanned_layers(m: int) -> None:
    """The offsets of a layer are read in their stack."""
    rng = np.random.default_rng(100)
    w = jnp.asarray(rng.uniform(0, 0.1, (3, 512, 512)), jnp.bfloat16)
    layers = [ef.quantize(one, dtype="int4", symmetric=False) for one in w]
    stack = jax.tree.map(lambda *parts: jnp.stack(parts), *layers)
    x = jnp.asarray(rng.standard_normal((m, 512)), jnp.bfloat16)
    scanned = jax.jit(ef.implicit(lambda x, w: jax.lax.scan(lambda c, w: (c, c @ w), x, w)[1]))
    text = lowered(scanned, x, stack)
    assert re.findall(r"@eformer_cuda_(\w+)", text) == [{1: "qmatmul", 40: "wide", 1500: "dequant"}[m]]
    assert re.search(r"custom_call @eformer_cuda_.*tensor<3x512x8xui8>", text)
    dense = np.stack([np.asarray(q.replaced(dtype=jnp.float32).materialize(), np.float64) for q in layers])
    assert error(scanned(x, stack), np.asarray(x, np.float64) @ dense) <= LIMITS[jnp.bfloat16]


@pytest.mark.parametrize("kind", OFFSETS)
def test_infinities(kind: str) -> None:
    """As in the dense product, in the kernels for few rows of whole chunks of columns and for many rows."""
    rng = np.random.default_rng(110)
    case = with_offset(rng, make_case(rng, "int4", 320, 1024), kind)
    x = rng.standard_normal((40, 1024))
    x[0, 17], x[1, 300], x[2, 5] = np.inf, -np.inf, np.nan
    with np.errstate(invalid="ignore"):
        expected = case.expected(x)
    for m in (3, 8, 12, 40):
        y = np.asarray(jax.jit(case.product)(jnp.asarray(x[:m], jnp.bfloat16)), np.float64)
        np.testing.assert_array_equal(y[:3], expected[:3])
        assert np.isfinite(y[3:]).all()
