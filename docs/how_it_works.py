"""One product, `x @ q`, followed from Python down to the kernel and back. Every claim is followed by an assert.

python docs/how_it_works.py
"""

# %% 1. Storage
# `q` stands for a matrix of 256 × 128 numbers. It holds two arrays, called children: four-bit codes, two to a byte, and
# one scale (absmax) per block of 64 values. Blocks run along the axis that `x @ q` sums over, and that axis is stored
# last: 128 columns, 4 blocks, 32 bytes.
import jax
import jax.numpy as jnp
import numpy as np

import eformer as ef

w = jax.random.normal(jax.random.key(0), (256, 128))
x = jax.random.normal(jax.random.key(1), (4, 256))
q = ef.quantize(w, dtype="nf4")
print("stored:   ", q)
assert (q.packed.shape, q.packed.dtype) == ((128, 4, 32), jnp.uint8)
assert (q.absmax.shape, q.absmax.dtype) == ((128, 4), jnp.float32)
assert q.nbytes == 128 * 4 * 32 + 128 * 4 * 4

# A value is an entry of a table of 16 numbers times the scale of its block. The first of two values is in the high half
# of the byte. `materialize` does this for all of them; `by_hand` does it for one.
NF4 = [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0]
NF4 += [0.07958030, 0.16093020, 0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0]


