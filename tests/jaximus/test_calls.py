"""Every public JAX call of the table gives, on an implicit array, what it gives on the dense one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from eformer.jaximus import implicit, materialization_policy

from . import calls_lax, calls_libraries, calls_numpy
from .calls import Call, matrix
from .toys import Block8, Plain, assert_dispatched, assert_same, dense, forget

CALLS: list[Call] = [*calls_numpy.CALLS, *calls_lax.CALLS, *calls_libraries.CALLS]


def by_name(calls: list[Call]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("call", calls, ids=[call.name for call in calls])


def test_the_table_is_large_and_its_rows_distinct():
    names = [call.name for call in CALLS]
    assert len(set(names)) == len(names)
    assert len(names) >= 500
    assert len({name.split(" ")[0] for name in names if "." in name}) >= 400
    assert sum(call.dispatches for call in CALLS) >= 40


@pytest.fixture(autouse=True, scope="module")
def quick_compiles():
    """Thousands of tiny programs: what matters is their value, not their speed."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@by_name(CALLS)
def test_call_equals_the_call_on_the_dense_array(call: Call):
    plain, block8 = matrix(call.kind, Plain), matrix(call.kind, Block8)
    expected = call.function(jnp.asarray(dense(block8)))
    with materialization_policy("allow"):
        assert_same(implicit(call.function)(plain), expected)
        assert_same(implicit(call.function)(block8), expected)
        if call.concrete:
            return
        # Both types in one program: the compilation is what takes the time.
        expected = jax.tree.map(jnp.asarray, [expected] * 2)
        outside = jax.jit(lambda *ws: [implicit(call.function)(w) for w in ws])
        assert_same(outside(plain, block8), expected)
        inside = implicit(jax.jit(lambda *ws: [call.function(w) for w in ws]))
        assert_same(inside(plain, block8), expected)


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
