"""Products on a GPU without the library of kernels, against float64. Runs with EFORMER_TEST_PLATFORM=cuda."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ..cases import FORMATS, FORMS, SCALES, make_case

pytestmark = pytest.mark.gpu

# Rows, columns, NF4 block, M: the sums, the borders between ways of computing, everything ragged.
SIZES = (
    (512, 1024, 64, 1), (513, 1000, 32, 1), (96, 2048, 128, 2), (301, 777, 64, 3), (512, 512, 64, 4), (64, 4100, 96, 5),
    (257, 515, 64, 16), (1024, 1024, 64, 16), (130, 640, 64, 33), (96, 512, 64, 256), (200, 300, 50, 257),
)  # fmt: skip
# Relative error in the norm: 16-bit operands and results; float32 by way of TF32.
LIMITS = {jnp.bfloat16: 3.5e-3, jnp.float16: 2e-3, jnp.float32: 1e-3}


def error(found: Any, expected: np.ndarray) -> float:
    found = np.asarray(found, np.float64)
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_products(fmt: str, form: str) -> None:
    rng = np.random.default_rng(FORMATS.index(fmt) + 10 * (form == "axpy"))
    scales, dtypes = itertools.cycle(SCALES[fmt]), itertools.cycle(LIMITS)
    made = []
    for rows, cols, block, m in SIZES:
        options: dict[str, Any] = {"block": block} if fmt == "nf4" else {"scale": next(scales)}
        case = make_case(rng, fmt, rows, cols, **options)
        made.append((case, jnp.asarray(rng.standard_normal((m, cols if form == "dot" else rows)), next(dtypes))))

    def program(xs: list[Any], stored: list[Any]) -> list[Any]:
        return [
            case.product(x, form, codes=codes, scale=scale, preference="xla")
            for (case, _), x, (codes, scale) in zip(made, xs, stored, strict=True)
        ]

    stored = [(jnp.asarray(case.codes), case.scale) for case, _ in made]
    lowered = jax.jit(program).lower([x for _, x in made], stored)
    assert "while" not in lowered.as_text()
    ys = lowered.compile()([x for _, x in made], stored)
    for (case, x), y in zip(made, ys, strict=True):
        assert error(y, case.expected(x, form)) <= LIMITS[x.dtype.type], (case.dense.shape, x.shape, x.dtype)


@pytest.mark.parametrize("fmt", FORMATS)
def test_few_rows_store_no_matrix(fmt: str) -> None:
    case = make_case(np.random.default_rng(30), fmt, 4096, 4096)
    for m in (1, 2) if fmt != "int8" else (1, 16):
        x = jnp.ones((m, 4096), jnp.bfloat16)
        lowered = jax.jit(lambda x, c, s: case.product(x, codes=c, scale=s, preference="xla")).lower(
            x, jnp.asarray(case.codes), jnp.asarray(case.scale)
        )
        memory = lowered.compile().memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < case.codes.nbytes / 4


def test_gradient_and_batch() -> None:
    rng = np.random.default_rng(31)
    case = make_case(rng, "nf4", 256, 512)
    x = jnp.asarray(rng.standard_normal((1, 512)), jnp.float32)
    gradient = jax.jit(jax.grad(lambda x: (case.product(x, preference="xla") ** 2).sum()))(x)
    assert error(gradient, 2 * case.expected(x) @ case.dense) <= 1e-3
    stack = make_case(rng, "nf4", 128, 256, batch=(3,))
    xs = jnp.asarray(rng.standard_normal((3, 6, 256)), jnp.bfloat16)
    assert error(jax.jit(lambda xs: stack.product(xs, preference="xla"))(xs), stack.expected(xs)) <= 3.5e-3