def by_hand(k, n):
    byte = int(q.packed[n, k // 64, k % 64 // 2])
    code = byte >> 4 if k % 2 == 0 else byte & 15
    return NF4[code] * float(q.absmax[n, k // 64])


dense = q.materialize()
assert np.allclose([by_hand(k, 5) for k in range(256)], dense[:, 5], atol=1e-6)

# %% 2. A pytree with a shape
# To JAX, `q` is a pytree of its children, so it passes through `jit`, `scan` and `device_put` like any other. Its shape
# is derived from the children and cannot go stale: a stack of three arrays, made leaf by leaf, knows that it is one.
assert [leaf.shape for leaf in jax.tree.leaves(q)] == [(128, 4, 32), (128, 4)]
stack = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), q)
assert isinstance(stack, ef.ArrayNF4)
assert (q.shape, stack.shape) == ((256, 128), (3, 256, 128))

# %% 3. The operator
# Python first asks `x`, a `jax.Array`. It does not know `q` and says so; then Python asks `q`, whose operators run
# themselves inside `ef.implicit`.
assert type(x).__matmul__(x, q) is NotImplemented
y = x @ q
assert jnp.allclose(y, q.__rmatmul__(x))
assert jnp.allclose(y, x @ dense, atol=1e-3)

# %% 4. The trace
# `ef.implicit(f)` calls `f` with each implicit array wrapped in a tracer. To `f` the tracer is a `jax.Array` of the
# logical shape. Dense arguments are not touched.
seen = []


@ef.implicit
def look(x, q):
    seen.extend([type(x), type(q)])
    assert isinstance(q, jax.Array)
    assert q.shape == (256, 128)
    return q


assert isinstance(look(x, q), ef.ArrayNF4)  # on the way out the tracer is removed
assert seen[0] is type(x)
assert "Tracer" in seen[1].__name__
print("traced as:", seen[1].__name__)

# %% 5. Dispatch
# Every jnp function ends in primitives; `jnp.matmul` ends in `dot_general`. A primitive that meets a tracer of ours
# looks up a handler for its operand types. The one for quantized arrays reads the dimension numbers, and replaces
# `dot_general` by one primitive of this library, `eformer_qmatmul`, which takes x, the codes and the scales.
program = jax.make_jaxpr(lambda x, q: x @ q)(x, q)
(equation,) = program.eqns
assert equation.primitive.name == "eformer_qmatmul"
assert [v.aval.shape for v in equation.invars] == [(4, 256), (128, 4, 32), (128, 4)]
print("primitive:", equation.primitive)

# A handler is a function, registered for types. This one counts the products it sees and then steps aside.
count = []


class Watched(ef.ArrayNF4):
    """NF4, with a handler of its own."""


@ef.register("dot_general")
def watch(x: jax.Array, q: Watched, **params):
    count.append(params["dimension_numbers"])
    return NotImplemented  # the handler of the base class comes next


watched = Watched(q.packed, q.absmax, q.block_size)
assert jnp.allclose(x @ watched, y)
assert count[0] == (((1,), (0,)), ((), ()))

# %% 6. The choice
# What computes the primitive is chosen while the program is traced: a native kernel of the platform, the tiled path in
# JAX that decodes one panel at a time, or, for small matrices, the reference. `ef.explain` shows it, with the reasons.
found = ef.explain(lambda x: x @ q)(x)
(choice,) = found.kernels
assert choice.op == "qmatmul"
assert choice.name in ("native_cpu", "native_cuda", "pallas_tpu", "xla")
assert found.materializations == ()
print("chosen:   ", choice.name)

# %% 7. The kernel
# On the CPU the primitive becomes one call of a C++ function. It gets x, codes and scales as they lie in memory. No
# dense matrix exists, so the program needs next to no temporary memory.
compiled = jax.jit(lambda x, q: x @ q).lower(x, q).compile()
if choice.name == "native_cpu":
    assert 'custom_call_target="eformer_cpu_qmatmul"' in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < dense.nbytes / 8


# What it computes, in NumPy: for each block, look the codes up, multiply, sum, and scale the sum once.
def kernel(x, packed, absmax):
    table = np.array(NF4, np.float32)
    codes = np.stack([packed >> 4, packed & 15], -1).reshape(*packed.shape[:-1], -1)  # (N, blocks, 64)
    partial = np.einsum("mbk,nbk->mnb", x.reshape(len(x), -1, 64), table[codes])
    return np.einsum("mnb,nb->mn", partial, absmax)


assert np.allclose(kernel(*map(np.asarray, (x, q.packed, q.absmax))), y, atol=1e-3)

# %% 8. The gradient
# The derivative of the product with respect to x is a product with the same codes, read the other way round ("axpy").
# Codes have no derivative; asking for one is an error, not a zero.
backward = jax.make_jaxpr(jax.grad(lambda x, q: jnp.sum(x @ q)))(x, q)
assert [e.primitive.name for e in backward.eqns].count("eformer_qmatmul") == 2
assert jnp.allclose(jax.grad(lambda x: jnp.sum((x @ q) ** 2))(x), 2 * y @ dense.T, rtol=1e-3, atol=1e-2)
try:
    jax.grad(lambda q: jnp.sum(x @ q), allow_int=True)(q)
except ef.errors.QuantizedGradientError as error:
    print("refused:  ", str(error).split(":")[0])
else:
    raise AssertionError("the gradient of stored scales should have been refused")

# %% 9. Loops
# `scan` slices the children, so each step meets one matrix, and the codes of the others stay where they are.
with ef.materialization_policy("error"):
    total, _ = ef.implicit(lambda x, stack: jax.lax.scan(lambda s, q: (s + x @ q, None), jnp.zeros((4, 128)), stack))(
        x, stack
    )
assert jnp.allclose(total, 3 * y, atol=1e-3)

# %% 10. No handler
# `sin` has none: the array is materialized and the primitive gets a dense array. The result is right, but it costs
# memory, so it is never silent. By default there is a warning; here it is refused.
with ef.materialization_policy("error"):
    try:
        ef.implicit(jnp.sin)(q)
    except ef.errors.MaterializationError as error:
        print("refused:  ", str(error).splitlines()[0][:76])
    else:
        raise AssertionError("the policy should have refused")
with ef.materialization_policy("allow"):
    found = ef.explain(ef.implicit(lambda q: jnp.sum(jax.lax.sin(q))))(q)
(event,) = found.materializations
assert (event.primitive, event.dense_bytes) == ("sin", dense.nbytes)
assert "how_it_works.py:" in event.where

# %% 11. Outside of any scope
# JAX offers no hook for array types of others: given a raw `q`, a jnp function inside plain `jit` sees one equation,
# `implicit_box`. Left alone it is compiled as `materialize()`; under `ef.implicit` it opens, and the handler runs.
closed = jax.jit(lambda x: jnp.matmul(x, q))
assert "implicit_box" in str(jax.make_jaxpr(closed)(x))
with ef.materialization_policy("error"):
    assert jnp.allclose(ef.implicit(closed)(x), y, atol=1e-3)
