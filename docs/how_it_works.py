"""One value's way through eformer, told by running it. Every claim is followed by an assert.

python docs/how_it_works.py
"""

# %% Storing
# The value of this story is a matrix of 8 × 4 numbers. It is stored as small integers and one factor per column. The
# class says which fields hold arrays (children), which are static (`aux_field`), and how to compute the dense matrix.
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from eformer.jaximus import (
    ImplicitArray,
    MaterializationError,
    aux_field,
    explain,
    implicit,
    materialization_policy,
    register,
)


@dataclass
class Int8Matrix(ImplicitArray):
    codes: jax.Array
    scale: jax.Array
    note: str = aux_field(default="")

    core_ndim: ClassVar[int] = 2  # a matrix; any axes in front are batch axes of both children

    def materialize(self):
        return self.codes * self.scale


rng = np.random.default_rng(0)
w = Int8Matrix(jnp.asarray(rng.integers(-127, 128, (8, 4)), jnp.int8), jnp.full((1, 4), 0.01), note="a story")
dense = w.materialize()
x = jnp.asarray(rng.standard_normal((2, 8)), jnp.float32)
print("stored: ", w)
assert w.nbytes == 8 * 4 * 1 + 4 * 4
assert dense.nbytes == 8 * 4 * 4

# %% Shape from the children
# Nobody told it a shape. It is what `materialize` would give, found by abstract evaluation: nothing is computed. As it
# follows the children it cannot go stale. Stack three such values leaf by leaf, as `vmap` and `scan` do, and the
# stack knows its shape; take one out again and it is a matrix.
assert (w.shape, w.dtype) == ((8, 4), jnp.float32)
stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf, leaf]), w)
assert isinstance(stack, Int8Matrix)
assert stack.shape == (3, 8, 4)
assert jax.tree.leaves(w)[0] is w.codes  # a pytree: children are leaves ...
assert jax.tree.structure(w) != jax.tree.structure(Int8Matrix(w.codes, w.scale))  # ... and static data is structure

# %% Entering
# `implicit(f)` calls `f` with dispatch on. Implicit arrays among the arguments are wrapped in a tracer, dense ones are
# left alone. To `f`, the tracer is a `jax.Array` of the logical shape.
seen = []


@implicit
def look(x, w):
    seen.extend([type(x), type(w)])
    assert isinstance(w, jax.Array)
    assert w.shape == (8, 4)
    return w


back = look(x, w)
assert seen[0] is type(x)
assert seen[1].__name__ == "ImplicitTracer"
assert isinstance(back, Int8Matrix)  # on the way out the tracer is taken off again
print("inside: ", seen[1].__name__)

# %% No handler: the fallback, and the policy that governs it
# Every jnp function ends in primitives. One that meets a tracer asks the registry for a handler. There is none yet: the
# value is materialized and the primitive sees an ordinary array. That is right but wasteful, hence never silent: by
# default a warning (once per place), on request nothing, or a refusal.
with materialization_policy("allow"):
    assert jnp.allclose(implicit(jnp.matmul)(x, w), x @ dense)

with materialization_policy("error"):
    try:
        implicit(jnp.matmul)(x, w)
    except MaterializationError as error:
        refusal = str(error)
assert "Refusing to materialize Int8Matrix" in refusal
print("refused:", refusal.splitlines()[0][:79])

# %% A handler
# `register` files a function under a primitive and the operand types of its annotations. It gets the operands and the
# parameters of the primitive; `NotImplemented` hands the case to the next candidate, finally to the fallback.
calls = []


@register("dot_general")
def x_times_int8(x: jax.Array, w: Int8Matrix, *, dimension_numbers, **params):
    calls.append(w.shape)
    if dimension_numbers != (((x.ndim - 1,), (0,)), ((), ())):
        return NotImplemented
    codes = w.codes.astype(x.dtype)
    return jax.lax.dot_general(x, codes, dimension_numbers, **params) * w.scale[0]  # factors after the sum


