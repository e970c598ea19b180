"""Bad input: each mistake has an error of its own, which says what to do, chained to its cause."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import eformer.jaximus as jaximus
from eformer.jaximus import (
    AmbiguousHandlerError,
    AvalMismatchError,
    HandlerResultError,
    HandlerResultWarning,
    HandlerSignatureError,
    ImplicitArray,
    InvalidImplicitArrayError,
    MaterializationError,
    UnknownPrimitiveError,
    implicit,
    materialization_policy,
    register,
)

from .toys import Plain, assert_same


def test_a_class_that_is_no_dataclass():
    class Bare(ImplicitArray):
        values: jax.Array

        def materialize(self):
            return self.values

    with pytest.raises(InvalidImplicitArrayError, match=r"Bare .*not a dataclass[\s\S]*@dataclasses.dataclass"):
        Bare(jnp.ones(3))


def test_a_class_without_materialize():
    @dataclasses.dataclass
    class Mute(ImplicitArray):
        values: jax.Array

    with pytest.raises(InvalidImplicitArrayError, match=r"Mute does not implement materialize"):
        Mute(jnp.ones(3))


@pytest.mark.parametrize("bad", ["text", jnp.float32, len, b"x"], ids=str)
def test_a_child_that_is_no_array(bad):
    with pytest.raises(InvalidImplicitArrayError, match=r"field 'factor' of Plain[\s\S]*aux_field"):
        Plain(jnp.ones(3), bad)


def test_a_child_that_turns_out_to_be_no_array():
    with pytest.raises(InvalidImplicitArrayError, match=r"field 'factor' of Plain holds .*object"):
        Plain(jnp.ones(3), object()).shape


def _failing(error: BaseException) -> Any:
    @dataclasses.dataclass
    class Failing(ImplicitArray):
        values: jax.Array

        def compute_shape(self):
            return self.values.shape

        def compute_dtype(self):
            return self.values.dtype

        def materialize(self):
            raise error

    return Failing(jnp.ones((2, 3)))


def _chain(error: BaseException | None) -> Any:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def test_materialize_that_raises_is_chained():
    cause = KeyError("table")
    q = _failing(cause)
    with pytest.raises(MaterializationError, match=r"Failing.*float32\[2, 3\].*KeyError") as caught:
        q + 1
    assert cause in list(_chain(caught.value))
    with pytest.raises(MaterializationError) as caught:
        jax.jit(implicit(lambda q: jnp.sin(q)))(q)
    assert cause in list(_chain(caught.value))  # JAX may put its own note about the source in between


def test_materialize_that_raises_a_value_error_gets_a_note():
    with pytest.raises(ValueError, match="wrong block") as caught:
        _failing(ValueError("wrong block")) + 1
    assert any("Failing" in note for note in caught.value.__notes__)


def test_children_that_do_not_fit_together():
    with pytest.raises((TypeError, ValueError)) as caught:
        Plain(jnp.ones((2, 3)), jnp.ones((4,))).shape
    assert any("Plain" in note for note in caught.value.__notes__)


def test_materialize_that_gives_no_array():
    @dataclasses.dataclass
    class Odd(ImplicitArray):
        values: jax.Array

        def materialize(self):
            return [self.values, self.values]

    with pytest.raises((InvalidImplicitArrayError, AvalMismatchError), match="Odd"):
        Odd(jnp.ones(3)).shape


def test_unknown_primitive_names_get_suggestions():
    with pytest.raises(UnknownPrimitiveError, match=r"'dot_generl'.*'dot_general'"):
        register("dot_generl")
    with pytest.raises(UnknownPrimitiveError, match="no JAX primitive"):
        register("qqqqqqq")
    with pytest.raises(UnknownPrimitiveError, match="takes a primitive or its name"):
        register(jnp.sin)
    assert issubclass(UnknownPrimitiveError, ValueError)


def _toy() -> Any:
    @dataclasses.dataclass
    class Toy(ImplicitArray):
        values: jax.Array

        def materialize(self):
            return self.values

    return Toy


def test_ambiguous_handlers_name_the_candidates():
    Toy = _toy()

    @register("sub")
    def left_only(x: Toy, y, **params):
        return 0

    @register("sub")
    def right_only(x, y: Toy, **params):
        return 0

    q = Toy(jnp.ones(2))
    with pytest.raises(
        AmbiguousHandlerError, match=r"sub\(Toy, Toy\)[\s\S]*left_only[\s\S]*right_only[\s\S]*precedence"
    ):
        q - q


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (jnp.ones((3, 2)), r"float32\[3,2\]"),
        (jnp.ones((2, 3), jnp.int32), r"int32\[2,3\]"),
        (None, "NoneType"),
        ("text", "str"),
        ([jnp.ones((2, 3))], "list"),
    ],
)
def test_wrong_results_of_handlers(result, found):
    Toy = _toy()

    @register("sin")
    def wrong_sine(x: Toy, **params):
        return result

    message = rf"wrong_sine for sin returned[\s\S]*{found}[\s\S]*expected float32\[2,3\]"
    with pytest.raises(HandlerResultError, match=message):
        implicit(jnp.sin)(Toy(jnp.ones((2, 3))))


def test_an_implicit_result_of_the_wrong_shape():
    Toy = _toy()

    @register("cos")
    def wrong_cosine(x: Toy, **params):
        return Toy(jnp.ones(7))

    with pytest.raises(HandlerResultError, match=r"\[7\]"):
        implicit(jnp.cos)(Toy(jnp.ones((2, 3))))


def test_the_wrong_number_of_results():
    Toy = _toy()

    @register("top_k")
    def one_result(x: Toy, **params):
        return [x.values[..., : params["k"]]]

    with pytest.raises(HandlerResultError, match="1 results, expected 2"):
        implicit(lambda q: jax.lax.top_k(q, 2))(Toy(jnp.ones((2, 3))))


def test_a_scalar_result_warns_and_broadcasts():
    Toy = _toy()

    @register("tan")
    def scalar_tan(x: Toy, **params):
        return 0.0

    with pytest.warns(HandlerResultWarning, match=r"scalar_tan .*scalar"):
        implicit(jnp.tan)(Toy(jnp.ones((2, 3))))


def test_parameters_a_handler_does_not_accept():
    Toy = _toy()

    @register("reduce_sum")
    def no_axes(x: Toy):
        return x.values.sum()

    with pytest.raises(HandlerSignatureError, match=r"no_axes .*axes=[\s\S]*\*\*params"):
        Toy(jnp.ones((2, 3))).sum()


def test_annotations_that_cannot_be_resolved():
    with pytest.raises(HandlerSignatureError, match="Nowhere"):

        @register("sin")
        def _(x: Nowhere, **params):  # noqa: F821 # pyright: ignore
            return x


def test_precedence_must_be_an_integer():
    with pytest.raises(HandlerSignatureError, match="precedence"):

        @register("sin", precedence=1.5)  # pyright: ignore[reportArgumentType]
        def _(x: Plain, **params):
            return x


def test_policies_are_checked():
    with pytest.raises(ValueError, match=r"'sometimes'; allowed values are 'allow', 'warn', 'error'"):
        materialization_policy("sometimes")
    with pytest.raises(ValueError, match="on_failure"):
        jaximus.materialize_nested(Plain(jnp.ones(2), jnp.ones(2)), on_failure="zeros")  # pyright: ignore


def test_an_error_leaves_everything_usable():
    q = Plain(jnp.ones(3), jnp.ones(3))
    for _ in range(3):
        with pytest.raises(TypeError):
            implicit(lambda q: jnp.dot(q, jnp.ones((2, 2))))(q)
        with pytest.raises(ZeroDivisionError):
            implicit(lambda q: q + 1 / 0)(q)
    assert_same(q + 1, jnp.full(3, 2.0))
