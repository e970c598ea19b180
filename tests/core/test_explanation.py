"""`explain`: every materialization of a program, whatever was compiled before."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import pytest

import eformer
from eformer import _record
from eformer.errors import MaterializationError
from eformer.jaximus import explain, implicit, materialization_policy

from .toys import Block8, Lora, Plain, assert_same


@pytest.fixture
def q():
    return Plain(jnp.ones((8, 8)), jnp.full((8, 8), 0.5))


def test_a_clean_program(q):
    b = Block8.quantize(jnp.ones((8, 4)))
    report = explain(lambda x: x @ b)(jnp.ones((2, 8)))
    assert report.events == ()
    assert "nothing was materialized" in str(report)
    assert_same(report.result, jnp.full((2, 4), 8.0))


def test_events_carry_the_facts(q):
    report = explain(implicit(lambda q: jnp.sin(q)))(q)
    (event,) = report.materializations
    assert (event.type, event.primitive, event.shape, event.dtype) == ("Plain", "sin", (8, 8), jnp.float32)
    assert event.dense_bytes == 256
    assert os.path.basename(event.where.rpartition(":")[0]) == os.path.basename(__file__)
    assert "for sin at" in str(report)
    with pytest.raises(AttributeError, match="has no field 'nothing'"):
        event.nothing


@pytest.mark.parametrize("compose", [lambda f: implicit(jax.jit(f)), lambda f: jax.jit(implicit(f)), implicit])
def test_programs_compiled_before_are_explained_again(compose, q):
    f = compose(lambda q: jnp.sin(q) + jnp.cos(q))
    f(q)
    for _ in range(2):
        report = explain(f)(q)
        assert [e.primitive for e in report.materializations] == ["sin", "cos"]
    f(q)


def test_a_trace_made_for_explain_is_not_reused_without_it(q):
    f = jax.jit(implicit(lambda q: jnp.sin(q)))
    explain(f)(q)
    with _record.recorder() as events:
        f(q)
    assert len(events) == 1


def test_events_inside_scans_and_branches(q):
    def f(q):
        def body(c, _):
            return c + jnp.exp(q).sum(), None

        c = jax.lax.scan(body, 0.0, None, length=3)[0]
        return jax.lax.cond(c > 0, lambda: jnp.log(q).sum(), lambda: jnp.tanh(q).sum())

    found = {e.primitive for e in explain(implicit(f))(q).materializations}
    assert found == {"exp", "log", "tanh"}


def test_nested_arrays_are_one_event():
    lora = Lora(Block8.quantize(jnp.ones((8, 4))), jnp.ones((8, 1)), jnp.ones((1, 4)))
    report = explain(implicit(lambda w: jnp.sin(w)))(lora)
    assert [e.type for e in report.materializations] == ["Lora"]


def test_explicit_requests_are_listed_as_such(q):
    report = explain(lambda q: q.materialize())(q)
    assert [e.primitive for e in report.materializations] == ["an explicit call"]


def test_explain_within_explain(q):
    outer = explain(lambda q: explain(implicit(jnp.sin))(q).result)(q)
    assert [e.primitive for e in outer.materializations] == ["sin"]


def test_explain_under_a_refusing_policy_keeps_refusing(q):
    with materialization_policy("error"), pytest.raises(Exception, match="Refusing"):
        explain(implicit(jnp.sin))(q)
    assert explain(implicit(jnp.sin))(q).materializations


def test_keywords_and_trees(q):
    report = explain(implicit(lambda a, *, b: {"y": a["q"] * b}))({"q": q}, b=2.0)
    assert report.result["y"].shape == (8, 8)
    assert [e.primitive for e in report.materializations] == ["mul"]


def test_kernel_choices_are_listed():
    def f(x):
        _record.record("kernel", name="tiled", why="no compiler")
        return x

    report = explain(f)(1)
    assert [k.name for k in report.kernels] == ["tiled"]
    assert "kernel" in str(report)
    assert "tiled" in str(report)
    assert report.materializations == ()


def test_nothing_is_compiled_and_little_is_kept(q):
    program = jax.jit(implicit(lambda x, q: jnp.tanh(x @ q) @ q))
    x, weight = jnp.ones((2, 64)), eformer.quantize(jnp.ones((64, 64)), dtype="nf4")
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    try:
        assert len(explain(program)(x, weight).kernels) == 2
        assert compiled
        assert not [name for name in compiled if "backend_compile" in name]
        assert_same(explain(program)(x, weight).result, program(x, weight))
        assert [name for name in compiled if "backend_compile" in name]
    finally:
        jax.monitoring.clear_event_listeners()


def test_what_cannot_be_traced_is_run(q):
    def f(q):
        total = float(jnp.sin(q).sum())
        return "positive" if total > 0 else "not"

    found = explain(implicit(f))(q)
    assert found.result == "positive"
    assert [e.primitive for e in found.materializations] == ["sin"]
    assert explain(implicit(lambda q: f"{q.sum():.1f}"))(q).result == "32.0"


def test_an_error_of_the_function_is_raised_once(q):
    calls = []

    def f(q):
        calls.append(q)
        raise TypeError("its own")

    with pytest.raises(TypeError, match="its own"):
        explain(implicit(f))(q)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "compose", [lambda f: f, jax.jit, jax.checkpoint, lambda f: lambda q: jax.lax.map(lambda _: f(q), jnp.ones(2))]
)
def test_where_implicit_was_forgotten(compose, q):
    report = explain(compose(lambda q: jnp.sin(q)))(q)
    (event,) = report.materializations
    assert (event.type, event.primitive, event.shape) == ("Plain", "a function outside implicit", (8, 8))
    assert os.path.basename(event.where.rpartition(":")[0]) == os.path.basename(__file__)
    with materialization_policy("error"), pytest.raises(MaterializationError, match="wrap the call in implicit"):
        explain(compose(lambda q: jnp.sin(q)))(q)
    assert explain(implicit(compose(lambda q: -q)))(q).materializations[0].primitive == "neg"
