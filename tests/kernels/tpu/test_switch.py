"""`nf4_use_kernel` and `is_kernel_available`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._kernels import explain
from eformer.ops.quantization import is_kernel_available, nf4_use_kernel

from ..cases import make_case
from .calls import kernels_in, lowered, problem

RNG = np.random.default_rng(5)
X = jax.ShapeDtypeStruct((2, 512), jnp.float32)


def name(case) -> str:
    return explain(problem(case, "dot", X)).name


def test_turns_kernels_of_nf4_off_and_on_again() -> None:
    nf4, int8 = (make_case(RNG, fmt, 256, 512) for fmt in ("nf4", "int8"))
    with nf4_use_kernel(False):
        assert (name(nf4), name(int8)) == ("xla", "pallas_tpu")
        assert "nf4_use_kernel" in dict(explain(problem(nf4, "dot", X)).rejected)["pallas_tpu"]
        with nf4_use_kernel(True):
            assert name(nf4) == "pallas_tpu"
        assert name(nf4) == "xla"
    assert name(nf4) == "pallas_tpu"


def test_reaches_the_program() -> None:
    case = make_case(RNG, "nf4", 256, 512)
    for value in (True, False, True):
        with nf4_use_kernel(value):
            assert kernels_in(lowered(lambda x: case.product(x), X)) == value


def test_survives_an_exception() -> None:
    case = make_case(RNG, "nf4", 256, 512)
    with pytest.raises(KeyError), nf4_use_kernel(False):
        raise KeyError
    assert name(case) == "pallas_tpu"
    with pytest.raises(TypeError, match="True or False"), nf4_use_kernel(1):  # pyright: ignore[reportArgumentType]
        pass


def test_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    for fmt in ("nf4", "int8", "ternary", "binary"):
        assert is_kernel_available(fmt)
    with nf4_use_kernel(False):
        assert is_kernel_available()  # there is one, even if it is not used here
    monkeypatch.setenv("EFORMER_KERNELS", "0")
    assert not is_kernel_available()
    with pytest.raises(ValueError, match="int7"):
        is_kernel_available("int7")
