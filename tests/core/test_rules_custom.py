"""custom_jvp, custom_vjp, custom_vmap and shard_map, whose functions the user wrote for arrays."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from eformer.jaximus import implicit, register

from .toys import Plain, assert_dispatched, assert_same, forget


@pytest.fixture
def p(key):
    return Plain(jax.random.normal(key, (4, 3)), jnp.full((4, 3), 1.5))


# -- custom_jvp --------------------------------------------------------------------------------------------------------


@jax.custom_jvp
def odd_sine(x):
    return jnp.sin(x)


@odd_sine.defjvp
def _(primals, tangents):
    return odd_sine(*primals), 10 * tangents[0]  # a rule that shows itself


def test_custom_jvp_uses_the_users_rule(p):
    w = p.materialize()
    f = lambda p: odd_sine(p).sum()  # noqa: E731
    for g in (implicit(odd_sine), implicit(jax.jit(odd_sine)), jax.jit(implicit(odd_sine)), odd_sine):
        assert_same(g(p), jnp.sin(w))
    want = (10 * p.factor, 10 * p.values)
    # Outside implicit JAX flattens the array before the rule sees it, so only wrapped functions are differentiated.
    for g in (jax.grad(implicit(f)), jax.jit(jax.grad(implicit(jax.jit(f))))):
        out = g(p)
        assert_same((out.values, out.factor), want)
    inside = implicit(lambda p: jax.grad(lambda y: odd_sine(y * p).sum())(jnp.ones(p.shape)))
    assert_same(inside(p), 10 * w)
    assert_same(implicit(jax.vmap(odd_sine))(p), jnp.sin(w))


def test_custom_jvp_with_static_arguments_trees_and_closures(p):
    w = p.materialize()

    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def apply(f, tree):
        return {"y": f(tree["a"]) * tree["b"]}

    @apply.defjvp
    def _(f, primals, tangents):
        (tree,), (dot,) = primals, tangents
        return apply(f, tree), {"y": 7 * dot["a"] + 0 * dot["b"]}

    b = jnp.full((4, 3), 2.0)
    f = lambda a: apply(jnp.cos, {"a": a, "b": b})["y"]  # noqa: E731
    assert_same(implicit(f)(p), jnp.cos(w) * 2)
    assert_same(jax.grad(lambda p: implicit(f)(p).sum())(p).values, 7 * p.factor)
    closed = lambda b: apply(lambda a: a * p, {"a": b, "b": b})["y"]  # noqa: E731 - q closed over
    assert_same(implicit(closed)(b), 4 * w)
    assert_same(jax.grad(lambda b: implicit(closed)(b).sum())(b), jnp.full((4, 3), 7.0))


def test_custom_jvp_with_symbolic_zeros(p):
    seen = []

    @jax.custom_jvp
    def mul(a, b):
        return a * b

    def rule(primals, tangents):
        seen.append([type(t).__name__ for t in tangents])
        (a, b), (da, db) = primals, tangents
        zero = lambda t: isinstance(t, jax.custom_derivatives.SymbolicZero)  # noqa: E731
        out = (0 if zero(da) else da * b) + (0 if zero(db) else a * db)
        return a * b, jnp.broadcast_to(out, a.shape)

    mul.defjvp(rule, symbolic_zeros=True)
    y = jnp.full((4, 3), 3.0)
    g = jax.grad(lambda y: implicit(mul)(y, p).sum())(y)
    assert_same(g, p.materialize())
    assert "SymbolicZero" in seen[-1]


def test_standard_functions_with_custom_derivatives(p):
    w = p.materialize()
    for f in (jax.nn.relu, jax.nn.softplus, jax.nn.logsumexp):
        assert_same(jax.jit(implicit(f))(p), f(w))
        want = jax.jit(jax.grad(lambda v, f=f: f(v * p.factor).sum()))(p.values)
        assert_same(jax.jit(jax.grad(lambda p, f=f: implicit(f)(p).sum()))(p).values, want)


# -- custom_vjp --------------------------------------------------------------------------------------------------------


@jax.custom_vjp
def matmul(x, w):
    return x @ w


def _forward(x, w):
    return x @ w, (x, w)


def _backward(saved, ct):
    w = saved[1]
    return 2 * (ct @ w.T), jnp.zeros(w.shape, w.dtype)


matmul.defvjp(_forward, _backward)


def test_custom_vjp_dispatches_forward_and_uses_the_users_backward(q, w, x):
    forget()
    outs = [implicit(matmul)(x, q), implicit(jax.jit(matmul))(x, q), jax.jit(implicit(matmul))(x, q)]
    assert_dispatched()
    for out in outs:
        assert_same(out, x @ w)
    f = lambda x, w: (matmul(x, w) ** 2).sum()  # noqa: E731
    want = jax.grad(f)(x, w)
    for g in (jax.grad(implicit(f)), implicit(jax.grad(f)), jax.jit(jax.grad(implicit(jax.jit(f))))):
        assert_same(g(x, q), want, rtol=1e-4)
    assert_same(implicit(jax.vmap(matmul, (0, None)))(x, q), x @ w)
    assert_same(jax.vmap(jax.grad(lambda v: implicit(f)(v, q)))(x), want, rtol=1e-4)


def test_custom_vjp_with_static_arguments_and_trees(p):
    w = p.materialize()

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
    def f(power, tree, name):
        return tree["a"] ** power + tree["b"]

    f.defvjp(
        lambda power, tree, name: (f(power, tree, name), tree["a"]),
        lambda power, name, a, ct: ({"a": 100 * ct * power, "b": ct},),
    )
    b = jnp.ones((4, 3))
    run = lambda a, b: f(2, {"a": a, "b": b}, "n").sum()  # noqa: E731
    assert_same(implicit(run)(p, b), (w**2 + 1).sum())
    ga, gb = jax.grad(implicit(run), argnums=(0, 1))(p, b)
    assert_same(ga.values, 200 * p.factor)
    assert_same(gb, b)


def test_custom_vjp_closing_over_an_implicit_array(q, w, x):
    def layer(x, w):
        @jax.custom_vjp
        def f(x):
            return x @ w

        f.defvjp(lambda x: (x @ w, None), lambda _, ct: (3 * (ct @ w.T),))
        return f(x).sum()

    want = jax.grad(layer)(x, w)
    assert_same(implicit(layer)(x, q), layer(x, w), rtol=1e-4)
    assert_same(jax.grad(implicit(layer))(x, q), want, rtol=1e-4)
    assert_same(implicit(jax.grad(layer))(x, q), want, rtol=1e-4)
    assert_same(jax.jit(jax.grad(lambda x: layer(x, q)))(x), want, rtol=1e-4)


def test_custom_vjp_whose_residuals_depend_on_what_is_differentiated(p):
    @jax.custom_vjp
    def add(x, y, w):
        return x + y + w.sum()

    def forward(x, y, w):
        return x.value + y.value + w.value.sum(), None if y.perturbed else []

    add.defvjp(forward, lambda saved, ct: (ct, 2 * ct, None), symbolic_zeros=True)

    @implicit
    def f(x, w, around):
        def step(carry, _):  # the loop finds out in a second pass that y moves, too
            x, y = carry
            return (add(x, y, w), x), None

        return jax.lax.scan(around(step), (x, 1.0), length=2)[0][0]

    for w in (p, p.materialize()):
        for around in (lambda step: step, implicit):
            assert_same(jax.grad(f)(1.0, w, around), jnp.float32(3.0))


def test_custom_vjp_with_symbolic_zeros(p):
    seen = []

    @jax.custom_vjp
    def mul(a, b):
        return a * b

    def forward(a, b):
        seen.append((a.perturbed, b.perturbed))
        return a.value * b.value, (a.value, b.value)

    mul.defvjp(forward, lambda saved, ct: (5 * ct * saved[1], ct * saved[0]), symbolic_zeros=True)
    y = jnp.full((4, 3), 3.0)
    g = jax.grad(lambda y: implicit(mul)(y, p).sum())(y)
    assert_same(g, 5 * p.materialize())
    assert seen[-1] == (True, False)


def test_handlers_for_custom_rules(p):
    class Opaque(Plain):
        pass

    seen = []

    @register("custom_jvp_call")
    def _(primitive, a: Opaque, **params):
        seen.append(primitive.name)
        return params["fun"](a)

    @register("custom_vjp_call")
    def _(primitive, a: jax.Array, b: Opaque, **params):
        seen.append(primitive.name)
        return [jnp.full((2, 3), 5.0)]

    o = Opaque(p.values, p.factor)
    assert_same(implicit(odd_sine)(o), jnp.sin(p.materialize()))
    assert_same(implicit(matmul)(jnp.ones((2, 4)), o), jnp.full((2, 3), 5.0))
    assert seen == ["custom_jvp_call", "custom_vjp_call"]


# -- custom_vmap -------------------------------------------------------------------------------------------------------


def test_custom_vmap(p):
    w = p.materialize()

    @jax.custom_batching.custom_vmap
    def f(a, b):
        return a * b

    @f.def_vmap
    def _(size, batched, a, b):
        a = a if batched[0] else jnp.broadcast_to(a, (size, *a.shape))
        b = b if batched[1] else jnp.broadcast_to(b, (size, *b.shape))
        return a * b + 1000, True

    assert_same(implicit(f)(p, w), w * w)
    assert_same(implicit(jax.vmap(f))(p, w), w * w + 1000)
    assert_same(jax.vmap(implicit(f), in_axes=(None, 0))(p, jnp.stack([w, w])), jnp.stack([w * w] * 2) + 1000)
    stack = jax.tree.map(lambda a: jnp.stack([a, a]), p)
    assert_same(jax.vmap(implicit(f), in_axes=(0, None))(stack, w), jnp.stack([w * w] * 2) + 1000)
    assert_same(implicit(lambda y, p: jax.vmap(lambda row: f(row, row))(p * y))(2.0, p), 4 * w * w + 1000)


# -- shard_map ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh():
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.mark.parametrize("compile_it", [False, True])
@pytest.mark.parametrize("spec", [P(None, "y"), P(None, None), P()], ids=str)
def test_shard_map_splits_the_children(compile_it, spec, mesh, q, w, x):
    def f(x, w):
        return x @ w

    g = jax.shard_map(f, mesh=mesh, in_specs=(P("x"), spec), out_specs=P("x", *spec[1:]), check_vma=True)
    g = jax.jit(g) if compile_it else g
    forget()
    out = implicit(g)(x, q)
    assert_dispatched()
    assert_same(out, x @ w)


def test_shard_map_that_cuts_blocks_goes_dense(mesh, q, w, x):
    f = lambda x, w: jax.lax.psum(x @ w, "x")  # noqa: E731
    g = jax.shard_map(f, mesh=mesh, in_specs=(P(None, "x"), P("x", None)), out_specs=P())
    for h in (implicit(g), implicit(jax.jit(g)), jax.jit(implicit(g))):
        assert_same(h(x, q), x @ w, rtol=1e-4)


def test_shard_map_with_a_closed_over_array_and_collectives(mesh, q, w, x):
    def f(x, w):
        g = jax.shard_map(lambda x: jax.lax.psum((x @ w).sum(), "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
        return g(x)

    assert_same(implicit(f)(x, q), (x @ w).sum(), rtol=1e-4)
    assert_same(jax.jit(implicit(f))(x, q), (x @ w).sum(), rtol=1e-4)
    assert_same(implicit(jax.jit(f))(x, q), (x @ w).sum(), rtol=1e-4)
    assert_same(implicit(jax.grad(f))(x, q), jax.grad(f)(x, w), rtol=1e-4)


def test_implicit_inside_shard_map(mesh, q, w, x):
    body = implicit(lambda x, w: x @ w)
    specs = jax.tree.map(lambda _: P(), q)
    g = jax.shard_map(body, mesh=mesh, in_specs=(P("x"), specs), out_specs=P("x"))
    assert_same(g(x, q), x @ w)
    assert_same(jax.jit(g)(x, q), x @ w)
    split = jax.tree.map(lambda _: P(None, "y"), q)
    g = jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(P("x"), split), out_specs=P("x", "y"))
    assert_same(jax.jit(g)(x, q), x @ w)


def test_handlers_for_shard_map(mesh, p):
    class Opaque(Plain):
        pass

    seen = []

    @register("shard_map")
    def _(primitive, a: Opaque, **params):
        seen.append(len(params["in_specs"]))
        return NotImplemented

    o = Opaque(p.values, p.factor)
    g = jax.shard_map(lambda a: a * 2, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    assert_same(implicit(g)(o), 2 * p.materialize())
    assert seen == [1]
