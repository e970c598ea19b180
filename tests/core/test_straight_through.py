"""`ste`: the forward pass of a function, the gradient of the identity."""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import pytest

from eformer.jaximus import implicit, ste

from .toys import Block8, assert_same, dense


@pytest.fixture
def x(key):
    return jax.random.normal(key, (8, 4))


@ste
def quantized(x, block=8):
    """Round trip."""
    return Block8.quantize(x, block)


def test_forward_is_the_function_and_backward_the_identity(x):
    assert_same(quantized(x), jnp.asarray(dense(Block8.quantize(x))), rtol=0, atol=0)
    ct = jnp.arange(32.0).reshape(8, 4)
    for f in (quantized, jax.jit(quantized), lambda x: quantized(x, block=4), lambda x: quantized(x, 4)):
        y, pull = jax.vjp(f, x)
        assert y.shape == x.shape
        assert_same(pull(ct)[0], ct, rtol=0, atol=0)
    _, t = jax.jvp(quantized, (x,), (ct,))
    assert_same(t, ct, rtol=0, atol=0)


def test_the_first_argument_by_its_name(x):
    ct = jnp.arange(32.0).reshape(8, 4)
    for f in (lambda x: quantized(x=x), lambda x: quantized(block=4, x=x)):
        assert_same(jax.vjp(f, x)[1](ct)[0], ct, rtol=0, atol=0)
    assert_same(quantized(block=4, x=x), quantized(x, 4), rtol=0, atol=0)
    with pytest.raises(TypeError, match=r"ste\(quantized\) .* 'x', which is missing"):
        quantized(block=4)


def test_name_and_documentation_are_kept():
    assert (quantized.__name__, quantized.__doc__) == ("quantized", "Round trip.")
    assert list(inspect.signature(quantized).parameters) == ["x", "block"]


def test_static_arguments_stay_python_values(x):
    @ste
    def f(x, mode, *, steps, dtype):
        assert mode == "round"
        assert steps == (1, 2)
        return jnp.round(x).astype(dtype)

    out = f(x, "round", steps=(1, 2), dtype=jnp.float32)
    assert_same(out, jnp.round(x))


def test_array_arguments_get_no_gradient(x):
    @ste
    def f(x, scale, *, offset):
        return jnp.round(x * scale) + offset

    g = jax.grad(lambda x, s, o: f(x, s, offset=o).sum(), argnums=(0, 1, 2))(x, jnp.float32(2), jnp.ones((8, 4)))
    assert_same(g[0], jnp.ones((8, 4)))
    assert_same(g[1], jnp.float32(0))
    assert_same(g[2], jnp.zeros((8, 4)))


def test_trees(x):
    f = ste(lambda tree: jax.tree.map(jnp.round, tree))
    tree = {"a": x, "b": [x[0]]}
    g = jax.grad(lambda t: sum((2 * leaf).sum() for leaf in jax.tree.leaves(f(t))))(tree)
    assert_same(g, jax.tree.map(lambda a: jnp.full_like(a, 2), tree))
    h = ste(lambda tree: {"w": Block8.quantize(tree["w"])})
    assert_same(h({"w": x})["w"], jnp.asarray(dense(Block8.quantize(x))))


def test_integers_and_mixed_trees(x):
    f = ste(lambda t: t)
    out = jax.grad(lambda t: f(t)["x"].sum(), allow_int=True)({"x": x, "n": jnp.arange(3)})
    assert_same(out["x"], jnp.ones_like(x))
    assert out["n"].dtype == jax.dtypes.float0


def test_transformations(x):
    f = lambda x: (quantized(x) ** 2).sum()  # noqa: E731
    want = 2 * jnp.asarray(dense(Block8.quantize(x)))
    for g in (
        jax.grad(f),
        jax.jit(jax.grad(f)),
        jax.grad(jax.checkpoint(f)),
        jax.grad(implicit(f)),
        implicit(jax.grad(f)),
    ):
        assert_same(g(x), want)
    batch = jnp.stack([x, 2 * x])
    assert_same(jax.vmap(jax.grad(f))(batch)[0], want)
    assert_same(jax.vmap(quantized)(batch)[0], quantized(x))
    scanned = jax.grad(lambda b: jax.lax.scan(lambda c, x: (c + f(x), None), 0.0, b)[0])(batch)
    assert_same(scanned[0], want)
    assert_same(jax.hessian(lambda v: (ste(jnp.round)(v) ** 2).sum())(jnp.array([0.3, 1.2])), 2 * jnp.eye(2))


def test_dtypes(x):
    f = ste(lambda x: x.astype(jnp.bfloat16))
    y, pull = jax.vjp(f, x)
    assert y.dtype == jnp.bfloat16
    assert pull(jnp.ones_like(y))[0].dtype == jnp.float32


def test_implicit_first_arguments(x):
    f = ste(jnp.round)
    q = Block8.quantize(x)
    assert_same(implicit(f)(q), jnp.round(dense(q)))
    assert_same(f(q), jnp.round(dense(q)))


def test_partials_and_wrong_shapes(x):
    assert_same(ste(functools.partial(jnp.round, decimals=1))(x), jnp.round(x, 1))
    with pytest.raises(ValueError, match=r"must return what it is given[\s\S]*float32\[8, 4\]"):
        ste(lambda x: x[0])(x)
    with pytest.raises(ValueError, match="must return what it is given"):
        ste(lambda x: (x, x))(x)


def test_closed_over_arrays_under_jit(x):
    @jax.jit
    def f(x, s):
        return jax.grad(lambda x: ste(lambda x: jnp.round(x * s))(x).sum())(x)

    assert_same(f(x, 2.0), jnp.ones_like(x))
