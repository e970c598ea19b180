"""scan, while, cond and what is built on them, with implicit xs, constants, carries and outputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from eformer.jaximus import implicit, register

from .toys import (
    Block8,
    FlatCodes,
    Plain,
    Transposed,
    assert_dispatched,
    assert_no_stack,
    assert_same,
    dense,
    dots,
    forget,
)

LAYERS = 3


@pytest.fixture
def stack(key):
    return jax.vmap(Block8.quantize)(jax.random.normal(key, (LAYERS, 8, 8)) / 3)


@pytest.fixture
def ws(stack):
    return jnp.asarray(dense(stack))


@pytest.fixture
def q(stack):
    return jax.tree.map(lambda a: a[0], stack)


@pytest.fixture
def w(ws):
    return ws[0]


@pytest.fixture
def x(key):
    return jax.random.normal(jax.random.fold_in(key, 1), (4, 8))


def both(f, *implicit_args):
    """`f` under implicit, eagerly and compiled both ways round."""
    return [implicit(f)(*implicit_args), implicit(jax.jit(f))(*implicit_args), jax.jit(implicit(f))(*implicit_args)]


# -- scan --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"unroll": 2}, {"unroll": True}], ids=str)
def test_scan_over_a_stack(options, stack, ws, x):
    def f(x, ws):
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), (c @ w).sum()), x, ws, **options)

    forget()
    outs = both(f, x, stack)
    assert_dispatched()
    assert_no_stack(LAYERS)
    for out in outs:
        assert_same(out, f(x, ws))
    assert_same(jax.jit(f)(x, stack), f(x, ws))  # operators dispatch without a wrapper


def test_scan_gradients(stack, ws, x):
    def f(x, ws):
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)[0].sum()

    for g in (
        jax.grad(implicit(f)),
        implicit(jax.grad(f)),
        jax.jit(jax.grad(f)),
        implicit(jax.grad(jax.checkpoint(f))),
    ):
        assert_same(g(x, stack), jax.grad(f)(x, ws), rtol=1e-4)


def test_scan_with_constants_and_implicit_outputs(q, w, x):
    def f(x, w):
        return jax.lax.scan(lambda c, s: (c + (x @ w).sum(), w * s), 0.0, jnp.arange(3.0))

    for total, ys in both(f, x, q):
        assert isinstance(ys, Block8)
        assert ys.shape == (3, 8, 8)
        assert_same((total, ys), f(x, w), rtol=1e-4)


def test_scan_carry_that_keeps_its_type(q, w):
    def f(w):
        return jax.lax.scan(lambda c, _: (c * 2.0, None), w, None, length=3)[0]

    for out in both(f, q):
        assert isinstance(out, Block8)
        assert_same(out, 8 * w)


def test_scan_carry_that_loses_its_type_is_dense_from_the_start(q, w):
    def f(w):
        return jax.lax.scan(lambda c, _: (jnp.sin(c), c.sum()), w, None, length=3)

    for out in both(f, q):
        assert isinstance(out[0], jax.Array)
        assert_same(out, f(w), rtol=1e-4)


def test_scan_carries_that_depend_on_each_other(q, w):
    def f(w):
        def body(carry, _):
            a, b, c = carry
            return (b, c, jnp.cos(a)), None

        return jax.lax.scan(body, (w, w, w), None, length=4)[0]

    for out in both(f, q):
        assert_same(out, f(w), rtol=1e-4)


def test_scan_whose_dense_carry_becomes_implicit(q, w):
    def f(c, w):
        return jax.lax.scan(lambda c, _: (w * 2.0, c.sum()), c, None, length=2)

    for out in both(f, jnp.zeros((8, 8)), q):
        assert_same(out, f(jnp.zeros((8, 8)), w), rtol=1e-4)


@pytest.mark.parametrize("length", [0, 1])
def test_short_scans(length, stack, x):
    short = jax.tree.map(lambda a: a[:length], stack)
    ref = jnp.asarray(dense(short))

    def f(x, ws):
        return jax.lax.scan(lambda c, w: (c @ w, w * 2.0), x, ws)

    for out in both(f, x, short):
        assert_same(out, f(x, ref))


def test_scan_over_types_that_declare_little(key):
    ws = jax.random.normal(key, (3, 4, 4))
    for stack in (jax.vmap(lambda s: Transposed(s, jnp.float32(2)))(ws), jax.vmap(FlatCodes.quantize)(ws)):
        ref = jnp.asarray(dense(stack))
        f = lambda ws: jax.lax.scan(lambda c, w: (c @ w, w.sum(0)), jnp.ones((2, 4)), ws)  # noqa: E731
        for out in both(f, stack):
            assert_same(out, f(ref), rtol=1e-4)


def test_scan_over_rows_of_one_matrix_is_right_though_dense(key):
    square = jax.random.normal(key, (4, 4))
    for q in (Transposed(square, jnp.ones((4, 4))), Plain(square, square), FlatCodes.quantize(square)):
        ref = jnp.asarray(dense(q))
        f = lambda w: jax.lax.scan(lambda c, row: (c + row, row * 2), jnp.zeros(4), w)  # noqa: E731
        for out in both(f, q):
            assert_same(out, f(ref))


def test_handlers_for_scan(q):
    class Opaque(Plain):
        pass

    seen = []

    @register("scan")
    def _(*operands: Opaque | jax.Array, length, **params):
        seen.append(length)
        return NotImplemented

    o = Opaque(jnp.ones((4, 3)), jnp.ones((4, 3)))
    out = implicit(lambda o: jax.lax.scan(lambda c, r: (c + r.sum(), None), 0.0, o)[0])(o)
    assert float(out) == 12.0
    assert seen == [4]


# -- while and fori ----------------------------------------------------------------------------------------------------


def test_while_with_an_implicit_carry_and_condition(q, w):
    def f(w):
        return jax.lax.while_loop(
            lambda c: c[0] * 0 + c[1].sum() * 0 + c[0] < 3, lambda c: (c[0] + 1, c[1] * 2.0), (0.0, w)
        )

    for n, out in both(f, q):
        assert float(n) == 3
        assert_same(out, 8 * w)


def test_while_with_constants_on_both_sides(q, w, x):
    def f(x, w):
        cond = lambda c: (c[1] @ w).sum() * 0 + c[0] < 2  # noqa: E731
        return jax.lax.while_loop(cond, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0.0, x))[1]

    for out in both(f, x, q):
        assert_same(out, f(x, w))


def test_while_carry_that_loses_its_type(q, w):
    def f(w):
        return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.cos(c[1])), (0, w))[1]

    for out in both(f, q):
        assert_same(out, f(w))


def test_fori_loops(q, w, x):
    def f(x, w):
        return jax.lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ w) + i, x)

    forget()
    outs = both(f, x, q)
    assert_dispatched()
    for out in outs:
        assert_same(out, f(x, w), rtol=1e-4)
    bounded = implicit(lambda n, x, w: jax.lax.fori_loop(0, n, lambda i, c: c @ w, x))
    assert_same(bounded(jnp.int32(2), x, q), x @ w @ w, rtol=1e-4)


# -- cond and switch ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pick", [True, False])
def test_cond_with_operands_and_closures(pick, q, w, x):
    def f(p, x, w):
        a = jax.lax.cond(p, lambda x, w: x @ w, lambda x, w: (x @ w) * 2, x, w)
        b = jax.lax.cond(p, lambda: x @ w, lambda: x)
        return a, b

    for out in both(f, jnp.array(pick), x, q):
        assert_same(out, f(jnp.array(pick), x, w))
    assert dots()


def test_cond_keeps_the_type_only_if_branches_agree(q, w):
    agree = lambda p, w: jax.lax.cond(p, lambda: w * 2.0, lambda: w)  # noqa: E731
    differ = lambda p, w: jax.lax.cond(p, lambda: w * 2.0, lambda: jnp.sin(w))  # noqa: E731
    for p in (True, False):
        for out in both(agree, jnp.array(p), q):
            assert isinstance(out, Block8)
            assert_same(out, agree(p, w))
        for out in both(differ, jnp.array(p), q):
            assert isinstance(out, jax.Array)
            assert_same(out, differ(p, w))


def test_switch_and_implicit_predicates(q, w, x):
    branches = [lambda x, w: x @ w, lambda x, w: x, lambda x, w: x * w.sum()]
    f = lambda i, x, w: jax.lax.switch(i, branches, x, w)  # noqa: E731
    for i in (0, 1, 2, 7):
        assert_same(implicit(f)(jnp.int32(i), x, q), f(jnp.int32(i), x, w), rtol=1e-4)
    index = Plain(jnp.int32(2), jnp.int32(1))
    assert_same(implicit(f)(index, x, w), f(2, x, w))


def test_cond_under_grad_and_vmap(q, w, x):
    def f(x, w):
        return jax.lax.cond(x.sum() > 0, lambda: (x @ w).sum(), lambda: (x @ w).sum() * 3)

    assert_same(implicit(jax.grad(f))(x, q), jax.grad(f)(x, w), rtol=1e-4)
    assert_same(jax.vmap(implicit(f), (0, None))(x, q), jax.vmap(f, (0, None))(x, w), rtol=1e-4)
    assert_same(implicit(jax.vmap(f, (0, None)))(x, q), jax.vmap(f, (0, None))(x, w), rtol=1e-4)


# -- map and associative_scan ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [None, 2])
def test_map_over_a_stack(batch_size, stack, ws, x):
    f = lambda x, ws: jax.lax.map(lambda w: x @ w, ws, batch_size=batch_size)  # noqa: E731
    for out in both(f, x, stack):
        assert_same(out, f(x, ws))


def test_associative_scan(stack, ws):
    f = lambda ws: jax.lax.associative_scan(jnp.matmul, ws)  # noqa: E731
    for out in both(f, stack):
        assert_same(out, f(ws), rtol=1e-4)
    g = lambda ws: jax.lax.associative_scan(jnp.add, ws, reverse=True)  # noqa: E731
    assert_same(implicit(g)(stack), g(ws))


def test_scan_inside_vmap_inside_grad(stack, ws, x):
    def f(x, ws):
        row = lambda r: jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), r, ws)[0].sum()  # noqa: E731
        return jax.vmap(row)(x).sum()

    assert_same(implicit(jax.grad(f))(x, stack), jax.grad(f)(x, ws), rtol=1e-4)
    assert_same(jax.jit(jax.grad(implicit(f)))(x, stack), jax.grad(f)(x, ws), rtol=1e-4)
