"""The materialization policy, where it is reported, and `materialize_nested`."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.jaximus import (
    ImplicitArray,
    MaterializationError,
    MaterializationWarning,
    explain,
    implicit,
    materialization_policy,
    materialize,
    materialize_nested,
    register,
)

from .toys import Block8, Lora, Plain, assert_same


def fresh(**keywords: Any) -> Any:
    """An instance of a class nobody has been warned about yet."""

    @dataclasses.dataclass
    class Fresh(ImplicitArray, **keywords):
        values: jax.Array

        def materialize(self):
            return self.values * 2

    return Fresh(jnp.arange(1.0, 7.0).reshape(2, 3))


def line() -> int:
    return inspect.currentframe().f_back.f_lineno  # pyright: ignore[reportOptionalMemberAccess]


def caught(f: Any) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        f()
    return [w for w in seen if issubclass(w.category, MaterializationWarning)]


# -- allow, warn, error ------------------------------------------------------------------------------------------------


def test_warn_is_the_default_and_names_the_facts():
    q = fresh()
    (w,) = caught(lambda: implicit(jnp.sin)(q))
    for fact in ("Fresh(float32[2,3]", "24 bytes dense", "sin"):
        assert fact in str(w.message)
    assert issubclass(MaterializationWarning, UserWarning)


def test_allow_is_silent():
    q = fresh()
    with materialization_policy("allow"):
        assert not caught(lambda: implicit(jnp.sin)(q))


def test_error_refuses_with_the_facts():
    q = fresh()
    with (
        materialization_policy("error"),
        pytest.raises(
            MaterializationError, match=r"Refusing to materialize Fresh.*24 bytes dense.* for sin at .*\.py:\d+"
        ),
    ):
        implicit(jnp.sin)(q)
    implicit(jnp.sin)(q)


def test_class_keyword_silences():
    assert not caught(lambda: implicit(jnp.sin)(fresh(warn_on_materialize=False)))


def test_class_keyword_does_not_weaken_error():
    with materialization_policy("error"), pytest.raises(MaterializationError):
        implicit(jnp.sin)(fresh(warn_on_materialize=False))


def test_policies_nest():
    q = fresh()
    with materialization_policy("error"):
        with materialization_policy("allow"):
            implicit(jnp.sin)(q)
        with pytest.raises(MaterializationError):
            implicit(jnp.sin)(q)
    implicit(jnp.sin)(q)


def test_requests_by_name_are_never_refused():
    q = fresh()
    with materialization_policy("error"):
        dense = q.materialize()
        for out in (materialize(q), np.asarray(q), jnp.asarray(q), materialize_nested(q), jnp.array(q)):
            assert_same(jnp.asarray(out), dense)
        assert implicit(lambda q: q.materialize())(q).shape == (2, 3)


def test_conversions_by_libraries_were_not_asked_for():
    """JAX and the frameworks call jnp.asarray on what they are given; that is no request of the user's."""
    q = fresh()
    namespace = {"jnp": jnp, "__name__": "flax.nnx.nn.dtypes"}
    exec("def promote(x): return jnp.asarray(x)", namespace)
    for convert in (namespace["promote"], jnp.atleast_1d):
        with materialization_policy("error"), pytest.raises(MaterializationError):
            convert(q)
        assert_same(convert(q), q.materialize())


def test_error_applies_to_functions_outside_implicit():
    q = fresh()
    with materialization_policy("error"):
        with pytest.raises(MaterializationError):
            jnp.sin(q)
        with pytest.raises(MaterializationError):
            jax.jit(lambda: jnp.sin(q))()
        with pytest.raises(MaterializationError):
            q + 1


def test_error_leaves_handled_programs_alone():
    q = Block8.quantize(jnp.ones((8, 4)))
    with materialization_policy("error"):
        assert_same(jnp.ones((2, 8)) @ q, jnp.full((2, 4), 8.0))
        jax.jit(lambda x: x @ q)(jnp.ones((2, 8)))
        with implicit:
            jnp.dot(jnp.ones((2, 8)), q)


@pytest.mark.parametrize("inside", [True, False], ids=["implicit(jit)", "jit(implicit)"])
def test_a_compiled_program_does_not_keep_a_policy(inside):
    q = fresh()
    f = implicit(jax.jit(lambda q: jnp.sin(q))) if inside else jax.jit(implicit(lambda q: jnp.sin(q)))
    with materialization_policy("allow"):
        f(q)
    with materialization_policy("error"), pytest.raises(MaterializationError):
        f(q)
    with materialization_policy("allow"):
        f(q)
    with materialization_policy("error"), pytest.raises(MaterializationError):
        f(q)


def test_environment_variable(monkeypatch):
    """It is read when it is needed: while a program is traced."""
    expected = {"allow": None, "warn": MaterializationWarning, "ERROR": MaterializationError, "maybe": ValueError}
    for value, error in expected.items():
        monkeypatch.setenv("EFORMER_MATERIALIZE", value)
        q = fresh()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(error) if error else contextlib.nullcontext():
                implicit(jnp.sin)(q)
            with materialization_policy("allow"):
                implicit(jnp.cos)(q)


