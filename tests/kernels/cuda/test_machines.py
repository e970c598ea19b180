"""What the kernels leave to XLA because of the GPU, or because the library would refuse it when the program runs."""

from __future__ import annotations

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._kernels import backends, cuda, explain
from eformer._kernels.cuda import tuning, ways
from eformer._kernels.native import BF16, F32
from eformer._kernels.parameters import Problem, product_problem

from ..cases import make_case
from .test_selection import FORMATS, IN_BLOCKS, lowered
from .test_selection import present as present

PRODUCT = Problem("nf4", "dot", 4096, 64, BF16, platform="cuda", rows=4096, x_dtype=BF16, scale_dtype=F32)


def on(monkeypatch: pytest.MonkeyPatch, capability: str) -> None:
    monkeypatch.setattr(tuning, "capability", lambda: capability)
    monkeypatch.setattr(ways._wide, "capability", lambda: capability)
    monkeypatch.setattr(ways, "capability", lambda: capability)


@pytest.mark.usefixtures("present")
@pytest.mark.parametrize("capability", ["7.5", ""])
def test_older_gpus_have_no_kernels(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library has no code for them, so that a launch would fail."""
    on(monkeypatch, capability)
    rounded = PRODUCT.replace(fmt="int8", block=None, activations="int8", scale_shape=(4096, 1))
    whys = [
        cuda.refuses_product(PRODUCT),
        cuda.refuses_product(PRODUCT.replace(m=1000)),
        cuda.refuses_gather(PRODUCT.replace(form="lookup")),
        cuda.refuses_ragged(PRODUCT.replace(batch=(4,), m=6)),
        cuda.refuses_rounded_in_stack(rounded.replace(m=40)),
    ]
    assert whys == [f"compute capability {capability}; it has kernels from 8.0 on"] * len(whys)
    monkeypatch.setattr(jax, "local_devices", lambda backend: [None])
    monkeypatch.setattr(backends.native, "load", lambda library: cuda.loaded())
    assert backends._state("cuda", cuda.LIBRARY)["state"] == whys[0]


def most_rows(fmt: str, **how: Any) -> int:
    """Up to which the kernels of few rows take a product."""
    made = PRODUCT.replace(fmt=fmt, block=64 if fmt in IN_BLOCKS else None, **how)
    return next((m - 1 for m in range(1, 66) if "few" not in ways.possible(made.replace(m=m))), 65)


def test_shared_memory_decides_how_many_rows_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """As counted in csrc/cuda/dot.cuh, which refuses more when the program runs."""
    for capability in ("8.0", "9.0", "10.0"):
        on(monkeypatch, capability)
        assert {fmt: most_rows(fmt) for fmt in FORMATS} == dict.fromkeys(FORMATS, 64)
    zero = np.dtype(np.uint8)
    for capability in ("8.6", "8.9", "12.0"):
        on(monkeypatch, capability)
        assert [most_rows(fmt) for fmt in ("nf4", "int4", "fp4", "ternary", "binary")] == [6, 6, 6, 14, 7]
        assert [most_rows(fmt) for fmt in ("int8", "fp8_e4m3", "fp8_e5m2")] == [64] * 3
        assert most_rows("int4", offset=zero) == 5
        assert most_rows("nf4", x_dtype=F32) == 3  # two rows for each
        groups = PRODUCT.replace(batch=(4,), m=6)
        assert cuda._refuses_groups(groups) is None
        assert "101376 bytes" in str(cuda._refuses_groups(groups.replace(m=7)))


@pytest.mark.usefixtures("present")
def test_rows_without_room_are_decoded_first(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "8.9")
    case = make_case(np.random.default_rng(3), "nf4", 256, 512)
    for m, target in ((6, "qmatmul"), (7, "dequant")):
        assert f"@eformer_cuda_{target}" in lowered(case.product, jnp.ones((m, 512), jnp.bfloat16))


@pytest.mark.usefixtures("present")
def test_scales_of_long_rows_have_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows of bytes in blocks have one kernel, which has the scales of 16 stored rows in shared memory."""
    long = PRODUCT.replace(fmt="fp8_e4m3_block", cols=151936, block=32, m=4)
    for cols, fits in ((65536, True), (151936, False)):
        assert ("few" in ways.possible(long.replace(cols=cols))) == fits
    assert "few" in ways.possible(long.replace(block=128, cols=151552))
    assert "no kernel for fp8_e4m3_block with 16 rows or fewer" in str(cuda.refuses_product(long))
    offsets: Any = {"fmt": "int8_block", "offset": F32}
    assert [("few" in ways.possible(long.replace(cols=cols, **offsets))) for cols in (32768, 65536)] == [True, False]
    on(monkeypatch, "12.0")
    assert [("few" in ways.possible(long.replace(cols=cols))) for cols in (8192, 14336)] == [True, False]


@pytest.mark.usefixtures("present")
def test_batches_of_more_matrices_than_a_launch_takes() -> None:
    small = PRODUCT.replace(rows=64, cols=64, m=2)
    for refuses in (cuda.refuses_product, cuda.refuses_ragged):
        assert refuses(small.replace(batch=(65534,))) is None
        assert refuses(small.replace(batch=(65535,))) == "65535 matrices at once; it takes up to 65534"
    assert cuda.refuses_product(small.replace(batch=(256, 256))) is not None
    assert cuda._refuses_batch(small.replace(batch=jax.export.symbolic_shape("b"))) is None  # in an exported program
    x, codes, scale = (jax.ShapeDtypeStruct(s, t) for s, t in zip(
        ((65536, 2, 64), (65536, 64, 1, 32), (65536, 64, 1)), (jnp.bfloat16, jnp.uint8, jnp.float32), strict=True,
    ))  # fmt: skip
    assert explain(product_problem(x, codes, scale, "cuda", fmt="nf4", form="dot", cols=64)).name == "xla_batch"
