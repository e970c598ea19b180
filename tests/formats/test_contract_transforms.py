"""Transformations: jit inside and outside, grad, vmap, scan, cond, remat, all on quantized arrays."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eformer as ef
from eformer._formats.scaled.array import ScaledArray
from eformer.jaximus import SlicedBelowCoreError, implicit, materialization_policy

from .contract import FAST, FORMATS, check, dense, make, normal, seeded

K, N, L = 36, 20, 3
SOME = ("nf4", "nf4-double-last", "int8-matrix", "ternary", "codes", "nvfp4")
jit = functools.partial(jax.jit, compiler_options=FAST)


def body(x, q):
    """A bit of everything: a product, its transpose, a moved array, a lookup, and a dense operation."""
    h = jnp.tanh(x @ q)
    return h @ q.T + (q * 0.5).T[:2].sum() + jnp.where(h.sum() > 0, q, -q)[1, 2]


def inputs(name: str):
    rng = seeded(name)
    return normal(rng, 4, K), make(name, rng, K, N)


def stacked(name: str):
    rng = seeded(name, "stack")
    return normal(rng, 4, K), make(name, rng, L, K, N)


MODES = {
    "implicit(f)": implicit(body),
    "implicit(jit f)": implicit(jit(body)),
    "jit(implicit f)": jit(implicit(body)),
    "jit(f), operators alone": jit(lambda x, q: jnp.tanh(x @ q) @ q.T + (q * 0.5).T[:2].sum() + (x @ q)[1, 2]),
    "remat": implicit(jit(jax.checkpoint(body))),
    "grad": jit(jax.grad(lambda x, q: (implicit(body)(x, q) ** 2).sum())),
    "implicit(grad)": implicit(jit(jax.grad(lambda x, q: (body(x, q) ** 2).sum()))),
    "grad of remat": jit(jax.grad(lambda x, q: (jax.checkpoint(implicit(body))(x, q) ** 2).sum())),
    "jvp": jit(lambda x, q: jax.jvp(lambda x: implicit(body)(x, q), (x,), (x[::-1],))[1]),
    "jacobian": jit(lambda x, q: jax.jacrev(lambda v: implicit(jnp.matmul)(v, q))(x[0])),
    "hessian": jit(lambda x, q: jax.hessian(lambda v: (jnp.tanh(v @ q)).sum())(x[0])),
    "vmap x": jit(lambda x, q: jax.vmap(lambda v: implicit(jnp.matmul)(v, q))(x)),
    "vmap x, q in implicit": implicit(lambda x, q: jax.vmap(lambda v: v @ q)(x)),
    "vmap x and columns": implicit(lambda x, q: jax.vmap(lambda c: x @ c, in_axes=1, out_axes=1)(q)),
    "vmap grad": jit(lambda x, q: jax.vmap(jax.grad(lambda v: jnp.sin(v @ q).sum()))(x)),
    "cond": jit(implicit(lambda x, q: lax.cond(x.sum() > 0, lambda q: q, lambda q: -q, q).T @ x.T)),
    "cond product": implicit(lambda x, q: lax.cond(x.sum() > 0, lambda x: x @ q, lambda x: (x * 2) @ q, x)),
    "switch": implicit(lambda x, q: lax.switch(1, [lambda q: q * 1.0, lambda q: q * 2.0], q) + 0),
    "fori": implicit(lambda x, q: lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ q @ q.T / K), x)),
    "while": implicit(lambda x, q: lax.while_loop(lambda s: s[1] < 2, lambda s: (s[0] @ q @ q.T, s[1] + 1), (x, 0))[0]),
    "carry": implicit(lambda x, q: lax.scan(lambda q, _: (-q, q.T @ x.T), q, None, length=2)),
    "map rows": implicit(lambda x, q: lax.map(lambda v: v @ q, x)),
    "custom_vjp": implicit(lambda x, q: jax.nn.relu(x @ q) + jax.nn.silu(q[:1])),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SOME)
def test_one_matrix(name: str, mode: str) -> None:
    x, q = inputs(name)
    check(MODES[mode](x, q), MODES[mode](x, dense(q)))


def layers(x, q):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w @ w.T / K), (x @ w).sum()), x, q)


STACKS = {
    "scan": jit(layers),
    "implicit(scan)": implicit(jit(layers)),
    "grad of scan": jit(jax.grad(lambda x, q: layers(x, q)[0].sum())),
    "grad of remat scan": jit(jax.grad(lambda x, q: layers(x, q)[1].sum())),
    "vmap": jit(lambda x, q: jax.vmap(lambda w: x @ w)(q)),
    "vmap both": jit(lambda x, q: jax.vmap(lambda v, w: v @ w)(x[:L], q)),
    "implicit(vmap)": implicit(jit(lambda x, q: jax.vmap(lambda w: (x @ w, w.T, w[0]))(q))),
    "grad of vmap": jit(jax.grad(lambda x, q: jax.vmap(lambda w: jnp.sin(x @ w))(q).sum())),
    "vmap of scan": jit(lambda x, q: jax.vmap(lambda v: layers(v[None], q)[0])(x)),
    "map": jit(lambda x, q: lax.map(lambda w: x @ w, q)),
    "tree slice": lambda x, q: x @ jax.tree.map(lambda leaf: leaf[1], q),
    "tree slices": lambda x, q: x @ jax.tree.map(lambda leaf: leaf[1:], q),
    "index": implicit(jit(lambda x, q: [x @ q[i] for i in range(L)])),
    "dynamic index": implicit(jit(lambda x, q: lax.fori_loop(0, L, lambda i, x: jnp.tanh(x @ q[i] @ q[i].T / K), x))),
    "unstack": implicit(lambda x, q: [x @ w for w in q]),
    "associative": implicit(lambda x, q: (q[0].T @ q[1], q[::-1])),
}


@pytest.mark.parametrize("mode", STACKS)
@pytest.mark.parametrize("name", SOME)
def test_stack_of_matrices(name: str, mode: str) -> None:
    x, q = stacked(name)
    check(STACKS[mode](x, q), STACKS[mode](x, dense(q)))


def test_tree_stacked_layers() -> None:
    """Stacking the leaves of equal arrays makes a stack of the type."""
    for name in SOME:
        rng = seeded(name)
        qs = [make(name, rng, K, N) for _ in range(3)]
        stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *qs)
        assert type(stack) is type(qs[0])
        assert stack.shape == (3, K, N)
        np.testing.assert_array_equal(dense(stack), jnp.stack([dense(q) for q in qs]))


@pytest.mark.parametrize("name", [n for n in FORMATS if FORMATS[n].axis == -2])
def test_mapping_over_the_blocked_matrix_raises_or_is_right(name: str) -> None:
    """Storage keeps columns in front here: slicing it outside of implicit must never give a wrong row."""
    _, q = inputs(name)
    with pytest.raises((SlicedBelowCoreError, ValueError)):
        dense(jax.vmap(lambda row: row * 1.0)(q))
    right = implicit(lambda q: jax.vmap(lambda row: row * 1.0)(q))(q)
    check(right, dense(q))


@pytest.mark.parametrize("name", SOME)
def test_policies_hold_inside_transformations(name: str) -> None:
    x, q = stacked(name)
    with materialization_policy("error"):
        for f in (
            layers,
            implicit(layers),
            jax.grad(lambda x, q: layers(x, q)[0].sum()),
            lambda x, q: jax.vmap(lambda w: x @ w)(q),
            implicit(lambda x, q: x @ q[1]),
            implicit(lambda x, q: lax.cond(x.sum() > 0, lambda: x @ q[0], lambda: x @ q[1])),
            jax.checkpoint(implicit(lambda x, q: x @ q[0])),
        ):
            jax.eval_shape(f, x, q)


def test_no_tracer_leaks(leak_check) -> None:
    x, q = inputs("nf4")
    check(jax.jit(implicit(lambda x, q: x @ q * 2))(x, q), x @ dense(q) * 2)


@pytest.mark.parametrize("kind", ["nf4", "int8", "lora", "dora", "scaled", "activations"])
def test_layers_taken_one_by_one_stay_packed(kind):
    """`lax.unstack`, by which newer releases of JAX iterate."""
    rng = seeded(kind)
    w, x = normal(rng, 3, 64, 20), normal(rng, 4, 64)
    q = ef.quantize(w, dtype="int8" if kind == "int8" else "nf4", axis=-2)
    if kind in ("lora", "dora"):
        q = ef.add_lora({"kernel": q}, "*", rank=2, key=jax.random.key(0), dora=kind == "dora")["kernel"]
    elif kind == "scaled":
        q = ScaledArray(q, jnp.asarray(rng.uniform(1, 2, (3, 64, 1)), jnp.float32))
    elif kind == "activations":
        q = ef.ActivationArray(q, jnp.full((3, 1, 1), 0.02, jnp.float32), activations="int8")
    with ef.materialization_policy("error"):
        found = implicit(lambda x, q: [x @ layer for layer in lax.unstack(q)])(x, q)
        expected = [x @ q[i] for i in range(3)]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
