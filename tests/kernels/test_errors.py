"""Wrong input is refused before anything is compiled, and the message names what was wrong."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._kernels import qgather, qmatmul, qragged_dot
from eformer.errors import QuantizedGradientError

from .cases import make_case

RNG = np.random.default_rng(7)
NF4 = make_case(RNG, "nf4", 6, 64, block=16)
INT8 = make_case(RNG, "int8", 6, 64)
TERNARY = make_case(RNG, "ternary", 6, 64)
X = np.ones((2, 64), np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fmt": "fp3"}, "'nf4', 'int8', 'ternary', 'binary'"),
        ({"form": "row"}, "'dot', 'axpy'"),
        ({"preference": "fast"}, "'native'"),
        ({"cols": 65}, "blocks"),
        ({"cols": -1}, "cols"),
        ({"block": 32}, "blocks of 16"),
        ({"codes": NF4.codes.astype(np.int8)}, "uint8"),
        ({"codes": NF4.codes[0]}, "rank 3"),
        ({"scale": None}, "scale per block"),
        ({"scale": NF4.scale[:, :2]}, "scale per block"),
        ({"x": X[:, :10]}, "last axis must be 64"),
        ({"form": "axpy"}, "last axis must be 6"),
        ({"codes": NF4.codes[None], "scale": NF4.scale[None]}, "batch axes"),
    ],
)
def test_bad_nf4(changes: dict, message: str) -> None:
    good = {"x": X, "codes": NF4.codes, "scale": NF4.scale, "fmt": "nf4", "form": "dot", "cols": 64}
    with pytest.raises(ValueError, match=message):
        qmatmul(**(good | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": None}, "int8 needs a scale"),
        ({"block": 64}, "no blocks"),
        ({"scale": np.ones((2, 1), np.float32)}, "allowed are"),
        ({"scale": np.ones(6, np.float32)}, "allowed are"),
        ({"codes": INT8.codes.astype(np.uint8)}, "int8"),
        ({"cols": 60}, "60 columns"),
    ],
)
def test_bad_int8(changes: dict, message: str) -> None:
    good = {"x": X, "codes": INT8.codes, "scale": INT8.scale, "fmt": "int8", "form": "dot", "cols": 64}
    with pytest.raises(ValueError, match=message):
        qmatmul(**(good | changes))


def test_integer_scale() -> None:
    with pytest.raises(TypeError, match="floating"):
        qmatmul(X, INT8.codes, np.ones((6, 1), np.int32), fmt="int8", form="dot", cols=64)


@pytest.mark.parametrize("case", [NF4, INT8, TERNARY], ids=lambda c: c.fmt)
def test_gradient_of_the_scale_is_refused(case) -> None:
    with pytest.raises(QuantizedGradientError, match=r"scale of a quantized .*(?s:.*)LoRA(?s:.*)straight_through"):
        jax.grad(lambda s: case.product(X, scale=s).sum())(jnp.asarray(case.scale))
    with pytest.raises(QuantizedGradientError, match="straight_through"):
        jax.jit(jax.grad(lambda s: case.product(X, "dot", scale=s).sum()))(jnp.asarray(case.scale))
    with pytest.raises(QuantizedGradientError, match="straight_through"):
        jax.grad(lambda s: qgather(case.codes, s, np.arange(2), fmt=case.fmt, cols=64).sum())(jnp.asarray(case.scale))


def test_bad_gather() -> None:
    with pytest.raises(TypeError, match="integers"):
        qgather(INT8.codes, INT8.scale, np.ones(2), fmt="int8", cols=64)
    with pytest.raises(ValueError, match="one matrix"):
        qgather(INT8.codes[None], INT8.scale[None], np.arange(2), fmt="int8", cols=64)


def test_bad_groups() -> None:
    call = {"fmt": "int8", "form": "dot", "cols": 64}
    stack = (INT8.codes[None], INT8.scale[None])
    with pytest.raises(ValueError, match="one per expert"):
        qragged_dot(X, *stack, np.array([1, 1]), **call)
    with pytest.raises(ValueError, match="one per expert"):
        qragged_dot(X, *stack, np.array([1.0]), **call)
    with pytest.raises(ValueError, match="experts in front"):
        qragged_dot(X, INT8.codes, INT8.scale, np.array([2]), **call)