# -- once per type, primitive and call site ----------------------------------------------------------------------------


def test_once_per_place():
    q = fresh()

    def here():
        return implicit(jnp.sin)(q)

    assert len(caught(lambda: [here() for _ in range(3)])) == 1
    assert len(caught(lambda: implicit(jnp.sin)(q))) == 1  # another place
    assert len(caught(lambda: (implicit(jnp.cos)(q), implicit(jnp.exp)(q)))) == 2  # other primitives, one place
    assert len(caught(lambda: [implicit(jnp.sin)(r) for r in (fresh(), fresh())])) == 2  # other types


def where(f: Any, q: Any) -> tuple[str, int]:
    with materialization_policy("error"), pytest.raises(MaterializationError) as err:
        f(q)
    file, _, number = str(err.value).split(" at ", 1)[1].split(": the policy")[0].rpartition(":")
    return os.path.basename(file), int(number)


HERE = os.path.basename(__file__)


def test_line_of_an_operator():
    def f(q):
        return q + 1

    assert where(f, fresh()) == (HERE, line() - 2)
    assert where(implicit(f), fresh()) == (HERE, line() - 3)
    assert where(implicit(jax.jit(f)), fresh()) == (HERE, line() - 4)
    assert where(jax.jit(implicit(f)), fresh()) == (HERE, line() - 5)


def test_line_of_a_function():
    def f(q):
        return jnp.sin(q)

    assert where(f, fresh()) == (HERE, line() - 2)
    assert where(implicit(f), fresh()) == (HERE, line() - 3)
    assert where(implicit(jax.jit(f)), fresh()) == (HERE, line() - 4)
    assert where(jax.jit(f), fresh()) == (HERE, line() - 5)


def test_line_of_a_method():
    def f(q):
        return q.sum(0)

    assert where(f, fresh()) == (HERE, line() - 2)
    assert where(implicit(f), fresh()) == (HERE, line() - 3)
    assert where(implicit(jax.jit(f)), fresh()) == (HERE, line() - 4)


def test_line_inside_a_scan_body():
    def f(q):
        def body(c, _):
            c = c * 2.0
            c = c + jnp.tanh(q).sum()
            return c, None

        return jax.lax.scan(body, 0.0, None, length=2)[0]

    assert where(implicit(f), fresh()) == (HERE, line() - 5)
    assert where(implicit(jax.jit(f)), fresh()) == (HERE, line() - 6)


def test_line_inside_a_jit_inside_a_jit():
    def f(q):
        inner = jax.jit(lambda q: q - 3)
        return inner(q)

    assert where(implicit(jax.jit(f)), fresh()) == (HERE, line() - 3)


def test_line_inside_a_block():
    def f(q):
        with implicit:
            return jnp.square(q)

    assert where(f, fresh()) == (HERE, line() - 2)


def test_line_of_a_handler_that_materializes():
    q = fresh()

    @register("sin")
    def _(x: type(q), **params):  # pyright: ignore[reportInvalidTypeForm]
        return jnp.sin(x.materialize())

    def f(q):
        return jnp.sin(q)

    with materialization_policy("error"):  # a handler that says materialize() means it
        found = explain(implicit(f))(q)
    (event,) = found.materializations
    assert event.where.startswith(__file__)
    assert not caught(lambda: implicit(f)(q))


def test_the_warning_points_at_the_line():
    q = fresh()
    (w,) = caught(lambda: implicit(lambda q: jnp.arctan(q) + 0)(q))
    assert (os.path.basename(w.filename), w.lineno) == (HERE, line() - 1)


# -- materialize_nested ------------------------------------------------------------------------------------------------


def test_materialize_nested_goes_one_layer_or_all():
    @dataclasses.dataclass
    class Wrap(ImplicitArray):
        inner: Any

        def materialize(self):
            return self.inner

    inner = Plain(jnp.ones(3), jnp.full(3, 4.0))
    q = Wrap(inner)
    assert materialize_nested(q) is inner
    assert_same(materialize_nested(q, full=True), jnp.full(3, 4.0))
    assert isinstance(materialize_nested(Wrap(q)), Wrap)
    assert isinstance(materialize_nested(Wrap(q), full=True), jax.Array)
    x = jnp.ones(2)
    assert materialize_nested(x) is x
    lora = Lora(Block8.quantize(jnp.ones((8, 2))), jnp.ones((8, 1)), jnp.ones((1, 2)))
    assert_same(materialize_nested(lora), jnp.full((8, 2), 2.0))


def test_materialize_nested_on_failure():
    @dataclasses.dataclass
    class Broken(ImplicitArray):
        values: jax.Array

        def compute_shape(self):
            return self.values.shape

        def compute_dtype(self):
            return jnp.bfloat16

        def materialize(self):
            raise OSError("no file")

    q = Broken(jnp.zeros((2, 3)))
    with pytest.raises(MaterializationError, match=r"Broken.*no file") as err:
        materialize_nested(q)
    assert isinstance(err.value.__cause__, OSError)
    with pytest.warns(MaterializationWarning, match="returning ones"):
        out = materialize_nested(q, on_failure="ones")
    assert_same(out, jnp.ones((2, 3), jnp.bfloat16))
