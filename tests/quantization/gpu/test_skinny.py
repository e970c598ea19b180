"""Few rows of x: which kernel takes them, and that of csrc/cuda/skinny.cuh, which the table does not name yet."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.ops.quantization._kernels.cuda import _calls, tuning

from ..kernel_cases import FORMATS, make_case
from .test_selection import lowered
from .test_selection import present as present

# Matrices, rows, columns, M. It takes whole chunks of columns and at least 16 rows; others compute the rest.
SIZES = (
    (1, 130, 1024, 1), (1, 208, 4096, 8), (2, 50, 768, 5), (1, 16, 1024, 2), (1, 500, 256, 3), (1, 33, 14336, 1),
    (3, 400, 512, 6), (1, 4096, 2048, 7), (1, 40, 1000, 4), (1, 64, 512, 16),
)  # fmt: skip
BLOCKS = (64, 64, 64, 128, 64, 64, 64, 256, 64, 64)


def test_the_table_can_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "generation", lambda: dataclasses.replace(tuning.TABLE["9.0"], skinny_m=8))
    found = {m: tuning.cut.__wrapped__("nf4", 1, m, 14336, 4096) for m in (1, 8, 9)}
    assert found[1] == found[8] == (0, 1)
    assert found[9][0] >= 1


@pytest.mark.usefixtures("present")
def test_the_wide_kernel_begins_above_sixteen_rows() -> None:
    case = make_case(np.random.default_rng(1), "binary", 256, 512, scale="row")
    assert "@eformer_cuda_qmatmul" in lowered(case.product, jnp.ones((16, 512), jnp.bfloat16))
    assert "@eformer_cuda_wide" in lowered(case.product, jnp.ones((17, 512), jnp.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
def test_products(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_calls, "cut", lambda *sizes: (0, 1))
    jax.clear_caches()
    rng = np.random.default_rng(50 + FORMATS.index(fmt))
    made, xs = [], []
    for i, (count, rows, cols, m) in enumerate(SIZES):
        options: dict[str, Any] = {"block": BLOCKS[i]} if fmt == "nf4" else {"scale": "row"}
        dtype = (np.float32, jnp.bfloat16)[i % 2]
        batch = (count,) if count > 1 else ()
        made.append(make_case(rng, fmt, rows, cols, batch=batch, scale_dtype=dtype, **options))
        kind = (jnp.bfloat16, jnp.float16, jnp.float32)[i % 3]
        xs.append(jnp.asarray(rng.standard_normal((*batch, m, cols)), kind))
    storage = [(jnp.asarray(case.codes), case.scale) for case in made]
    program = jax.jit(
        lambda xs, storage: [
            case.product(x, "dot", codes=codes, scale=scale)
            for case, x, (codes, scale) in zip(made, xs, storage, strict=True)
        ]
    )
    for case, x, y, size in zip(made, xs, program(xs, storage), SIZES, strict=True):
        expected = case.expected(np.asarray(x, np.float64))
        found = np.asarray(y, np.float64)
        assert np.linalg.norm(found - expected) / np.linalg.norm(expected) <= 3e-3, size
    jax.clear_caches()
