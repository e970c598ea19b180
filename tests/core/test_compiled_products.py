"""Products outside of jit: one compiled call, known again by everything it depends on."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest

from eformer import quantize
from eformer._core import trace
from eformer.errors import MaterializationWarning
from eformer.jaximus import ImplicitArray, explain, implicit, register
from eformer.ops.quantization import nf4_use_kernel

from .toys import assert_same

MATMUL = (((1,), (0,)), ((), ()))


def lax_dot(x: Any, w: Any) -> Any:
    return implicit(lambda x, w: jax.lax.dot_general(x, w, MATMUL))(x, w)


def make(compiles: bool = True) -> tuple[Any, list[Any]]:
    """A matrix of a type of its own, and what its handler was called with."""
    ran: list[Any] = []

    @dataclasses.dataclass
    class Doubled(ImplicitArray):
        half: jax.Array
        core_ndim: ClassVar[int] = 2
        compiles_products: ClassVar[bool] = compiles

        def materialize(self) -> jax.Array:
            return 2 * self.half

    @register("dot_general")
    def _(x: jax.Array, q: Doubled, **params: Any) -> jax.Array:
        ran.append(x if compiles else float(q.half[0, 0]))
        return 2 * jax.lax.dot_general(x, q.half, **params)

    return Doubled, ran


@pytest.mark.parametrize("product", [lambda x, q: x @ q, lax_dot], ids=["operator", "lax"])
def test_a_product_is_compiled_once_for_operands_of_the_same_types(product, key):
    cls, ran = make()
    x, w = jax.random.normal(key, (3, 4)), jax.random.normal(jax.random.fold_in(key, 1), (4, 2))
    for scale in (1.0, 2.0, 3.0):
        assert_same(product(x, cls(scale * w)), x @ (2 * scale * w))
    assert len(ran) == 1
    assert isinstance(ran[0], jax.core.Tracer)
    assert_same(product(x[:2], cls(w)), x[:2] @ (2 * w))  # another shape
    assert product(x.astype(jnp.bfloat16), cls(w.astype(jnp.bfloat16))).dtype == jnp.bfloat16  # another type
    assert len(ran) == 3


@pytest.mark.parametrize("product", [lambda x, q: x @ q, lax_dot], ids=["operator", "lax"])
def test_a_new_handler_is_used_at_once(product):
    cls, ran = make()
    x, q = jnp.ones((3, 4)), cls(jnp.ones((4, 2)))
    product(x, q)

    @register("dot_general")
    def _(x: jax.Array, q: cls, **params: Any) -> jax.Array:
        return jnp.full((3, 2), 7.0)

    assert_same(product(x, q), jnp.full((3, 2), 7.0))
    assert len(ran) == 1


def test_other_types_have_their_handlers_run_every_time_and_see_numbers():
    cls, ran = make(compiles=False)
    for value in (1.0, 2.0, 3.0):
        assert_same(lax_dot(jnp.ones((3, 4)), cls(jnp.full((4, 2), value))), jnp.full((3, 2), 8 * value))
    assert ran == [1.0, 2.0, 3.0]


def test_switches_of_other_rooms_count(monkeypatch):
    cls, ran = make()
    state = [0]
    monkeypatch.setattr(trace, "switches", [*trace.switches, lambda: state[0]])
    x, q = jnp.ones((3, 4)), cls(jnp.ones((4, 2)))
    for _ in range(2):
        for state[0] in (0, 1):
            x @ q
            lax_dot(x, q)
    assert len(ran) == 4


def test_the_switch_of_nf4_counts(key):
    x, q = jnp.ones((2, 64)), quantize(jax.random.normal(key, (64, 32)), dtype="nf4")
    before = trace._jitted.cache_info().currsize
    lax_dot(x, q)
    with nf4_use_kernel(False):
        lax_dot(x, q)
    assert trace._jitted.cache_info().currsize == before + 2


def test_every_place_is_warned_of_a_materialization():
    @dataclasses.dataclass
    class Opaque(ImplicitArray):
        w: jax.Array

        def materialize(self) -> jax.Array:
            return self.w + 0

    x, q = jnp.ones((3, 4)), Opaque(jnp.ones((4, 2)))
    with pytest.warns(MaterializationWarning, match="dot_general"):
        x @ q
    with pytest.warns(MaterializationWarning, match="dot_general"):
        x @ q
    with pytest.warns(MaterializationWarning, match="dot_general"):
        lax_dot(x, q)


def test_what_was_compiled_is_explained_all_the_same(key):
    x, q = jnp.ones((2, 64)), quantize(jax.random.normal(key, (64, 32)), dtype="nf4")
    for product in (lambda: x @ q, lambda: lax_dot(x, q)):
        product()
        for _ in range(2):
            assert [event.op for event in explain(product)().kernels] == ["qmatmul"]


def test_without_jit_products_run_as_they_are():
    cls, ran = make()
    with jax.disable_jit():
        for _ in range(2):
            assert_same(jnp.ones((3, 4)) @ cls(jnp.ones((4, 2))), jnp.full((3, 2), 8.0))
    assert len(ran) == 2
    assert not isinstance(ran[0], jax.core.Tracer)