with materialization_policy("error"):  # from here on, a slip would be an exception
    y = implicit(jnp.matmul)(x, w)
assert calls == [(8, 4)]
assert jnp.allclose(y, x @ dense, atol=1e-5)

# %% Without a wrapper
# Operators and methods of the value open a scope for themselves, so plain `x @ w` dispatches. A block works too.
calls.clear()
jax.clear_caches()  # handlers run while tracing; forget the trace of matmul so that this one is seen again
with materialization_policy("error"):
    assert jnp.allclose(x @ w, y)
    with implicit:
        assert jnp.allclose(jnp.dot(x, w), y)
assert len(calls) == 2

# %% jit, on either side
# Outside, jit sees the children as its arguments; inside, its jaxpr is replayed with dispatch. The compiled program is
# the handler's: the multiplication reads converted codes, and no 8 × 4 product of codes and factors is formed.
layer = lambda x, w: jax.nn.relu(x @ w)  # noqa: E731
with materialization_policy("error"):
    assert jnp.allclose(jax.jit(implicit(layer))(x, w), layer(x, dense), atol=1e-5)
    assert jnp.allclose(implicit(jax.jit(layer))(x, w), layer(x, dense), atol=1e-5)
    program = str(jax.make_jaxpr(implicit(layer))(x, w))
assert "i8[8,4]" in program
assert "mul" in program
assert "f32[8,4] = mul" not in program

# %% scan and vmap
# A loop over a stack slices the children, so each step meets one matrix. No step ever sees the whole stack.
calls.clear()
step = lambda h, w: (jnp.tanh(jnp.concatenate([h @ w, h @ w], -1)), None)  # noqa: E731
with materialization_policy("error"):
    h, _ = implicit(lambda x, ws: jax.lax.scan(step, x, ws))(x, stack)
expected, _ = jax.lax.scan(step, x, jnp.stack([dense] * 3))
assert jnp.allclose(h, expected, atol=1e-5)
assert set(calls) == {(8, 4)}

with materialization_policy("error"):
    each = jax.vmap(implicit(jnp.matmul), in_axes=(None, 0))(x, stack)
assert jnp.allclose(each, jnp.stack([y] * 3), atol=1e-5)

# %% grad
# The handler is JAX code, so its derivative is found as usual. Codes are integers and have none; the factors and the
# input do. Here the gradient is taken with respect to a value built from a new `scale`.
loss = implicit(lambda x, scale: jnp.sum((x @ Int8Matrix(w.codes, scale)) ** 2))
dense_loss = lambda x, scale: jnp.sum((x @ (w.codes * scale)) ** 2)  # noqa: E731
found, wanted = jax.grad(loss, (0, 1))(x, w.scale), jax.grad(dense_loss, (0, 1))(x, w.scale)
assert all(jnp.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(found, wanted, strict=True))

# %% In somebody else's trace
# A raw value given to a jnp function inside plain jit is in no scope of ours. It becomes one equation, `implicit_box`.
# Left alone, the box is compiled as `materialize()`. If a scope encloses the jit, it opens again and the handler runs.
closed = jax.jit(lambda x: jnp.matmul(x, w))
assert "implicit_box" in str(jax.make_jaxpr(closed)(x))
with materialization_policy("allow"):
    assert jnp.allclose(closed(x), y, atol=1e-5)

calls.clear()
with materialization_policy("error"):
    assert jnp.allclose(implicit(closed)(x), y)
assert (8, 4) in calls

# %% Asking afterwards
# `explain` runs a function once, traced anew, and lists what became dense, for which primitive, and where.
with materialization_policy("allow"):
    report = explain(implicit(lambda x, w: x @ w + jnp.sum(jax.lax.sin(w))))(x, w)
(event,) = report.materializations
assert event.primitive == "sin"
assert event.dense_bytes == 128
assert "how_it_works.py:" in event.where  # the line with the sine
assert jnp.allclose(report.result, x @ dense + jnp.sum(jnp.sin(dense)), atol=1e-4)
print("report: ", str(report).split(" at ")[0])
