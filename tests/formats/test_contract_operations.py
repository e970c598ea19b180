"""Every operation on every format equals the same operation on the dense array."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from eformer.jaximus import implicit

from .contract import FAST, FEW, FORMATS, K, N, check, dense, make, seeded
from .contract_programs import dense_program, operands, program, stack_operands

# Left out: NF4 whose compressed absmax is expanded before it multiplies, and formats that have a scaled twin.
MULTIPLIED = [name for name in FORMATS if name not in ("nf4-double", "ternary-bare", "binary-bare")]
# Every type, packed along either of the last two axes where it is packed at all.
MOVED = ("nf4", "nf4-double-last", "int8", "int8-matrix", "ternary-last", "ternary", "binary-last-tensor")
# What is dense after one step is dense for every format.
ONE_OF_EACH = ("nf4", "int8", "ternary")


def row(name: str, group: str) -> Any:
    return pytest.param(name, group, marks=[] if name in FEW else pytest.mark.thorough)


def inputs(name: str, group: str):
    rng = seeded(name, group)
    if group == "stacked":
        return make(name, rng, 3, K, N), stack_operands(rng)
    return make(name, rng, K, N), operands(rng)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        *(row(name, "products") for name in MULTIPLIED),
        *(row(name, group) for name in MOVED for group in ("stacked", "shapes")),
        *(row(name, "values") for name in ONE_OF_EACH),
    ],
)
def test_compiled(name: str, group: str) -> None:
    """jit(implicit(f)): the operations of a group in one program."""
    q, a = inputs(name, group)
    compiled = jax.jit(lambda q, a: dense(implicit(program(group))(q, a)), compiler_options=FAST)
    check(compiled(q, a), dense_program(group)(dense(q), a))


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("int8", "products"),
        pytest.param("ternary", "products", marks=pytest.mark.thorough),
        pytest.param("nf4", "shapes", marks=pytest.mark.thorough),
    ],
)
def test_eager(name: str, group: str) -> None:
    """implicit(f): every operation runs at once, on concrete arrays."""
    q, a = inputs(name, group)
    check(implicit(program(group))(q, a), dense_program(group)(dense(q), a))
