"""Who may be differentiated: dense operands always, a quantized array never, and it says what to do instead."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eformer as ef
from eformer.errors import QuantizedGradientError
from eformer.jaximus import ImplicitArray, implicit, materialization_policy, materialize
from eformer.ops.quantization import Array1B, quantize

from .contract import EVERY_KIND, FAST, check, dense, normal, seeded

KINDS = ("nf4", "int8", "ternary")  # binary is the same type as ternary
ROWS = jnp.asarray([1, 2])


def inputs(kind: str):
    rng = seeded(kind)
    blocks = {"block_size": 8} if kind == "nf4" else {}
    return normal(rng, 5, 16), quantize(normal(rng, 16, 8), dtype=kind, **blocks)


@jax.custom_vjp
def with_vjp(a, b):
    return 2 * jnp.sum(a) + b


with_vjp.defvjp(lambda a, b: (with_vjp(a, b), a), lambda a, g: (jnp.full_like(a, 2 * g.sum()), g))


@jax.custom_jvp
def with_jvp(a, b):
    return 2 * jnp.sum(a) + b


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), 2 * jnp.sum(tangents[0]) + tangents[1]))


REFUSED = {
    "product": lambda x, q: x @ q,
    "product left": lambda x, q: q.T @ x.T,
    "addition": lambda x, q: q + 1,
    "materialize": lambda x, q: q.materialize(),
    "asarray": lambda x, q: jnp.asarray(q),
    "jnp": lambda x, q: jnp.exp(q),
    "moved": lambda x, q: (q.T * 2)[1:3] + 1,
    "lookup": lambda x, q: (q[ROWS] + 1).sum() + (q[:, ROWS] + 1).sum(),
    "comparison": lambda x, q: jnp.where(q > 0, q, 0),
    "astype": lambda x, q: q.astype(jnp.bfloat16).astype(jnp.float32) + 1,
    "update": lambda x, q: q.at[0].set(1.0),
    "reduction": lambda x, q: q.max(),
    "scan": lambda x, q: lax.scan(lambda c, _: (c + jnp.sin(q).sum(), None), 0.0, None, length=2)[0],
    "cond": lambda x, q: lax.cond(x[0, 0] > 0, lambda q: q + 1, lambda q: q - 1, q),
    "remat": lambda x, q: jax.checkpoint(jnp.sin)(q),
    "vmap": lambda x, q: jax.vmap(lambda v: v[:8] * (q + 1))(x),
    "inner jit": lambda x, q: jax.jit(jnp.sin)(q),
    "relu": lambda x, q: jax.nn.relu(q),
    "where": lambda x, q: jnp.where(x[0, 0] > 0, q, -q) + 1,
}
BY_RULE = {"custom_vjp": with_vjp, "custom_jvp": with_jvp}  # of functions that take arrays, so under `implicit` only


def test_jax_refuses_arrays_of_bytes_alone() -> None:
    x, q = inputs("mxfp4")
    with pytest.raises(TypeError, match="which stores integers"):
        jax.grad(lambda q: (x @ q).sum())(q)
    assert {leaf.dtype for leaf in jax.tree.leaves(jax.grad(lambda q: (x @ q).sum(), allow_int=True)(q))} == {
        jax.dtypes.float0
    }


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_quantized_array_is_not_differentiated(kind: str) -> None:
    x, q = inputs(kind)
    if kind.startswith("mx"):  # has only bytes; a factor makes its scale a number
        q = q * 1.0
    for name, f in (REFUSED | BY_RULE).items():
        ways = [implicit(f), jax.jit(implicit(f))]
        ways += [] if name in BY_RULE else [f, jax.jit(f)]
        ways += [] if name == "materialize" else [implicit(jax.jit(f))]  # which sees a tracer of JAX's own
        for way in ways:
            gradient = jax.grad(lambda q, way=way: way(x, q).sum(), allow_int=True)
            with pytest.raises(QuantizedGradientError, match=r"(?s)LoRA.*straight_through"):
                print(f"{name}: {jax.eval_shape(gradient, q)}")  # seen if nothing is raised


@dataclasses.dataclass
class Lora(ImplicitArray):
    """A user's type: a frozen weight and a low-rank update."""

    w: Any
    a: jax.Array
    b: jax.Array

    def materialize(self):
        return materialize(self.w) + self.a @ self.b


def lora(y, q):
    return Lora(q, jnp.outer(jnp.arange(16.0), y[0, :2]), y[1:3, :8])


