"""`implicit`: the decorator, the call, the block, and JAX's debugging switches around them."""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.random import stateful_rng

from eformer.jaximus import ImplicitArray, implicit, use_implicit

from .toys import Block8, Lora, Plain, assert_dispatched, assert_same, dense, forget


@pytest.fixture
def q(key):
    return Block8.quantize(jax.random.normal(key, (16, 4)))


@pytest.fixture
def w(q):
    """What `q` stands for. A test that asks for it and for `diary` starts with an empty one."""
    return jnp.asarray(dense(q))


@pytest.fixture
def diary(w):
    forget()


@pytest.fixture
def x(key):
    return jax.random.normal(jax.random.fold_in(key, 1), (3, 16))


def matmul(x, w, *, scale: float = 1.0):
    """Multiply."""
    return scale * (x @ w)


# -- decorator and call ------------------------------------------------------------------------------------------------


def test_signature_name_and_documentation_are_kept():
    f = implicit(matmul)
    assert inspect.signature(f) == inspect.signature(matmul)
    assert (f.__name__, f.__doc__, f.__module__) == ("matmul", "Multiply.", matmul.__module__)
    assert f.__wrapped__ is matmul


def test_implicit_and_use_implicit_are_one():
    assert implicit is use_implicit
    assert repr(implicit) == "implicit"


@pytest.mark.parametrize(
    "make",
    [
        lambda: implicit(matmul),
        lambda: implicit(functools.partial(matmul, scale=1.0)),
        lambda: implicit(jax.jit(matmul)),
        lambda: implicit(jax.jit(matmul, static_argnames="scale")),
        lambda: implicit(implicit(matmul)),
        lambda: implicit(jnp.matmul),
        lambda: implicit(lambda x, w: jax.lax.dot(x, w)),
        lambda: jax.jit(implicit(matmul)),
    ],
    ids=["function", "partial", "jit", "jit static", "twice", "jnp", "lax", "inside jit"],
)
def test_callables(make, q, x):
    out = make()(x, q)
    assert_same(out, x @ dense(q))


def test_keywords(q, x):
    f = implicit(matmul)
    assert_same(f(x, w=q, scale=2.0), 2.0 * (x @ dense(q)))
    assert_same(f(w=q, x=x), x @ dense(q))


def test_methods_static_methods_and_callable_objects(q, w, x, diary):
    class Layer:
        def __init__(self, w):
            self.w = w

        @implicit
        def forward(self, x):
            return jnp.dot(x, self.w)

        @staticmethod
        @implicit
        def apply(x, w):
            return jnp.dot(x, w)

        @classmethod
        @implicit
        def make(cls, w):
            return cls(w * 2.0)

        def __call__(self, x):
            return jnp.dot(x, self.w)

    layer = Layer(q)
    for out in (layer.forward(x), Layer.apply(x, q), implicit(layer)(x)):
        assert_same(out, x @ w)
    assert_dispatched()


def test_trees_in_and_out(q, w, x, diary):
    @implicit
    def f(tree):
        return {"y": tree["x"] @ tree["w"][0], "w": tree["w"][0] * 2.0, "same": tree["w"][0], "n": None, "k": 3}

    out = f({"x": x, "w": (q, 1)})
    assert_same(out["y"], x @ w)
    assert isinstance(out["w"], Block8)
    assert out["same"] is q
    assert (out["n"], out["k"]) == (None, 3)
    assert_dispatched()


def test_nothing_implicit_costs_no_change(x):
    f = lambda x: {"y": jnp.sin(x), "s": "text"}  # noqa: E731
    out = implicit(f)(x)
    assert out["s"] == "text"
    np.testing.assert_array_equal(out["y"], jnp.sin(x))


def test_nested_calls_share_values(q, w, x, diary):
    @implicit
    def inner(y, w):
        return y @ w

    @implicit
    def outer(x, w):
        return inner(x, w) + inner(x, w * 2.0)

    assert_same(outer(x, q), 3 * (x @ w), rtol=2e-5)
    assert_dispatched()


