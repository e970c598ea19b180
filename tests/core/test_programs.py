"""Random programs give on implicit arrays what they give on the dense ones."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from eformer.jaximus import materialization_policy

from .programs import KINDS, OPERATIONS, STACKABLE, TRANSFORMATIONS, Program
from .toys import assert_same

pytestmark = pytest.mark.usefixtures("quick_compiles")
_INDEX = st.integers(0, 8)
_STEP = st.tuples(st.sampled_from(sorted(OPERATIONS)), _INDEX, _INDEX)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    wrappers = draw(st.lists(st.sampled_from(sorted(TRANSFORMATIONS)), max_size=3))
    cut = draw(st.integers(0, len(wrappers)))
    return Program(
        steps=tuple(draw(st.lists(_STEP, min_size=1, max_size=6))),
        inside=tuple(wrappers[:cut]),
        outside=tuple(wrappers[cut:]),
        kind=draw(st.sampled_from(KINDS)),
        stack_kind=draw(st.sampled_from(STACKABLE)),
        seed=draw(st.integers(0, 2**16)),
    )


def check(program: Program, expected: jax.Array) -> None:
    with materialization_policy("allow"):
        assert_same(program.on_implicit(), expected, rtol=2e-4, atol=2e-4)


@settings(max_examples=2 * settings().max_examples, suppress_health_check=[HealthCheck.too_slow])
@given(programs())
def test_random_program(program: Program):
    event(f"{len(program.inside)} inside, {len(program.outside)} outside")
    try:
        expected = program.on_dense()
    except (TypeError, NotImplementedError):  # JAX itself refuses, as for forward mode through custom_vjp
        assume(False)
    assume(bool(np.isfinite(expected).all()))
    check(program, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_every_operation_on_every_kind(operation: str, kind: str):
    stack_kind = kind if kind in STACKABLE else "dense"
    program = Program(((operation, 0, 1),), (), (), kind, stack_kind, seed=len(operation))
    check(program, program.on_dense())


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("name", sorted(TRANSFORMATIONS))
def test_every_transformation(name: str, where: str):
    inside, outside = ((name,), ()) if where == "inside" else ((), (name,))
    for kind, stack_kind in (("Block8", "Block8"), ("Plain", "Transposed"), ("Lora over Block8", "FlatCodes")):
        steps = (("matmul", 1, 0), ("tanh", 0, 0), ("add", 0, 2))
        program = Program(steps, inside, outside, kind, stack_kind, seed=3)
        check(program, program.on_dense())
