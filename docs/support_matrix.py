"""Prints which operation does what with which format, found by running each of them. No cell is written by hand.

python docs/support_matrix.py

- exact: the result has the same type; codes and scales were moved, or a factor was multiplied into the scale.
- kernel, tiled, reference: a product, computed by a native kernel, by the tiled path that decodes one panel at a time,
  or by the reference that decodes the whole (small) matrix. Of two quantized operands the smaller one materializes.
- decodes part: the result is dense, and no more than the entries asked for was decoded.
- materializes: the array becomes dense first. Right, and never silent (see `materialization_policy`).

Every result is also compared with that of the same operation on the dense array: equal to rounding.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eformer.jaximus import explain, implicit, leaf_predicate, materialization_policy, materialize
from eformer.ops.quantization import quantize

FORMATS = ("nf4", "int8", "ternary", "binary")
K, N, EXPERTS = 256, 128, 3  # more than 2**14 values, below which the reference is the quicker choice
rng = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


x, row, out, column = normal(4, K), normal(1, K), normal(4, N), normal(N, 2)
xs, pair, image = normal(EXPERTS, 4, K), normal(2, K, N), normal(1, 3, 3, K)
ids, sizes, yes = jnp.array([5, 0, 5]), jnp.array([1, 0, 3]), jnp.array(True)


def convolve(w):
    return lax.conv_general_dilated(
        image, w.reshape(1, 1, K, N), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


# Each takes a (K, N) array w whose values are packed, or share a scale, along K.
MATRIX = {
    "`x @ w`": lambda w: x @ w,
    "`x @ w`, one row": lambda w: row @ w,
    "`x @ w.T`": lambda w: out @ w.T,
    "`w @ x`": lambda w: w @ column,
    "`x @ w[:, :16]`": lambda w: x @ w[:, :16],
    '`einsum("bk,kn->bn")`': lambda w: jnp.einsum("bk,kn->bn", x, w),
    "`tensordot`, both axes": lambda w: jnp.tensordot(pair, w, 2),
    "`w.T @ w`": lambda w: w.T @ w,
    "`jit(x @ w)`": lambda w: jax.jit(jnp.matmul)(x, w),
    "gradient to `x` of `x @ w`": lambda w: jax.grad(lambda x: jnp.sum(jnp.sin(x @ w)))(x),
    "`conv_general_dilated`": convolve,
    "`w.T`": lambda w: w.T,
    "`w.reshape(K, 4, N // 4)`": lambda w: w.reshape(K, 4, N // 4),
    "`w.reshape(K * N)`": lambda w: w.reshape(K * N),
    "`w[None]`": lambda w: w[None],
    "`w[None][0]`": lambda w: jnp.squeeze(w[None], 0),
    "`broadcast_to(w, (2, K, N))`": lambda w: jnp.broadcast_to(w, (2, K, N)),
    "`w[:, 2:9]`": lambda w: w[:, 2:9],
    "`w[:, 3]`": lambda w: w[:, 3],
    "`w[64:192]` (whole blocks)": lambda w: w[64:192],
    "`w[1:9]` (inside a block)": lambda w: w[1:9],
    "`dynamic_slice` along N": lambda w: lax.dynamic_slice_in_dim(w, 7, 5, 1),
    "`take(w, ids, axis=1)`": lambda w: jnp.take(w, ids, axis=1),
    "`take(w, ids, axis=0)`": lambda w: jnp.take(w, ids, axis=0),
    "`split(w, 4, axis=1)`": lambda w: jnp.split(w, 4, axis=1),
    "`split(w, 4, axis=0)`": lambda w: jnp.split(w, 4, axis=0),
    "`concatenate([w, w], 1)`": lambda w: jnp.concatenate([w, w], 1),
    "`concatenate([w, w], 0)`": lambda w: jnp.concatenate([w, w], 0),
    "`stack([w, w])`": lambda w: jnp.stack([w, w]),
    "`flip(w, 1)`": lambda w: jnp.flip(w, 1),
    "`flip(w, 0)`": lambda w: jnp.flip(w, 0),
    "`lax.select(yes, w, w)`": lambda w: lax.select(yes, w, w),
    "`where(mask, w, 0)`": lambda w: jnp.where(w > 0, w, 0),
    "`w.astype(bfloat16)`": lambda w: w.astype(jnp.bfloat16),
    "`w.astype(int32)`": lambda w: w.astype(jnp.int32),
    "`optimization_barrier`": lambda w: lax.optimization_barrier(w),
    "`-w`": lambda w: -w,
    "`w * 3`, `w / 3`": lambda w: [w * 3, w / 3],
    "`w * v`, a factor per column": lambda w: w * out[0],
    "`w + 1`": lambda w: w + 1,
    "`w + w`": lambda w: w + w,
    "`exp(w)`": lambda w: jnp.exp(w),
    "`w.sum(0)`": lambda w: w.sum(0),
    "`sort(w)`": lambda w: jnp.sort(w),
    "`w.at[0].set(0)`": lambda w: w.at[0].set(0.0),
}
# Each takes a stack of such arrays, (EXPERTS, K, N).
STACK = {
    "`w[1]` of a stack": lambda w: w[1],
    "`w[i]`, `i` traced": lambda w: lax.dynamic_index_in_dim(w, 1, keepdims=False),
    "`swapaxes(w, 1, 2)`": lambda w: jnp.swapaxes(w, 1, 2),
    "`matmul` of stacks": lambda w: xs @ w,
    "`vmap(x @ w)`": lambda w: jax.vmap(jnp.matmul)(xs, w),
    "`scan` over layers": lambda w: lax.scan(lambda i, layer: (i + 1, (i + x) @ layer), 0, w)[1],
    "`ragged_dot`": lambda w: lax.ragged_dot(x, w, sizes),
}
PATHS = {"xla": "tiled", "reference": "reference"}  # any other name is that of a native kernel
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def cell(operation, q):
    """What happened to `q` while `operation` was traced. All choices are made then."""
    with materialization_policy("allow"):
        report = explain(lambda q: jax.eval_shape(implicit(operation), q))(q)
    results = jax.tree.leaves(report.result, is_leaf=leaf_predicate)
    paths = sorted({PATHS.get(event.name, "kernel") for event in report.kernels})
    if report.materializations or paths:
        return " + ".join([*paths, *["materializes"] * bool(report.materializations)])
    return "exact" if all(type(result) is type(q) for result in results) else "decodes part"


def check(operations, q):
    """All operations in one program, compared with the same program on the dense array."""
    run = lambda w: [operation(w) for operation in operations.values()]  # noqa: E731
    with materialization_policy("allow"):
        found = jax.jit(implicit(run), compiler_options=QUICK)(q)
    wanted = jax.jit(run, compiler_options=QUICK)(q.materialize())
    for name, result, value in zip(operations, found, wanted, strict=True):
        for a, b in zip(jax.tree.leaves(result, is_leaf=leaf_predicate), jax.tree.leaves(value), strict=True):
            dense = materialize(a)
            assert (dense.shape, dense.dtype) == (b.shape, b.dtype), name
            a, b = (np.asarray(v, np.float32) for v in (dense, b))
            assert np.abs(a - b).max() <= 1e-5 * (1 + np.abs(b).max()), (name, q)


def main():
    print(f"JAX {jax.__version__} on {jax.default_backend()}, w of shape {(K, N)}\n")
    print("| operation |", " | ".join(FORMATS), "|")
    print("|---" * (len(FORMATS) + 1) + "|")
    for operations, shape in ((MATRIX, (K, N)), (STACK, (EXPERTS, K, N))):
        arrays = [quantize(normal(*shape), dtype=kind, axis=-2) for kind in FORMATS]
        for q in arrays:
            check(operations, q)
        for name, operation in operations.items():
            print(f"| {name} |", " | ".join(cell(operation, q) for q in arrays), "|")


main()
