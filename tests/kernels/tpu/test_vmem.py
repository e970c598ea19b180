"""No choice of blocks takes more VMEM than there is, and all are ones Mosaic can tile."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from eformer._kernels.parameters import Problem
from eformer._kernels.tpu import tuning
from eformer._kernels.tpu._matmul import height_of

ROWS = (1, 100, 128, 500, 4096, 5000, 128256)
COLS = (64, 1000, 4096, 14336, 53248)
BLOCKS = {
    "nf4": (64, 128, 192, 256, 576, 1024, 4096),
    "int4": (16, 32, 64),
    "fp8_e4m3_block": (16, 32, 128, 4096),
    "int2": (16, 64, 128),
}
BYTES = np.dtype(np.uint8)
M = (1, 16, 33, 256, 500, 4096)


def problems():
    formats = [(fmt, None) for fmt in ("int8", "ternary", "binary")]
    formats += [(fmt, block) for fmt, blocks in BLOCKS.items() for block in blocks]
    dtypes = [np.dtype(t) for t in (jnp.float32, jnp.bfloat16)]
    for (fmt, block), form, rows, cols, m, dtype in itertools.product(formats, ("dot", "axpy"), ROWS, COLS, M, dtypes):
        offset = BYTES if fmt == "int4" else None
        yield Problem(fmt, form, cols, block, dtype, offset=offset, platform="tpu", m=m, rows=rows, x_dtype=dtype)


def test_every_choice_fits_and_can_be_tiled() -> None:
    chosen = set()
    for problem in problems():
        g = tuning.geometry(problem, problem.m)
        used = tuning.vmem_bytes(g, problem.form, problem.x_dtype, problem.out_dtype)
        assert used <= tuning.VMEM_BUDGET, (problem, g, used)
        assert g.bm == g.m or g.bm % 16 == 0
        assert g.br == g.rows or g.br % 128 == 0
        if problem.block:
            scales = g.units // g.units_per_scale
            assert g.bu % 8 == 0
            assert g.scale_rows * g.units_per_scale == g.bu or g.units_per_scale % g.bu == 0
            assert g.scale_block % 8 == 0 or g.scale_block == scales
            assert g.scales_in_tiles or scales % g.scale_rows == 0
            assert g.numbers == 1 + (problem.fmt == "int4")
        else:
            assert g.bu == g.units or g.bu % 128 == 0
        chosen.add((g.bm, g.br))
    assert len(chosen) > 10


def test_the_budget_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem("nf4", "dot", 4096, 64, np.dtype(np.float32), platform="tpu", m=2048, rows=4096)
    large = tuning.geometry(problem, 2048)
    monkeypatch.setattr(tuning, "VMEM_BUDGET", 4 << 20)
    small = tuning.geometry(problem, 2048)
    assert tuning.vmem_bytes(small, "dot", problem.x_dtype, problem.x_dtype) <= 4 << 20
    assert small.bm * small.br < large.bm * large.br


def test_a_block_is_counted_by_hand() -> None:
    """bfloat16, 16 rows of x, 512 rows of D, 2048 columns of nf4: 256 words of 8 values."""
    g = tuning.Geometry("nf4", 16, 4096, 512, 16, 512, 256, 64)
    bfloat16 = np.dtype(jnp.bfloat16)
    blocks = 8 * 16 * 256 * 2 + 1024 * 512 + 32 * 512 * 4 + 16 * 512 * 2
    decoding = 4 * 256 * 512 * 4 + 256 * 512 * 2
    assert tuning.vmem_bytes(g, "dot", bfloat16, bfloat16) == 2 * blocks + 16 * 512 * 4 + decoding
    assert tuning.padded((1, 1), np.float32) == 8 * 128 * 4
    assert tuning.padded((3, 17, 130), jnp.bfloat16) == 3 * 32 * 256 * 2


@pytest.mark.parametrize(("m", "groups", "height"), [(1, 8, 16), (64, 8, 16), (1000, 8, 128), (9000, 8, 256)])
def test_tiles_of_groups(m: int, groups: int, height: int) -> None:
    assert height_of(m, groups) == height
