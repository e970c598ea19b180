"""Random programs: a straight line of operations on 8×8 matrices, wrapped in random stacks of transformations.

Every operation and every transformation maps 8×8 to 8×8, so all of them compose. A function takes `(x, q, stack)`: a
dense matrix, a matrix and a stack of two, the last two implicit or dense. The same program is run on both kinds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eformer.jaximus import implicit

from .toys import Block8, Const, FlatCodes, Lora, Plain, Transposed, dense

SIZE = 8
Function = Callable[[Any, Any, Any], Any]

# Constants that keep values moderate and away from ties: an operation on rounding noise would compare nothing.
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "matmul": lambda a, b: a @ b * 0.3,
    "dot": lambda a, b: jnp.dot(a, b) * 0.3,
    "einsum": lambda a, b: jnp.einsum("ij,kj->ik", a, b) * 0.3,
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: 1.5 - b + a,
    "multiply": lambda a, b: a * b,
    "scale": lambda a, b: a * 0.5,
    "divide": lambda a, b: a / (2.0 + jnp.abs(b)),
    "maximum": lambda a, b: jnp.maximum(a, b + 0.1),
    "where": lambda a, b: jnp.where(a > 0.123, a, b),
    "transpose": lambda a, b: a.T,
    "reshape": lambda a, b: a.reshape(4, 16).T.reshape(SIZE, SIZE),
    "sum": lambda a, b: b + jnp.sum(a, axis=0) * 0.3,
    "mean": lambda a, b: b * jnp.mean(a, axis=1, keepdims=True),
    "reverse": lambda a, b: a[::-1, 1:].sum(1) + b,
    "row": lambda a, b: a[3] * b,
    "gather": lambda a, b: a[jnp.array([3, 1, 4, 1, 5, 7, 2, 6])],
    "update": lambda a, b: jnp.asarray(a).at[2].set(b[0]),
    "concatenate": lambda a, b: jnp.concatenate([a, b])[4:12],
    "cumsum": lambda a, b: jnp.cumsum(a, axis=0) * 0.3,
    "sort": lambda a, b: lax.stop_gradient(jnp.sort(a, axis=0)) + b,
    "relu": lambda a, b: jax.nn.relu(a + 0.1),
    "softmax": lambda a, b: jax.nn.softmax(a, axis=-1),
    "tanh": lambda a, b: jnp.tanh(a),
    "norm": lambda a, b: a / (1.0 + jnp.linalg.norm(b)),
}


def _scan_stack(f: Function) -> Function:
    return lambda x, q, s: lax.scan(lambda c, w: (jnp.tanh(f(c, w, s)), None), x, s)[0]


def _scan_constant(f: Function) -> Function:
    return lambda x, q, s: lax.scan(lambda c, _: (jnp.tanh(f(c, q, s)), None), x, None, length=2)[0]


def _custom_jvp(f: Function) -> Function:
    """Twice the true derivative: the rule itself must be what is used."""

    def g(x: Any, q: Any, s: Any) -> Any:
        h = jax.custom_jvp(lambda x: f(x, q, s))

        def rule(primals: Any, tangents: Any) -> Any:
            y, dy = jax.jvp(lambda x: f(x, q, s), primals, tangents)
            return y, 2 * dy

        h.defjvp(rule)
        return h(x)

    return g


def _custom_vjp(f: Function) -> Function:
    def g(x: Any, q: Any, s: Any) -> Any:
        h = jax.custom_vjp(lambda x, q, s: f(x, q, s))

        def backward(residuals: Any, ct: Any) -> Any:
            x, q, s = residuals
            return 2 * jax.vjp(lambda x: f(x, q, s), x)[1](ct)[0], None, None

        h.defvjp(lambda x, q, s: (f(x, q, s), (x, q, s)), backward)
        return h(x, q, s)

    return g


def _value_and_grad(f: Function) -> Function:
    def g(x: Any, q: Any, s: Any) -> Any:
        value, gradient = jax.value_and_grad(lambda x: f(x, q, s).mean())(x)
        return gradient + value

    return g


TRANSFORMATIONS: dict[str, Callable[[Function], Function]] = {
    "jit": lambda f: jax.jit(lambda x, q, s: f(x, q, s)),
    "grad": lambda f: lambda x, q, s: jax.grad(lambda x: f(x, q, s).mean())(x),
    "value_and_grad": _value_and_grad,
    "vjp": lambda f: lambda x, q, s: jax.vjp(lambda x: f(x, q, s), x)[1](jnp.cos(x))[0],
    "jvp": lambda f: lambda x, q, s: jax.jvp(lambda x: f(x, q, s), (x,), (jnp.cos(x),))[1],
    "linearize": lambda f: lambda x, q, s: jax.linearize(lambda x: f(x, q, s), x)[1](jnp.cos(x)),
    "vmap x": lambda f: lambda x, q, s: jax.vmap(lambda x: f(x, q, s))(jnp.stack([x, 0.5 * x])).sum(0),
    "vmap stack": lambda f: lambda x, q, s: jax.vmap(lambda w: f(x, w, s))(s).sum(0),
    "vmap both": lambda f: lambda x, q, s: jax.vmap(lambda x, w: f(x, w, s))(jnp.stack([x, 0.5 * x]), s).sum(0),
    "scan stack": _scan_stack,
    "scan constant": _scan_constant,
    "fori": lambda f: lambda x, q, s: lax.fori_loop(0, 2, lambda i, c: jnp.tanh(f(c, q, s)), x),
    "cond": lambda f: lambda x, q, s: lax.cond(x[0, 0] > 0.1, lambda x: f(x, q, s), lambda x: f(0.5 * x, q, s), x),
    "switch": lambda f: lambda x, q, s: lax.switch(jnp.int32(1), [lambda x, w: x, lambda x, w: f(x, w, s)], x, q),
    "checkpoint": lambda f: lambda x, q, s: jax.checkpoint(lambda x, q: f(x, q, s))(x, q),
    "custom_jvp": _custom_jvp,
    "custom_vjp": _custom_vjp,
}


def _matrix(kind: str, rng: np.random.Generator) -> Any:
    w = jnp.asarray(rng.normal(size=(SIZE, SIZE)), jnp.float32)
    thin = jnp.asarray(rng.normal(size=(2, SIZE, 2)) / 2, jnp.float32)
    build: dict[str, Callable[[], Any]] = {
        "dense": lambda: w,
        "Plain": lambda: Plain(w, jnp.float32(0.5)),
        "Transposed": lambda: Transposed(w, jnp.float32(0.5)),
        "Block8": lambda: Block8.quantize(w, 4),
        "FlatCodes": lambda: FlatCodes.quantize(w),
        "Lora": lambda: Lora(w, thin[0], thin[1].T),
        "Lora over Block8": lambda: Lora(Block8.quantize(w, 2), thin[0], thin[1].T),
        "Const": lambda: Const(0.75, shape=(SIZE, SIZE), dtype=jnp.float32),
    }
    return build[kind]()


STACKABLE = ["dense", "Plain", "Transposed", "Block8", "FlatCodes", "Lora", "Lora over Block8"]
KINDS = [*STACKABLE, "Const"]


@dataclasses.dataclass(frozen=True)
class Program:
    """`steps` of (operation, index, index) on the values so far, wrapped `inside` and `outside` the scope."""

    steps: tuple[tuple[str, int, int], ...]
    inside: tuple[str, ...]
    outside: tuple[str, ...]
    kind: str
    stack_kind: str
    seed: int

    def body(self, x: Any, q: Any, stack: Any) -> Any:
        values = [q, x, jnp.linspace(-1.0, 1.0, SIZE * SIZE).reshape(SIZE, SIZE)]
        for name, i, j in self.steps:
            values.insert(0, OPERATIONS[name](values[i % len(values)], values[j % len(values)]))
        return jnp.asarray(values[0]) + 0.5 * x  # depends on x whatever was drawn, so that a gradient exists

    def arguments(self) -> tuple[Any, Any, Any]:
        rng = np.random.default_rng(self.seed)
        q, *layers = [_matrix(kind, rng) for kind in (self.kind, self.stack_kind, self.stack_kind)]
        stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        x = jnp.asarray(rng.normal(size=(SIZE, SIZE)), jnp.float32)
        self_dense = jnp.stack([jnp.asarray(dense(layer)) for layer in layers])
        return (x, q, stack), (x, jnp.asarray(dense(q)), self_dense)

    def build(self, enter: Callable[[Function], Function]) -> Function:
        f: Function = self.body
        for name in self.inside:
            f = TRANSFORMATIONS[name](f)
        f = enter(f)
        for name in self.outside:
            f = TRANSFORMATIONS[name](f)
        return f

    def on_dense(self) -> Any:
        return self.build(lambda f: f)(*self.arguments()[1])

    def on_implicit(self) -> Any:
        return self.build(implicit)(*self.arguments()[0])
