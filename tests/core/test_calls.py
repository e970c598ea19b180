"""Every public JAX call of the table gives, on an implicit array, what it gives on the dense one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from eformer.jaximus import ImplicitArray, implicit, materialization_policy

from . import calls_lax, calls_libraries, calls_numpy
from .calls import Call, matrix
from .toys import Block8, Plain, assert_dispatched, assert_same, dense, forget

pytestmark = pytest.mark.usefixtures("quick_compiles")
CALLS: list[Call] = [*calls_numpy.CALLS, *calls_lax.CALLS, *calls_libraries.CALLS]


def by_name(calls: list[Call]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("call", calls, ids=[call.name for call in calls])


def test_the_table_is_large_and_its_rows_distinct():
    names = [call.name for call in CALLS]
    assert len(set(names)) == len(names)
    assert len(names) >= 500
    assert len({name.split(" ")[0] for name in names if "." in name}) >= 400
    assert sum(call.dispatches for call in CALLS) >= 40


# Compiling is what takes the time, and many rows in one program take a fraction of what as many programs take.
COMPILED = [call for call in CALLS if not call.concrete]
GROUPS = [COMPILED[i : i + 30] for i in range(0, len(COMPILED), 30)]


def compiled_results(calls: list[Call]) -> list[dict[str, Any]]:
    """For every row: the dense call and the two ways to combine jit with `implicit`, on both types."""

    def modes(call: Call, plain: Plain, block8: Block8) -> dict[str, Any]:
        inner = jax.jit(lambda *ws: [call.function(w) for w in ws])
        return {
            "dense": call.function(block8.materialize()),
            "jit(implicit f)": [implicit(call.function)(plain), implicit(call.function)(block8)],
            "implicit(jit f)": implicit(inner)(plain, block8),
        }

    def program(operands: list[tuple[Plain, Block8]]) -> list[dict[str, Any]]:
        return [modes(call, *ws) for call, ws in zip(calls, operands, strict=True)]

    return jax.jit(program)([both_types(call) for call in calls])


def both_types(call: Call) -> tuple[Plain, Block8]:
    return matrix(call.kind, Plain), matrix(call.kind, Block8)


def compare(call: Call, mode: str, actual: Any, expected: Any) -> str | None:
    """What is wrong with a row, or None."""
    try:
        assert_same(actual, expected)
    except AssertionError as err:
        return f"{call.name}, {mode}: {err}"
    return None


def compare_eager(call: Call, place: int, expected: Any) -> str | None:
    """Eager calls compile every operation by itself: one type each."""
    w = both_types(call)[place % 2]
    # A result may be a number or a tuple of axes; jit makes arrays of those.
    eager = jax.tree.map(jnp.asarray, implicit(call.function)(w), is_leaf=lambda v: isinstance(v, ImplicitArray))
    return compare(call, f"eager {type(w).__name__}", eager, expected)


@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_calls_equal_the_calls_on_the_dense_array(group: int):
    with materialization_policy("allow"):
        compiled = compiled_results(GROUPS[group])
        wrong = []
        for place, (call, results) in enumerate(zip(GROUPS[group], compiled, strict=True)):
            expected = results.pop("dense")
            wrong += [compare(call, mode, result, [expected] * 2) for mode, result in results.items()]
            if place % 3 == 0:
                wrong.append(compare_eager(call, place, expected))
    assert [message for message in wrong if message] == []


@pytest.mark.thorough
@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_the_other_eager_calls_equal_the_calls_on_the_dense_array(group: int):
    rows = [(place, call) for place, call in enumerate(GROUPS[group]) if place % 3]
    dense_rows = jax.jit(lambda ws: [call.function(w) for (_, call), w in zip(rows, ws, strict=True)])
    expected = dense_rows([jnp.asarray(dense(matrix(call.kind, Block8))) for _, call in rows])
    with materialization_policy("allow"):
        wrong = [compare_eager(call, place, want) for (place, call), want in zip(rows, expected, strict=True)]
    assert [message for message in wrong if message] == []


@by_name([call for call in CALLS if call.concrete])
def test_calls_whose_shape_depends_on_values(call: Call):
    plain, block8 = both_types(call)
    expected = call.function(jnp.asarray(dense(block8)))
    with materialization_policy("allow"):
        assert_same(implicit(call.function)(plain), expected)
        assert_same(implicit(call.function)(block8), expected)


@by_name([call for call in CALLS if call.dispatches])
@pytest.mark.parametrize("mode", ["eager", "traced"])
def test_call_dispatches_and_makes_nothing_dense(call: Call, mode: str):
    w = matrix(call.kind, Block8)
    forget()
    with materialization_policy("error"):
        if mode == "eager":
            implicit(call.function)(w)
        else:
            jax.jit(implicit(call.function)).trace(w)
            assert_dispatched()
            forget()  # a handler runs when a program is traced, and this one was
            jax.make_jaxpr(implicit(jax.jit(lambda w: call.function(w))))(w)
    assert_dispatched()
