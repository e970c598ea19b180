"""`register`: signatures, types, precedence and falling through."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

from eformer.jaximus import OrginArray, implicit, register

from .toys import Doubled, assert_same

LOG: list[str] = []


@pytest.fixture(autouse=True)
def _empty_log():
    jax.clear_caches()
    LOG.clear()


X = jnp.arange(1.0, 4.0)


# -- signatures --------------------------------------------------------------------------------------------------------


def test_the_primitive_comes_first_if_asked_for(kind):
    @register("sin")
    def _(primitive, x: kind, **params):
        LOG.append(primitive.name)
        return x.values

    @register("cos")
    def _(prim: Primitive, x: kind, **params):
        LOG.append(prim.name)
        return x.values

    implicit(jnp.sin)(kind(X))
    implicit(jnp.cos)(kind(X))
    assert LOG == ["sin", "cos"]


def test_operands_arrive_as_arrays_and_parameters_whole(kind):
    seen = {}

    @register("add")
    def _(x: kind, y: jax.Array, **params):
        seen["type"] = isinstance(y, jax.Array)
        return x.values + y

    @register("reduce_max")
    def _(x: kind, *, axes, **params):
        seen["axes"] = axes
        seen["rest"] = params
        return x.values.max(axes)

    q = kind(jnp.ones((2, 3)))
    implicit(lambda q: q + np.ones((2, 3), np.float32))(q)
    q.max(axis=1)
    assert (seen["type"], seen["axes"]) == (True, (1,))


def test_named_parameters_without_a_catch_all_and_new_ones_that_say_nothing(kind):
    mine = Primitive("mine_with_params")
    mine.def_abstract_eval(lambda x, **params: x)

    @register(mine)
    def _(x: kind, *, known):
        return x.values * known

    assert_same(implicit(lambda q: mine.bind(q, known=3, added_later=None, flag=False))(kind(X)), X * 3)


def test_variable_numbers_of_operands(kind):
    @register("concatenate")
    def _(*operands: kind, dimension, **params):
        return jnp.concatenate([o.values for o in operands], dimension)

    q = kind(X)
    assert_same(implicit(lambda a, b: jnp.concatenate([a, b]))(q, q), jnp.concatenate([X, X]))
    mixed = implicit(lambda a, b: jnp.concatenate([a, b]))(q, X)  # does not match: dense
    assert_same(mixed, jnp.concatenate([2 * X, X]))


# -- types -------------------------------------------------------------------------------------------------------------


def test_unions_any_and_unannotated(kind):
    @register("mul")
    def _(x: kind, y: kind | jax.Array, **params):
        LOG.append("union")
        return x.values

    @register("div")
    def _(x: Any, y: kind, **params):
        LOG.append("any")
        return y.values

    @register("max")
    def _(x, y: typing.Optional[kind], **params):  # noqa: UP045
        LOG.append("optional")
        return jnp.zeros_like(X)

    @register("sub")
    def _(x: OrginArray, y: kind, **params):
        LOG.append("orgin")
        return y.values

    q = kind(X)
    for f in (
        lambda: q * q,
        lambda: q * X,
        lambda: X / q,
        lambda: q / q,
        lambda: implicit(jnp.maximum)(X, q),
        lambda: X - q,
    ):
        f()
    assert LOG == ["union", "union", "any", "any", "optional", "orgin"]


def test_subclasses_inherit_and_refine(kind):
    @dataclasses.dataclass
    class Child(kind):
        pass

    @register("sin")
    def _(x: kind, **params):
        LOG.append("parent")
        return x.values

    implicit(jnp.sin)(Child(X))

    @register("sin")
    def _(x: Child, **params):
        LOG.append("child")
        return x.values

    implicit(jnp.sin)(Child(X))
    implicit(jnp.sin)(kind(X))
    assert LOG == ["parent", "child", "parent"]


def test_several_implicit_types_at_once(kind):
    @dataclasses.dataclass
    class Other(Doubled):
        pass

    @register("dot_general")
    def _(x: kind, y: Other, **params):
        LOG.append("pair")
        return jax.lax.dot_general(x.values, y.values, **params)

    @register("dot_general")
    def _(x: kind, y: jax.Array, **params):
        LOG.append("dense")
        return jax.lax.dot_general(x.values, y, **params)

    a, b, eye = kind(jnp.eye(3)), Other(jnp.eye(3)), jnp.eye(3)
    assert_same(a @ b, eye)
    assert_same(a @ eye, eye)
    assert_same(b @ a, 4 * eye)
    assert LOG == ["pair", "dense"]


def test_the_more_specific_signature_wins_whatever_its_precedence(kind):
    @register("sub", precedence=100)
    def _(x, y, **params):
        LOG.append("general")
        return NotImplemented

    @register("sub")
    def _(x: kind, y: kind, **params):
        LOG.append("specific")
        return x.values

    q = kind(X)
    q - q
    assert LOG == ["specific"]


def test_precedence_breaks_ties(kind):
    @register("sub", precedence=1)
    def _(x: kind, y, **params):
        LOG.append("left")
        return x.values

    @register("sub", precedence=2)
    def _(x, y: kind, **params):
        LOG.append("right")
        return y.values

    q = kind(X)
    q - q
    assert LOG == ["right"]


def test_precedence_between_equal_signatures(kind):
    for precedence, name in ((0, "low"), (5, "high"), (1, "middle")):

        @register("sin", precedence=precedence)
        def _(x: kind, name=name, **params):
            LOG.append(name)
            return NotImplemented if name == "high" else x.values

    assert_same(implicit(jnp.sin)(kind(X)), X)
    assert LOG == ["high", "middle"]


def test_a_second_definition_replaces_the_first(kind):
    for name in ("first", "second"):

        @register("sin")
        def _(x: kind, name=name, **params):
            LOG.append(name)
            return x.values

        implicit(jnp.sin)(kind(X))
    assert LOG == ["first", "second"]


def test_registering_later_is_seen_by_functions_compiled_before(kind):
    f = jax.jit(jnp.sin)
    q = kind(X)
    assert_same(implicit(f)(q), jnp.sin(2 * X))

    @register("sin")
    def _(x: kind, **params):
        return x.values

    assert_same(implicit(f)(q), X)


def test_local_classes_under_postponed_annotations():
    @dataclasses.dataclass
    class Local(Doubled):
        pass

    def handler_for(cls):
        @register("sin")
        def _(x: cls, **params):
            return x.values

    handler_for(Local)
    assert_same(implicit(jnp.sin)(Local(X)), X)


# -- falling through ---------------------------------------------------------------------------------------------------


def test_not_implemented_asks_the_next_handler_and_then_the_default(kind):
    @dataclasses.dataclass
    class Child(kind):
        pass

    @register("exp")
    def _(x: kind, **params):
        LOG.append("parent")
        return NotImplemented if x.ndim else x.values

    @register("exp")
    def _(x: Child, **params):
        LOG.append("child")
        return NotImplemented

    assert_same(implicit(jnp.exp)(Child(X)), jnp.exp(2 * X))
    assert LOG == ["child", "parent"]


@pytest.mark.parametrize("commute", [True, False])
def test_commute_ops(commute):
    @dataclasses.dataclass
    class Fresh(Doubled, commute_ops=commute):
        pass

    @register("mul")
    def _(x: Fresh, y: jax.Array, **params):
        LOG.append("mul")
        return Fresh(x.values * y)

    @register("sub")
    def _(x: Fresh, y: jax.Array, **params):
        LOG.append("sub")
        return x.values - y

    q = Fresh(X)
    assert_same(q * X, 2 * X * X)
    assert_same(X * q, 2 * X * X)
    assert isinstance(X * q, Fresh) is commute
    assert_same(X - q, -X)  # never commutes
    assert "sub" not in LOG


def test_default_handler_of_the_class_is_the_last_resort():
    @dataclasses.dataclass
    class Own(Doubled):
        @classmethod
        def default_handler(cls, primitive, *args, params=None):
            LOG.append(primitive.name)
            return super().default_handler(primitive, *args, params=params)

    assert_same(implicit(jnp.tanh)(Own(X)), jnp.tanh(2 * X))
    assert_same(implicit(lambda q: jax.lax.top_k(q, 2))(Own(X)), jax.lax.top_k(2 * X, 2))
    assert LOG == ["tanh", "top_k"]


def test_handlers_may_return_implicit_arrays_and_call_implicit_code(kind):
    @register("transpose")
    def _(x: kind, *, permutation, **params):
        return kind(x.values.transpose(permutation))

    @register("dot_general")
    def _(x: jax.Array, y: kind, **params):
        inner = Doubled(y.values)
        return jax.lax.dot_general(x, inner.materialize(), **params)

    q = kind(jnp.arange(6.0).reshape(2, 3))
    assert isinstance(q.T, kind)
    assert isinstance(implicit(jax.jit(lambda q: q.T.T))(q), kind)
    assert_same(jnp.ones((1, 2)) @ q, jnp.ones((1, 2)) @ (2 * q.values))


def test_a_handler_of_no_module(kind):
    given = {"register": register, "Kind": kind}  # without a name
    exec("@register('tan')\ndef handler(x: Kind, **params):\n    return Kind(x.values + 1)\n", given)
    assert given["handler"].__module__ in (None, "builtins")
    assert_same(implicit(jnp.tan)(kind(X)).values, X + 1)