# functions of y, differentiated, and q, which is not
KEPT = {
    **{
        f"next to {name}": lambda y, q, f=f: f(y, q) * y[0, 0]
        for name, f in REFUSED.items()
        if name not in ("materialize", "astype")
    },
    "lora": lambda y, q: jnp.sin(y @ lora(y, q)),
    "lora with a frozen weight": lambda y, q: jnp.sin(lora(y, lax.stop_gradient(q))),
    "lora and custom_vjp": lambda y, q: implicit(with_vjp)(y[0, 0], lora(y, q)),
    "lora and custom_jvp": lambda y, q: implicit(with_jvp)(y[0, 0], lora(y, q)),
    "carry": lambda y, q: lax.scan(lambda c, _: ((c[0] * jnp.exp(c[1]).sum(), -c[1]), 0), (y, q), length=2)[0][0],
    "barrier": lambda y, q: y[:1, :8] * lax.optimization_barrier(q),
    "both in remat": lambda y, q: jax.checkpoint(lambda y, q: jnp.sin(y[:1, :8] * jnp.exp(q)))(y, q),
    "both in cond": lambda y, q: lax.cond(y[0, 0] > 0, lambda y, q: y[0] @ q, lambda y, q: y[1] @ (q + 1), y, q),
    "both in logaddexp": lambda y, q: jnp.logaddexp(y[:1, :8], q),
    "both in custom_vjp": implicit(lambda y, q: with_vjp(y, q)),
    "both in custom_jvp": implicit(lambda y, q: with_jvp(y, q)),
}  # fmt: skip
# factors folded into the scale: they are dense, and may be trained
FACTORS = {
    "product": lambda y, q: jnp.sin(y @ (q * y[0, 0])),
    "division": lambda y, q: jnp.sin(y @ ((q / y[0, 0]).T * 2.0).T),
    "left": lambda y, q: jnp.sin((q * y[0, 0]).T @ y.T),
    "both": lambda y, q: (q * y[0, 0]).T @ q,
    "vector": lambda y, q: jnp.sin(y @ (q * y[0, :8])),
    "dense": lambda y, q: jnp.sin((q * y[0, 0]).T + 1),
    "lookup": lambda y, q: jnp.sin((q * y[0, 0])[ROWS] * 3),
    "concatenate": lambda y, q: jnp.sin(y @ jnp.concatenate([q * y[0, 0], q], 1)),
    "where": implicit(lambda y, q: jnp.sin(y @ jnp.where(y[0, 0] > 0, q * y[0, 0], q))),
    "vmap": lambda y, q: jax.vmap(lambda v: jnp.sin(v @ (q * v[0])))(y),
    "mapped": lambda y, q: jax.vmap(lambda w: jnp.sin(y @ w))(jnp.stack([q, q]) * y[0, 0]),
    "scan": lambda y, q: lax.scan(lambda c, _: (jnp.tanh(c @ (q * c[0, 0]) @ q.T), None), y, None, length=2)[0],
    "carry": lambda y, q: y @ lax.scan(lambda w, _: (w * y[0, 0], None), q * y[0, 0], None, length=2)[0],
    "remat": lambda y, q: jax.checkpoint(lambda w: jnp.sin(y @ w))(q * y[0, 0]),
    "ragged": lambda y, q: jnp.sin(lax.ragged_dot(y, jnp.stack([q, -q]) * y[0, 0], jnp.asarray([2, 3]))),
}


@pytest.mark.parametrize(("kind", "table"), [("nf4", "kept"), ("int8", "kept"), *((kind, "factors") for kind in KINDS)])
def test_dense_operands_are_differentiated(kind: str, table: str) -> None:
    y, q = inputs(kind)
    programs = KEPT if table == "kept" else FACTORS

    def gradients(y, q, way):
        return {name: jax.grad(lambda y, f=f: way(f)(y, q).sum())(y) for name, f in programs.items()}

    ways = [lambda f: f, implicit, lambda f: implicit(jax.jit(f))]
    if kind in ("nf4", "int8"):  # the two kinds of 1-bit array are one type
        ways.append(lambda f: jax.checkpoint(implicit(f)))
    found = jax.jit(lambda y, q: [gradients(y, q, way) for way in ways], compiler_options=FAST)(y, q)
    wanted = jax.jit(lambda y, q: gradients(y, q, lambda f: f), compiler_options=FAST)(y, dense(q))
    if kind in ("nf4", "ternary"):  # eager
        found.append(implicit(lambda y, q: gradients(y, q, lambda f: f))(y, q))
    for result in found:
        check(result, wanted, tolerance=1e-4)