def test_an_inner_function_that_closes_over_an_outer_value(q, w, x, diary):
    @implicit
    def outer(x, w):
        return implicit(lambda y: y @ w)(x)

    assert_same(outer(x, q), x @ w)
    assert_dispatched()


def test_what_a_traced_value_looks_like(q):
    seen = {}

    @implicit
    def f(w):
        seen.update(shape=w.shape, dtype=w.dtype, ndim=w.ndim, size=w.size, array=isinstance(w, jax.Array))
        seen["typeof"] = jax.typeof(w).shape
        seen["materialize"] = w.materialize().shape
        return w

    assert f(q) is q
    assert seen == {
        "shape": (16, 4),
        "dtype": jnp.float32,
        "ndim": 2,
        "size": 64,
        "array": True,
        "typeof": (16, 4),
        "materialize": (16, 4),
    }


# -- the block ---------------------------------------------------------------------------------------------------------


def test_blocks_dispatch_functions_of_jnp(q, w, x, diary):
    with implicit:
        y = jnp.dot(x, q)
        z = jax.jit(jnp.dot)(x, q)
        doubled = q * 2.0
        total = jnp.dot(x, doubled)
    assert_dispatched()
    assert_same(y, x @ w)
    assert_same(z, x @ w)
    assert_same(total, 2 * (x @ w), rtol=2e-5)


def test_values_of_a_block_may_leave_it(q, x):
    with implicit:
        doubled = jnp.multiply(q, 2.0)
    assert doubled.shape == q.shape
    assert_same(np.asarray(doubled), 2 * dense(q))
    assert_same(jnp.sin(doubled), jnp.sin(2 * dense(q)))
    assert_same(x @ doubled, 2 * (x @ dense(q)), rtol=2e-5)
    assert_same(jax.jit(lambda d: d + 1)(doubled), 2 * dense(q) + 1)
    with implicit:
        again = jnp.dot(x, doubled)
    assert_same(again, 2 * (x @ dense(q)), rtol=2e-5)


def test_blocks_nest_and_reenter(q, w, x, diary):
    with implicit, implicit:
        with implicit:
            a = jnp.dot(x, q)
        b = jnp.dot(x, q)
    c = x @ q
    assert_dispatched()
    for out in (a, b, c):
        assert_same(out, x @ w)


def test_a_block_ends_on_exceptions(q):
    before = jax.make_jaxpr(jnp.sin)(1.0)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), implicit:
            raise ZeroDivisionError
    assert str(jax.make_jaxpr(jnp.sin)(1.0)) == str(before)
    assert isinstance(jnp.sin(1.0), jax.Array)
    assert type(jnp.multiply(q, 2.0)) is not Block8
    assert not isinstance(jnp.multiply(q, 2.0), ImplicitArray)


def test_a_block_inside_jit_and_a_jit_inside_a_block(q, w, x, diary):
    @jax.jit
    def f(x, w):
        with implicit:
            return jnp.dot(x, w)

    assert_same(f(x, q), x @ w)
    with implicit:
        assert_same(f(x, q), x @ w)
        g = jax.jit(lambda x: jnp.dot(x, q))  # closed over
        assert_same(g(x), x @ w)
    assert_dispatched()


def test_a_function_compiled_outside_dispatches_inside_a_block(q, w, x, diary):
    f = jax.jit(lambda x, w: jnp.dot(x, w))
    f(x, w)
    with implicit:
        out = f(x, q)
    assert_same(out, x @ w)
    assert_dispatched()


# -- debugging switches ------------------------------------------------------------------------------------------------


def program(x, w):
    y = jax.jit(jnp.tanh)(x @ w)
    c, ys = jax.lax.scan(lambda c, row: (c + (row @ w).sum(), row @ w), 0.0, x)
    return jax.lax.cond(c > 0, lambda: y, lambda: y * 2) + ys


