"""Few rows of x: which kernel takes them, and that of csrc/cuda/skinny.cuh against the dense product."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._kernels import cuda
from eformer._kernels.cuda import _wide, tuning

from ..cases import make_case
from .test_selection import FORMATS, IN_BLOCKS, lowered
from .test_selection import present as present

# Matrices, rows, columns, M. It takes whole chunks of columns and at least 16 rows; others compute the rest.
SIZES = (
    (1, 130, 1024, 1), (1, 208, 4096, 8), (2, 50, 768, 5), (1, 16, 1024, 2), (1, 500, 256, 3), (1, 33, 14336, 1),
    (3, 400, 512, 6), (1, 4096, 2048, 7), (1, 40, 1000, 4), (1, 64, 512, 16), (1, 600, 8192, 1), (2, 72, 4096, 11),
    (1, 48, 8192, 8), (1, 2200, 4096, 16), (1, 150, 5120, 9), (1, 4500, 4096, 2),
    (1, 1000, 2048, 3), (1, 100, 4096, 4), (1, 4200, 7168, 13),
)  # fmt: skip
BLOCKS = (64, 64, 64, 128, 64, 64, 64, 256, 64, 64, 128, 64, 64, 64, 512, 64, 64, 256, 128)


def test_the_table_says_who_takes_few_rows() -> None:
    most = {fmt: max(m for m in range(1, 65) if tuning.is_skinny(fmt, m, 4096)) for fmt in FORMATS}
    assert set(most.values()) == {16}
    assert not tuning.is_skinny("nf4", 1, 1000)


@pytest.mark.usefixtures("present")
def test_which_kernel_is_called() -> None:
    rng = np.random.default_rng(1)
    case = make_case(rng, "binary", 256, 512, scale="row")
    assert "tiles = 0" in lowered(case.product, jnp.ones((16, 512), jnp.bfloat16))
    assert "@eformer_cuda_wide" in lowered(case.product, jnp.ones((17, 512), jnp.bfloat16))
    small = make_case(rng, "int8", 256, 512, scale="row")
    assert "tiles = 0" in lowered(small.product, jnp.ones((8, 512), jnp.bfloat16))
    assert "@eformer_cuda_wide" in lowered(small.product, jnp.ones((9, 512), jnp.bfloat16))
    odd = make_case(rng, "nf4", 256, 576)
    text = lowered(odd.product, jnp.ones((8, 576), jnp.bfloat16))
    assert "@eformer_cuda_qmatmul" in text
    assert "tiles = 0" not in text


def program(fmt: str, rng: np.random.Generator, offset: float) -> tuple[list[Any], list[Any], Any]:
    made, xs = [], []
    for i, (count, rows, cols, m) in enumerate(SIZES):
        options: dict[str, Any] = {"block": BLOCKS[i]} if fmt in IN_BLOCKS else {"scale": "row"}
        dtype = (np.float32, jnp.bfloat16)[i % 2]
        batch = (count,) if count > 1 else ()
        made.append(make_case(rng, fmt, rows, cols, batch=batch, scale_dtype=dtype, **options))
        kind = (jnp.bfloat16, jnp.float16, jnp.float32)[i % 3]
        size = 1e-4 if fmt == "fp8_e5m2" else 1.0  # results that float16 holds
        xs.append(jnp.asarray(size * rng.standard_normal((*batch, m, cols)) + offset, kind))
    storage = [(jnp.asarray(case.codes), case.scale) for case in made]
    run = jax.jit(
        lambda xs, storage: [
            case.product(x, "dot", codes=codes, scale=scale)
            for case, x, (codes, scale) in zip(made, xs, storage, strict=True)
        ]
    )
    return made, xs, run(xs, storage)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
def test_products(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is added to ternary and binary weights has to cancel, also with an x that is all positive."""
    monkeypatch.setattr(cuda, "is_skinny", lambda *sizes: True)
    monkeypatch.setattr(_wide, "takes", lambda problem: False)
    rng = np.random.default_rng(50 + FORMATS.index(fmt))
    for offset in (0.0, 3.0) if fmt in ("ternary", "binary") else (0.0,):
        jax.clear_caches()
        made, xs, ys = program(fmt, rng, offset)
        for case, x, y, size in zip(made, xs, ys, SIZES, strict=True):
            expected = case.expected(np.asarray(x, np.float64))
            found = np.asarray(y, np.float64)
            assert np.linalg.norm(found - expected) / np.linalg.norm(expected) <= 3e-3, (offset, size)
    jax.clear_caches()
