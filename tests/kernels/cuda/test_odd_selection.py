"""Which products of odd sizes are for the kernel of csrc/cuda/odd.cuh, on a machine without a GPU."""

from __future__ import annotations

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._kernels.cuda import _odd, _wide
from eformer._kernels.native import BF16
from eformer._kernels.parameters import Problem

from ..cases import FORMS, make_case, with_offset
from .test_selection import FORMATS, IN_BLOCKS, lowered
from .test_selection import present as present

RNG = np.random.default_rng(6)


@pytest.mark.usefixtures("present")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_matrices_of_odd_sizes(fmt: str, form: str) -> None:
    """Rows of any bytes, any depth: a kernel of their own, up to where decoding first is as quick. In the dot form few
    rows with values of 4 bits are for another one."""
    options: dict[str, Any] = {"block": 96} if fmt in IN_BLOCKS else {"scale": "row" if form == "dot" else "column"}
    case = make_case(RNG, fmt, 301, 205, **options)
    few, many = ("qmatmul" if fmt in IN_BLOCKS else "odd", "dequant") if form == "dot" else ("odd", "odd")
    for m, target in ((1, few), (16, few), (17, "odd"), (128, "odd"), (129, many), (256, many), (257, "dequant")):
        x = jnp.ones((m, 205 if form == "dot" else 301), jnp.bfloat16)
        text = lowered(lambda x: case.product(x, form), x)
        assert re.findall(r"@eformer_cuda_(\w+)", text) == [target], m
        assert ("dot_general" in text) == (target == "dequant")
        assert target != "odd" or f"axpy = {int(form == 'axpy')} : i64" in text


@pytest.mark.usefixtures("present")
def test_what_the_kernel_of_odd_sizes_leaves_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs no odd size, factors for every value, offsets, values of 4 bits with a float32 product, other GPUs."""
    x = jnp.ones((4, 200), jnp.bfloat16)

    def called(case: Any, x: jax.Array = x, **options: Any) -> str:
        (found,) = re.findall(r"@eformer_cuda_(\w+)", lowered(lambda x: case.product(x, **options), x))
        return found

    rows = make_case(RNG, "int8", 301, 200, scale="row")
    assert called(rows) == "odd"
    assert called(make_case(RNG, "int8", 301, 200, scale="column")) == "odd"
    assert called(make_case(RNG, "int8", 301, 200, scale="full")) == "dequant"
    assert called(make_case(RNG, "binary", 301, 256, scale="row"), jnp.ones((4, 256), jnp.bfloat16)) == "qmatmul"
    assert called(make_case(RNG, "int8", 301, 208, scale="row"), jnp.ones((40, 208), jnp.bfloat16)) == "wide"
    assert called(rows, jnp.ones((40, 200), jnp.bfloat16)) == "odd"
    short = make_case(RNG, "nf4", 301, 205, block=32)
    assert called(short, jnp.ones((40, 205), jnp.bfloat16)) == "odd"
    assert called(short, jnp.ones((40, 205), jnp.bfloat16), out_dtype=jnp.float32) == "dequant"
    zero = with_offset(RNG, make_case(RNG, "int4", 301, 205, block=32), "zero")
    assert called(zero, jnp.ones((4, 205), jnp.bfloat16)) == "qmatmul"
    monkeypatch.setattr(_wide, "has_wgmma", lambda: False)
    assert (
        called(make_case(RNG, "int8", 301, 200, scale="row", batch=(2,)), jnp.ones((2, 64, 200), jnp.bfloat16))
        == "qmatmul"
    )
    for m, target in ((8, "qmatmul"), (9, "dequant")):
        assert called(make_case(RNG, "int8", 302, 200, scale="row"), jnp.ones((m, 200), jnp.bfloat16)) == target


def test_odd_sizes_of_large_matrices() -> None:
    """With more than 128 rows of x decoding them first is as quick."""
    shape: Any = {"block": None, "out_dtype": BF16, "x_dtype": BF16, "form": "axpy", "cols": 3001}
    for rows, most in ((2700, 256), (2800, 128)):
        made = Problem("int8", **shape, rows=rows)
        assert max(m for m in range(1, 300) if _odd.takes(made.replace(m=m))) == most


def test_the_cut_of_odd_sizes() -> None:
    assert _odd.cut(1, 1, 3001, 1000) == (16, 4), "the measured best on an H200"
    assert _odd.cut(1, 64, 2880, 2880) == (64, 5)
    assert _odd.cut(1, 256, 2880, 2880) == (128, 2)
    for batch, m, outs, deep in itertools.product((1, 3), (1, 16, 17, 64, 65, 300), (1, 3001), (1, 1000, 14336)):
        width, splits = _odd.cut(batch, m, outs, deep)
        assert width in _odd.COSTS
        assert width >= min(m, max(_odd.COSTS))
        assert 1 <= splits <= min(_odd.MOST_SPLITS, -(-deep // _odd.DEEP))