LOOPS = {
    "carry": lambda q, s: lax.scan(lambda q, s: (q * s, None), q, s)[0],
    "carry with a factor": lambda q, s: lax.scan(lambda c, _: (q, None), q * s[0], s)[0],
    "while": lambda q, s: lax.while_loop(lambda c: c[1] < 2, lambda c: (c[0] * s[0], c[1] + 1), (q, 0))[0],
    "cond": lambda q, s: lax.cond(s[0] > 0, lambda q: q * s[1], lambda q: q, q),
    "jit": jax.jit(lambda q, s: q * s[0]),
}


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_factor_in_a_loop_or_a_branch_stays_a_factor(kind: str) -> None:
    """An array with a factor and one without are of two types inside a program, which take each other's place."""
    q, s = inputs(kind)[1], jnp.asarray([0.5, 2.0, 3.0])
    for name, f in LOOPS.items():
        with materialization_policy("error"):
            results = [implicit(f)(q, s), jax.jit(implicit(f))(q, s)]
        for found in results:
            assert jax.tree.structure(found) == jax.tree.structure(q), name
            check(found, f(dense(q), s))


NARROW = {
    "f16 scales": lambda w: ef.ArrayInt.quantize(w, 3, 32, scale_dtype=jnp.float16, symmetric=False),
    "bf16 scales and biases": lambda w: ef.quantize(w, dtype="int5", block_size=16, biased=True),
    "tiles": lambda w: ef.quantize(w, dtype="fp8", block_size=128),
    "compressed": lambda w: ef.quantize(w, dtype="nf4", double_quant=True),
}


@pytest.mark.parametrize("kind", NARROW)
def test_a_factor_in_a_loop_or_a_branch_is_not_rounded_to_what_a_scale_is_stored_as(kind: str) -> None:
    q, s = NARROW[kind](jax.random.normal(jax.random.key(3), (64, 40))), jnp.asarray([0.7, 1.9, 3.1])
    constant = {
        "constant while": lambda q, s: lax.fori_loop(0, 3, lambda i, w: w * 1.1, q),
        "constant cond": lambda q, s: lax.cond(s[0] > 0, lambda q: q, lambda q: q * 1.1, q),
        "constant select": lambda q, s: lax.select(s[0] > 0, q, q * 1.1),
    }
    for name, f in (LOOPS | constant).items():
        with materialization_policy("error"):
            found = jax.jit(implicit(f))(q, s)
        assert type(found) is type(q), name
        wanted = np.asarray(f(dense(q), s))
        np.testing.assert_allclose(dense(found), wanted, rtol=0, atol=1e-6 * np.abs(wanted).max(), err_msg=name)


def test_arrays_with_and_without_a_factor_are_told_apart() -> None:
    """By JAX's caches: what was compiled for one is not taken for the other, and the gradient is right either way."""
    y, q = inputs("nf4")
    product = jax.jit(lambda y, q: jnp.sin(y @ q))
    structures = []

    def loss(a: jax.Array) -> Any:
        structures.append(jax.tree.structure(q * a))
        return (product(y, q) + product(y, q * a)).sum()

    found = jax.grad(loss)(0.3)
    assert structures[0] != jax.tree.structure(q)
    check(found, jax.grad(lambda a: jnp.sin(y @ (dense(q) * a)).sum())(0.3), tolerance=1e-4)


def test_bare_codes_have_factors_too() -> None:
    codes = Array1B.quantize(jnp.sign(normal(seeded("bare"), 16, 8)))
    found = jax.grad(lambda s: jnp.sin(jnp.ones((2, 16)) @ (codes * s)).sum())(0.3)
    check(found, jax.grad(lambda s: jnp.sin(jnp.ones((2, 16)) @ (dense(codes) * s)).sum())(0.3))


def test_users_types_keep_their_gradients() -> None:
    rng = seeded("users")
    parts = normal(rng, 16, 8), normal(rng, 16, 2), normal(rng, 2, 8)
    for f in (
        jnp.sin,
        lambda w: w + 1,
        jax.nn.relu,
        lambda w: with_vjp(jnp.float32(1), w),
        lambda w: with_jvp(jnp.float32(1), w),
    ):
        found = jax.grad(lambda w, f=f: (implicit(f)(w) ** 2).sum())(Lora(*parts))
        wanted = jax.grad(lambda p, f=f: (f(p[0] + p[1] @ p[2]) ** 2).sum())(parts)
        check((found.w, found.a, found.b), wanted)
    with pytest.raises(TypeError, match=r"tangent of Lora(?s:.*)implicit\(f\)"):
        jax.grad(lambda w: jax.nn.relu(w).sum())(Lora(*parts))
