"""Products with a transposed array take the array as it is stored: no codes are moved."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eformer as ef
from eformer._formats import turned

MADE: dict[str, dict[str, Any]] = {
    "int8": {"dtype": "int8"},
    "int8 by columns": {"dtype": "int8", "axis": 0},
    "fp8": {"dtype": "fp8", "axis": -1},
    "fp8 as one": {"dtype": "fp8", "axis": None},
    "int8 rounded": {"dtype": "int8", "axis": -1, "activations": "int8"},
}
PROGRAMS: dict[str, Any] = {
    "operators": lambda x, t: x @ t,
    "matmul": ef.implicit(jnp.matmul),
    "einsum": ef.implicit(lambda x, t: jnp.einsum("mk,kn->mn", x, t)),
    "on the left": ef.implicit(lambda x, t: jnp.transpose(t.T @ x.T)),
    "gradient": jax.grad(lambda x, t: jnp.sum(jnp.sin(x @ t))),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("made", MADE)
def test_it_is_the_product_and_nothing_moves(key, made: str, program: str) -> None:
    w = ef.quantize(jax.random.normal(key, (48, 96)), **MADE[made])
    x = jax.random.normal(key, (5, 96))
    run = jax.jit(lambda x, w: PROGRAMS[program](x, w.T))
    with ef.materialization_policy("error"):
        found = run(x, w)
    want = PROGRAMS[program](x, w.T)  # of an array that was transposed before
    np.testing.assert_allclose(found, want, atol=1e-5 * float(jnp.abs(want).max()))
    # XLA drops what nobody uses, so codes would be moved if a transpose of bytes were left.
    moved = [line for line in run.lower(x, w).compile().as_text().splitlines() if " transpose(" in line]
    assert not [line for line in moved if "s8[" in line.split("=")[1] or "u8[" in line.split("=")[1]]


def test_stacks_and_what_changes_the_order_of_results(key) -> None:
    w = ef.quantize(jax.random.normal(key, (3, 8, 16)), dtype="int8")
    x = jax.random.normal(key, (3, 5, 16))
    dense = w.materialize()
    programs = {
        "batched": (lambda x, w: x @ jnp.swapaxes(w, 1, 2), x),
        "two axes kept": (lambda x, w: jnp.tensordot(x, jnp.transpose(w, (2, 1, 0)), 1), x[0]),
        "in order": (lambda x, w: jnp.tensordot(x, jnp.transpose(w, (2, 0, 1)), 1), x[0]),
    }
    for program, given in programs.values():
        found = jax.jit(ef.implicit(program))(given, w)
        np.testing.assert_allclose(found, program(given, dense), rtol=1e-5, atol=1e-5)


def test_a_changed_copy_is_another_array(key) -> None:
    w, x = ef.quantize(jax.random.normal(key, (8, 16)), dtype="int8"), jax.random.normal(key, (5, 16))

    @jax.jit
    def run(x: Any, w: Any) -> Any:
        t = w.T
        assert turned.before(t) is not None
        doubled = t.replaced(scale=2 * t.scale)
        assert turned.before(doubled) is None
        assert turned.before(copy.copy(t)) is None
        return x @ doubled

    np.testing.assert_allclose(run(x, w), 2 * (x @ w.materialize().T), rtol=1e-5, atol=1e-5)
    assert turned.before(w.T) is None  # computed: the array may be deleted
