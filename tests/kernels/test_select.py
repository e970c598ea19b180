"""Which implementation is chosen, what is said about it, and that the choice has an effect."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer._kernels import explain
from eformer._kernels.matmul import PRODUCT, TINY
from eformer._kernels.parameters import product_problem
from eformer._kernels.select import Candidate
from eformer._record import recorder

from .cases import make_case

RNG = np.random.default_rng(3)
SMALL, LARGE = make_case(RNG, "nf4", 32, 64), make_case(RNG, "nf4", 512, 512)


@pytest.fixture(autouse=True)
def without_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this file asserts does not depend on whether there was a compiler; native/ has the tests with kernels."""
    monkeypatch.setenv("EFORMER_KERNELS", "0")


def problem(case, m: int = 2, preference: str = "auto"):
    x, options = jax.ShapeDtypeStruct((m, case.cols), jnp.float32), {"form": "dot", "preference": preference}
    return product_problem(x, case.codes, case.scale, "cpu", fmt="nf4", cols=case.cols, **options)


def test_sizes_decide() -> None:
    assert explain(problem(SMALL)).name == "reference"
    assert explain(problem(LARGE)).name == "xla"


@pytest.mark.parametrize("preference", ["xla", "reference"])
def test_preference_decides(preference: str) -> None:
    for case in (SMALL, LARGE):
        choice = explain(problem(case, preference=preference))
        assert choice.name == preference
        assert preference in choice.reason


def test_rejections_have_reasons() -> None:
    rejected = dict(explain(problem(LARGE)).rejected)
    assert "EFORMER_KERNELS" in rejected["native_cpu"]
    assert f"{TINY} values" in rejected["reference"]
    assert "ranked after reference" in dict(explain(problem(SMALL)).rejected)["xla"]
    assert "not native_cpu: native kernels are turned off" in str(explain(problem(LARGE)))


def test_preference_native_falls_back() -> None:
    assert explain(problem(LARGE, preference="native")).name == "xla"


def test_a_kernel_is_one_more_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def supports(p):
        return None if p.m == 1 else f"only M = 1, not {p.m}"

    def run(p, x, codes, scale):
        return jnp.full((p.m, p.rows), 42.0, p.out_dtype)

    monkeypatch.setattr(PRODUCT, "candidates", (Candidate("answer", "native", supports, run), *PRODUCT.candidates))
    monkeypatch.setenv("EFORMER_KERNELS", "1")
    assert explain(problem(LARGE, m=1)).name == "answer"
    assert dict(explain(problem(LARGE, m=2)).rejected)["answer"] == "only M = 1, not 2"
    monkeypatch.setenv("EFORMER_KERNELS", "0")
    assert "EFORMER_KERNELS" in dict(explain(problem(LARGE, m=1)).rejected)["answer"]
    monkeypatch.setenv("EFORMER_KERNELS", "1")
    x = jax.ShapeDtypeStruct((1, 512), jnp.float32)
    text = str(jax.make_jaxpr(lambda x: PRODUCT.compute(problem(LARGE, m=1), x, LARGE.codes, LARGE.scale))(x))
    assert "42.0" in text


def test_events() -> None:
    """One note per product asked for, eager or traced, and one more for its backward pass."""
    x = jnp.ones((2, 512))
    with recorder() as events:
        LARGE.product(x)
        LARGE.product(x)
    assert [(e.kind, e.name, e.problem.m) for e in events] == [("kernel", "xla", 2)] * 2
    with recorder() as events:
        jax.make_jaxpr(LARGE.product)(x)
    assert [e.name for e in events] == ["xla"]
    with recorder() as events:
        jax.make_jaxpr(jax.grad(lambda x: LARGE.product(x).sum()))(x)
    assert [e.problem.form for e in events] == ["dot", "axpy"]
    with recorder() as events:
        jax.vmap(lambda x: LARGE.product(x))(x)
    assert [e.problem.m for e in events] == [1]


def test_problems_are_hashable_and_frozen() -> None:
    one = problem(LARGE)
    assert hash(one) == hash(problem(LARGE))
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.m = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_the_chosen_path_is_the_one_compiled() -> None:
    x = jnp.ones((2, 512))
    loops = {
        preference: "while" in jax.jit(lambda x, p=preference: make_tall().product(x, preference=p)).lower(x).as_text()
        for preference in ("xla", "reference")
    }
    assert loops == {"xla": True, "reference": False}


def make_tall():
    return make_case(RNG, "int8", 8192, 512)