def expected(x, w):
    return program(x, jnp.asarray(dense(w)))


def test_leak_checking(q, x, leak_check):
    assert_same(implicit(program)(x, q), expected(x, q))
    assert_same(jax.jit(implicit(program))(x, q), expected(x, q))
    assert_same(jax.grad(lambda x: implicit(program)(x, q).sum())(x), jax.grad(lambda x: expected(x, q).sum())(x))
    with implicit:
        out = jax.jit(lambda x: jnp.dot(x, q))(x)
    assert_same(out, x @ dense(q))


@pytest.mark.parametrize(
    "switch", ["jax_disable_jit", "jax_debug_nans", "jax_debug_infs", "jax_enable_checks", "jax_numpy_rank_promotion"]
)
def test_switches(switch, q, x):
    before = getattr(jax.config, switch)
    value = "raise" if switch == "jax_numpy_rank_promotion" else True
    want = expected(x, q)
    jax.config.update(switch, value)
    try:
        assert_same(implicit(program)(x, q), want)
        assert_same(jax.jit(implicit(program))(x, q), want)
        with implicit:
            assert_same(jnp.dot(x, q), x @ dense(q))
    finally:
        jax.config.update(switch, before)


def test_debug_nans_still_finds_them():
    q = Plain(jnp.zeros(3), jnp.ones(3))
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        jax.block_until_ready(implicit(lambda q: q / q)(q))


# -- concrete values ---------------------------------------------------------------------------------------------------


def test_numbers_can_be_read_eagerly():
    q = Plain(jnp.array([0.0, 2.0, 3.0]), jnp.ones(3))

    @implicit
    def f(q):
        assert bool(q[1] > 1)
        assert int(q[1]) == 2
        assert float(q.sum()) == 5.0
        assert q.sum().item() == 5.0
        assert q.tolist() == [0.0, 2.0, 3.0]
        assert q[q > 1].shape == (2,)
        assert jnp.ones(3)[q > 1].shape == (2,)
        assert [a.tolist() for a in jnp.nonzero(q)] == [[1, 2]]
        assert jnp.trim_zeros(q).shape == (2,)
        assert np.asarray(q).tolist() == [0.0, 2.0, 3.0]
        return jnp.unique(q).shape

    assert f(q) == (3,)


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (lambda q: bool(q[0] > 0), jax.errors.TracerBoolConversionError),
        (lambda q: int(q[0]), jax.errors.ConcretizationTypeError),
        (lambda q: q.sum().item(), jax.errors.ConcretizationTypeError),
        (lambda q: q[q > 1], jax.errors.NonConcreteBooleanIndexError),
        (lambda q: jnp.nonzero(q), jax.errors.ConcretizationTypeError),
        (lambda q: np.asarray(q), jax.errors.TracerArrayConversionError),
    ],
)
def test_under_jit_jax_raises_its_own_errors(read, error):
    q = Plain(jnp.array([0.0, 2.0]), jnp.ones(2))
    with pytest.raises(error):
        jax.jit(implicit(lambda q: jnp.asarray(read(q))))(q)
    with pytest.raises(error):
        implicit(jax.jit(lambda q: jnp.asarray(read(q))))(q)
    with pytest.raises(error):
        jax.jit(lambda q: jnp.asarray(read(q)))(q)


def test_lora_over_quantized_inside_a_block(q, w, x, diary):
    lora = Lora(q, jnp.ones((16, 1)), jnp.ones((1, 4)))
    with implicit:
        y = jax.jit(jnp.dot)(x, lora)
    assert_dispatched()
    assert_same(y, x @ (w + 1))


def test_a_seed_of_the_system_inside_implicit():
    with implicit:
        assert stateful_rng().normal(size=(3,)).shape == (3,)
    with pytest.raises(TypeError, match="explicit seed"):
        jax.eval_shape(implicit(lambda: stateful_rng().normal(size=(3,))))
