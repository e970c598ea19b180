"""jit, checkpoint, vmap, differentiation, callbacks and other calls, with implicit arrays inside and outside."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from eformer.jaximus import implicit, register

from .toys import Block8, Lora, Plain, assert_dispatched, assert_same, dense, dots, forget


@pytest.fixture
def p(key):
    a, b = jax.random.split(key)
    return Plain(jax.random.normal(a, (4, 16)), jax.random.uniform(b, (4, 16)))


# -- jit ---------------------------------------------------------------------------------------------------------------


def test_an_inner_jit_stays_a_call_and_keeps_its_name(q, x):
    @jax.jit
    def layer_of_my_model(x, w):
        return jnp.tanh(x @ w)

    jaxpr = jax.make_jaxpr(implicit(lambda x, w: layer_of_my_model(x, w) + layer_of_my_model(x, w)))(x, q)
    calls = [e for e in jaxpr.eqns if e.params.get("name") == "layer_of_my_model"]
    assert len(calls) == 2
    assert calls[0].params["jaxpr"] is calls[1].params["jaxpr"]


def test_an_inner_jit_is_traced_once(q, w, x):
    f = jax.jit(lambda x, w: x @ w)
    forget()
    for _ in range(3):
        assert_same(implicit(f)(x, q), x @ w)
    assert len(dots()) == 1
    implicit(lambda x, w: f(x, w) + f(x, w))(x, q)
    assert len(dots()) == 1


def test_static_arguments(q, w, x):
    f = jax.jit(lambda x, w, n, mode: (x @ w) * n if mode == "a" else x @ w, static_argnums=2, static_argnames="mode")
    assert_same(implicit(lambda x, w: f(x, w, 3, mode="a"))(x, q), (x @ w) * 3)
    assert_same(implicit(f)(x, q, 2, mode="b"), x @ w)


def test_donated_arguments_are_deleted(q, x):
    f = jax.jit(lambda x, w: (x + 1, w * 2.0), donate_argnums=(0, 1))
    x = jnp.array(x)
    own = jax.tree.map(jnp.array, q)
    want = 2 * dense(own)
    _, doubled = implicit(f)(x, own)
    assert x.is_deleted()
    assert own.codes.is_deleted()
    assert own.scale.is_deleted()
    assert_same(doubled, want)


def test_compiler_options_and_keep_unused(q, w, x):
    f = jax.jit(lambda x, w, _: x @ w, compiler_options={"xla_cpu_enable_fast_math": False}, keep_unused=True)
    assert_same(implicit(f)(x, q, q), x @ w)
    with pytest.raises(Exception, match="no_such_option"):
        implicit(jax.jit(lambda x: x * 2, compiler_options={"no_such_option": "1"}))(q)


def test_inlined_jit(q, w, x):
    f = jax.jit(lambda x, w: x @ w, inline=True)
    calls = lambda jaxpr: sum(e.params.get("name") == "<lambda>" for e in jaxpr.eqns)  # noqa: E731
    plain = jax.make_jaxpr(lambda x, w: f(x, w))(x, w)
    assert calls(jax.make_jaxpr(implicit(f))(x, q)) == calls(plain)  # newer releases inline later, while lowering
    assert_same(implicit(f)(x, q), x @ w)


def test_implicit_results_and_unused_arguments(q, x):
    f = jax.jit(lambda x, w, tree: {"w": w, "d": w * 2.0, "x": x, "t": tree})
    out = implicit(f)(x, q, {"a": q})
    assert all(isinstance(out[k], Block8) for k in ("w", "d"))
    assert isinstance(out["t"]["a"], Block8)
    assert_same(out["d"], 2 * dense(q))


def test_handlers_for_jit(key):
    class Opaque(Plain):
        pass

    seen = []

    @register("pjit")
    def _(primitive, a: Opaque, b: jax.Array, *, name, **params):
        seen.append(name)
        return NotImplemented

    def scale(a, b):
        return jax.lax.mul(a, b)

    a = Opaque(jnp.ones((2, 2)), jnp.ones((2, 2)))
    assert_same(implicit(jax.jit(scale))(a, jnp.full((2, 2), 3.0)), jnp.full((2, 2), 3.0))
    assert seen == ["scale"]


# -- ahead of time -----------------------------------------------------------------------------------------------------


def test_lowering_compiling_and_exporting(q, w, x):
    f = jax.jit(implicit(lambda x, w: jnp.tanh(x @ w)))
    want = jnp.tanh(x @ w)
    assert_same(f.lower(x, q).compile()(x, q), want)
    shapes = jax.eval_shape(f, x, q)
    assert (shapes.shape, shapes.dtype) == (want.shape, want.dtype)
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), q)
    assert jax.eval_shape(f, x, abstract).shape == want.shape
    assert f.trace(x, abstract).lower().compile() is not None
    exported = jax.export.export(jax.jit(lambda x: f(x, q)))(jax.ShapeDtypeStruct(x.shape, x.dtype))
    assert_same(exported.call(x), want)
    assert_same(jax.jit(exported.call)(x), want)
    leaves, treedef = jax.tree.flatten(q)
    flat = jax.jit(lambda x, *leaves: f(x, jax.tree.unflatten(treedef, leaves)))
    exported = jax.export.export(flat)(x, *leaves)
    assert_same(exported.call(x, *leaves), want)


def test_implicit_around_aot_objects(p):
    f = jax.jit(jnp.sin).lower(p.materialize()).compile()
    assert_same(f(p.materialize()), jnp.sin(p.materialize()))


# -- differentiation ---------------------------------------------------------------------------------------------------


def loss(x, w):
    return (jnp.tanh(x @ w) ** 2).sum()


@pytest.mark.parametrize(
    "wrap", [implicit, lambda f: f, lambda f: implicit(jax.jit(f)), lambda f: jax.jit(implicit(f))]
)
def test_gradients_outside(wrap, q, w, x):
    f = wrap(loss)
    assert_same(jax.grad(f)(x, q), jax.grad(loss)(x, w), rtol=1e-4)
    value, g = jax.value_and_grad(f)(x, q)
    assert_same((value, g), jax.value_and_grad(loss)(x, w), rtol=1e-4)


@pytest.mark.parametrize(
    "transform",
    [
        lambda x, w: jax.grad(loss)(x, w),
        lambda x, w: jax.value_and_grad(loss)(x, w),
        lambda x, w: jax.vjp(lambda x: x @ w, x)[1](jnp.ones((4, 8))),
        lambda x, w: jax.jvp(lambda x: jnp.sin(x @ w), (x,), (x,)),
        lambda x, w: jax.linearize(lambda x: jnp.sin(x @ w), x)[1](x),
        lambda x, w: jax.jacfwd(lambda v: jnp.sin(v @ w))(x[0]),
        lambda x, w: jax.jacrev(lambda v: jnp.sin(v @ w))(x[0]),
        lambda x, w: jax.hessian(lambda v: jnp.sin(v @ w).sum())(x[0]),
        lambda x, w: jax.linear_transpose(lambda x: x @ w, x)(jnp.ones((4, 8))),
        lambda x, w: jax.grad(jax.checkpoint(loss))(x, w),
        lambda x, w: jax.vmap(jax.grad(lambda v: loss(v, w)))(x),
        lambda x, w: jax.jit(jax.grad(jax.jit(loss)))(x, w),
    ],
    ids=[
        "grad",
        "value_and_grad",
        "vjp",
        "jvp",
        "linearize",
        "jacfwd",
        "jacrev",
        "hessian",
        "transpose",
        "remat",
        "vmap-grad",
        "jit-grad-jit",
    ],
)
def test_gradients_inside(transform, q, w, x):
    assert_same(implicit(transform)(x, q), transform(x, w), rtol=1e-4)
    assert_same(jax.jit(implicit(transform))(x, q), transform(x, w), rtol=1e-4)


def test_gradients_with_respect_to_the_children(p):
    f = lambda p: (jnp.sin(p) ** 2).sum()  # noqa: E731
    want = jax.grad(lambda a, b: f(a * b), argnums=(0, 1))(p.values, p.factor)
    for g in (jax.grad(implicit(f)), jax.grad(f), jax.jit(jax.grad(implicit(jax.jit(f))))):
        out = g(p)
        assert isinstance(out, Plain)
        assert_same((out.values, out.factor), want)
    tangent = jax.tree.map(jnp.ones_like, p)
    _, t = jax.jvp(implicit(f), (p,), (tangent,))
    assert_same(t, sum(g.sum() for g in want), rtol=1e-4)


def test_lora_training_touches_only_the_factors(q, w, x):
    lora = Lora(q, jnp.ones((16, 2)) * 0.1, jnp.ones((2, 8)) * 0.1)

    def f(ab, x):
        return loss(x, Lora(q, *ab))

    def ref(ab, x):
        return loss(x, w + ab[0] @ ab[1])

    assert_same(jax.jit(jax.grad(f))((lora.a, lora.b), x), jax.grad(ref)((lora.a, lora.b), x), rtol=1e-4)


# -- vmap --------------------------------------------------------------------------------------------------------------


def test_vmap_over_dense_operands_keeps_dispatch(q, w, x):
    forget()
    out = jax.vmap(implicit(lambda v, w: v @ w), in_axes=(0, None))(x, q)
    assert_dispatched()
    assert_same(out, x @ w)
    assert_same(jax.vmap(lambda v: v @ q, in_axes=1, out_axes=1)(x.T), (x @ w).T)
    assert_same(implicit(jax.vmap(lambda v, w: v @ w, in_axes=(0, None), out_axes=-1))(x, q), (x @ w).T)
    assert_same(implicit(jax.vmap(lambda v, w: v @ w, in_axes=(None, 1)))(x, q), jnp.moveaxis(x @ w, 1, 0))


def test_vmap_over_stacks(key, x):
    ws = jax.random.normal(key, (3, 16, 8))
    stack = jax.vmap(Block8.quantize)(ws)
    want = jnp.einsum("bk,lkn->lbn", x, jnp.asarray(dense(stack)))
    forget()
    outs = [
        jax.vmap(implicit(lambda w, x: x @ w), in_axes=(0, None))(stack, x),
        implicit(jax.vmap(lambda w, x: x @ w, in_axes=(0, None)))(stack, x),
        jax.vmap(lambda w: x @ w)(stack),
        jax.jit(jax.vmap(lambda w: x @ w))(stack),
        implicit(lambda w, x: jax.vmap(jnp.dot, (None, 0))(x, w))(stack, x),
    ]
    for out in outs:
        assert_same(out, want)
    assert dots()


def test_vmap_axis_names_and_sizes(q, w, x):
    f = lambda v, w: jax.lax.psum(v @ w, "rows")  # noqa: E731
    assert_same(jax.vmap(implicit(f), in_axes=(0, None), axis_name="rows")(x, q)[0], (x @ w).sum(0))
    assert_same(implicit(jax.vmap(f, in_axes=(0, None), axis_name="rows"))(x, q)[0], (x @ w).sum(0))
    g = jax.vmap(lambda w: w * 2.0, in_axes=None, axis_size=3, out_axes=None)
    assert_same(implicit(g)(q), 2 * w)


def test_vmap_of_a_type_without_handlers(p):
    w = p.materialize()
    stack = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), p)
    assert_same(jax.vmap(implicit(jnp.sin))(stack), jnp.stack([jnp.sin(w), jnp.sin(4 * w)]))
    assert_same(implicit(jax.vmap(jnp.sin))(p), jnp.sin(w))
    assert_same(implicit(jax.vmap(jnp.dot, in_axes=(0, 0)))(p, p), (w * w).sum(1))
    assert_same(implicit(jax.vmap(lambda r, y: r - y, in_axes=(1, None)))(p, 1.0), w.T - 1)


# -- checkpoint --------------------------------------------------------------------------------------------------------

POLICIES = {
    "none": None,
    "everything": jax.checkpoint_policies.everything_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("hidden"),
}


@pytest.mark.parametrize("name", POLICIES)
def test_checkpoint_policies(name, q, w, x):
    from jax.ad_checkpoint import checkpoint_name

    @functools.partial(jax.checkpoint, policy=POLICIES[name])
    def f(x, w):
        return loss(checkpoint_name(jnp.tanh(x @ w), "hidden"), w.T)

    assert_same(implicit(jax.grad(f))(x, q), jax.grad(f)(x, w), rtol=1e-4)
    assert_same(jax.grad(implicit(f))(x, q), jax.grad(f)(x, w), rtol=1e-4)
    assert_same(implicit(f)(x, q), f(x, w), rtol=1e-4)


def test_checkpoint_keeps_the_call(q, x):
    jaxpr = str(jax.make_jaxpr(jax.grad(implicit(jax.checkpoint(loss))))(x, q))
    assert "remat" in jaxpr or "checkpoint" in jaxpr


# -- callbacks, kernels, references ------------------------------------------------------------------------------------


def test_callbacks(p, capfd):
    w = p.materialize()
    spec = jax.ShapeDtypeStruct(p.shape, p.dtype)

    def f(p):
        return jax.pure_callback(lambda a: np.sin(a), spec, p, vmap_method="sequential")

    for g in (implicit(f), implicit(jax.jit(f)), jax.jit(f), f):
        assert_same(g(p), jnp.asarray(np.sin(w)))
    seen = []
    g = implicit(lambda p: jax.experimental.io_callback(lambda a: seen.append(a.shape), None, p))
    jax.block_until_ready(g(p))
    implicit(lambda p: jax.debug.callback(lambda a: seen.append(a.sum()), p))(p)
    implicit(jax.jit(lambda p: jax.debug.print("shape {s} first {v}", s=str(p.shape), v=p[0, 0] * 0)))(p)
    jax.effects_barrier()
    assert seen[0] == (4, 16)
    np.testing.assert_allclose(seen[1], w.sum(), rtol=1e-4)
    assert "shape (4, 16)" in capfd.readouterr().out


def test_pallas_kernels_take_implicit_arrays(p):
    def kernel(a, b, o):
        o[...] = a[...] + 2 * b[...]

    call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(p.shape, p.dtype), interpret=True)
    w = p.materialize()
    assert_same(implicit(call)(p, w), 3 * w)
    assert_same(jax.jit(implicit(call))(w, p), 3 * w)


def test_foreign_functions_take_implicit_arrays(key):
    square = Plain(jax.random.normal(key, (4, 4)), jnp.full((4, 4), 2.0))
    w = square.materialize()
    lu_factor = jax.scipy.linalg.lu_factor
    assert_same(implicit(lu_factor)(square), lu_factor(w), rtol=1e-4)  # also loads LAPACK
    outs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (((4, 4), "f4"), ((4,), "i4"), ((), "i4"))]
    call = jax.ffi.ffi_call("lapack_sgetrf_ffi", outs)
    assert_same(jax.jit(implicit(call))(square), call(w))
    assert "lapack_sgetrf_ffi" in jax.jit(implicit(call)).lower(square).as_text()


def test_references_hold_the_dense_value(p):
    def f(p):
        ref = jax.new_ref(p)
        ref[...] += 1
        return ref[...]

    w = p.materialize()
    assert_same(implicit(f)(p), w + 1)
    assert_same(jax.jit(implicit(f))(p), w + 1)
    assert_same(implicit(jax.jit(f))(p), w + 1)


def test_pmap(p):
    if not hasattr(jax, "pmap"):
        assert jax.__version_info__ > (0, 12)
        return
    stack = jax.tree.map(lambda a: jnp.stack([a, a + 1]), p)
    want = jnp.sin(stack.materialize())
    assert_same(jax.pmap(implicit(jnp.sin))(stack), want)
    assert_same(implicit(jax.pmap(jnp.sin))(stack), want)
