"""Every operation on every format equals the same operation on the dense array."""

from __future__ import annotations

import jax
import pytest

from eformer.jaximus import implicit

from .contract import FEW, FORMATS, PROGRAMS, STACKED, K, N, check, dense, make, operands, program, seeded, stack_operands


@pytest.mark.parametrize("group", PROGRAMS)
@pytest.mark.parametrize("name", FORMATS)
def test_compiled(name: str, group: str) -> None:
    """jit(implicit(f)): the operations of a group in one program."""
    rng = seeded(name, group)
    q, a, f = make(name, rng, K, N), operands(rng), program(group)
    check(jax.jit(implicit(f))(q, a), jax.jit(f)(dense(q), a))


@pytest.mark.parametrize("name", FORMATS)
def test_compiled_stack(name: str) -> None:
    rng = seeded(name)
    q, a, f = make(name, rng, 3, K, N), stack_operands(rng), program(STACKED)
    check(jax.jit(implicit(f))(q, a), jax.jit(f)(dense(q), a))


@pytest.mark.parametrize("group", PROGRAMS)
@pytest.mark.parametrize("name", FEW)
def test_eager(name: str, group: str) -> None:
    """implicit(f): every operation runs at once, on concrete arrays."""
    rng = seeded(name, group)
    q, a, f = make(name, rng, K, N), operands(rng), program(group)
    check(implicit(f)(q, a), jax.jit(f)(dense(q), a))
