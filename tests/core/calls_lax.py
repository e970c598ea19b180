"""Rows of `jax.lax` and `jax.lax.linalg`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .calls import Call, simple, table
from .calls_numpy import ROWS, C, M, V, X, Y

_DOT = (((1,), (0,)), ((), ()))
_ROWS_GATHER = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
_ROWS_SCATTER = lax.ScatterDimensionNumbers(
    update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
)


def _scatter(scatter):
    """Row updates of `w`, and `w`'s own rows as the updates of a dense operand."""
    index = ROWS[:, None]
    return lambda w: (
        scatter(w, index, M[:3], _ROWS_SCATTER),
        scatter(M, index, lax.slice(w, (0, 0), (3, 12)), _ROWS_SCATTER),
    )


_ELEMENTWISE = simple(
    lax,
    "lax",
    "abs acosh asinh atan bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf erfc exp exp2 expm1 floor "
    "is_finite lgamma log log1p logistic neg reciprocal round rsqrt sign sin sinh sqrt square tan tanh "
    "stop_gradient optimization_barrier",
)

_BINARY = {
    "lax.add": lambda w: lax.add(w, M),
    "lax.sub": lambda w: lax.sub(M, w),
    "lax.mul": lambda w: lax.mul(w, M),
    "lax.mul scalar": lambda w: lax.mul(w, jnp.float32(2)),
    "lax.div": lambda w: lax.div(M, w),
    "lax.rem": lambda w: lax.rem(w, M),
    "lax.max": lambda w: lax.max(w, M),
    "lax.min": lambda w: lax.min(M, w),
    "lax.pow": lambda w: lax.pow(w, jnp.full((16, 12), 2.0)),
    "lax.integer_pow": lambda w: lax.integer_pow(w, 3),
    "lax.atan2": lambda w: lax.atan2(w, M),
    "lax.nextafter": lambda w: lax.nextafter(w, M),
    "lax.complex": lambda w: lax.complex(w, M),
    "lax.eq": lambda w: lax.eq(w, M),
    "lax.ne": lambda w: lax.ne(w, M),
    "lax.ge": lambda w: lax.ge(w, M),
    "lax.gt": lambda w: lax.gt(w, M),
    "lax.le": lambda w: lax.le(w, M),
    "lax.lt": lambda w: lax.lt(M, w),
    "lax.clamp": lambda w: lax.clamp(-1.0, w, 1.0),
    "lax.select": lambda w: lax.select(M > 0, w, M),
    "lax.select_n": lambda w: lax.select_n(M > 0, M, w),
    "lax.reduce_precision": lambda w: lax.reduce_precision(w, 5, 3),
    "lax.convert_element_type": lambda w: lax.convert_element_type(w, jnp.int32),
    "lax.convert_element_type bf16": lambda w: lax.convert_element_type(w, jnp.bfloat16),
    "lax.bitcast_convert_type": lambda w: lax.bitcast_convert_type(w, jnp.int32),
}

_SPECIAL_UNIT = {
    **simple(lax, "lax", "acos asin atanh erf_inv"),
    "lax.betainc": lambda w: lax.betainc(jnp.full((16, 16), 2.0), jnp.full((16, 16), 3.0), w),
    "lax.igamma": lambda w: lax.igamma(jnp.full((16, 16), 2.0), w),
    "lax.igammac": lambda w: lax.igammac(jnp.full((16, 16), 2.0), w),
    "lax.polygamma": lambda w: lax.polygamma(jnp.full((16, 16), 2.0), w),
    "lax.zeta": lambda w: lax.zeta(jnp.full((16, 16), 3.0), w),
    "lax.random_gamma_grad": lambda w: lax.random_gamma_grad(jnp.full((16, 16), 2.0), w),
}

_SHAPES = {
    "lax.broadcast": lambda w: lax.broadcast(w, (2,)),
    "lax.broadcast_in_dim": lambda w: lax.broadcast_in_dim(w, (3, 16, 12), (1, 2)),
    "lax.collapse": lambda w: lax.collapse(w, 0, 2),
    "lax.concatenate": lambda w: lax.concatenate([w, M], 0),
    "lax.expand_dims": lambda w: lax.expand_dims(w, (1,)),
    "lax.full_like": lambda w: lax.full_like(w, 2.0),
    "lax.pad": lambda w: lax.pad(w, jnp.float32(0), ((1, 2, 0), (0, 0, 1))),
    "lax.reshape": lambda w: lax.reshape(w, (12, 16)),
    "lax.reshape dimensions": lambda w: lax.reshape(w, (12, 16), dimensions=(1, 0)),
    "lax.rev": lambda w: lax.rev(w, (0,)),
    "lax.slice": lambda w: lax.slice(w, (2, 0), (14, 12), (3, 2)),
    "lax.slice_in_dim": lambda w: lax.slice_in_dim(w, 1, 9, axis=1),
    "lax.split": lambda w: lax.split(w, (4, 12)),
    "lax.squeeze": lambda w: lax.squeeze(lax.slice(w, (0, 0), (1, 12)), (0,)),
    "lax.transpose": lambda w: lax.transpose(w, (1, 0)),
    "lax.tile": lambda w: lax.tile(w, (2, 1)),
    "lax.index_in_dim": lambda w: lax.index_in_dim(w, 3, keepdims=False),
    "lax.index_take": lambda w: lax.index_take(w, (ROWS,), axes=(0,)),
    "lax.dynamic_slice": lambda w: lax.dynamic_slice(w, (jnp.int32(2), 1), (4, 5)),
    "lax.dynamic_slice_in_dim": lambda w: lax.dynamic_slice_in_dim(w, jnp.int32(2), 4),
    "lax.dynamic_index_in_dim": lambda w: lax.dynamic_index_in_dim(w, jnp.int32(2)),
    "lax.dynamic_update_slice": lambda w: lax.dynamic_update_slice(w, jnp.ones((2, 2)), (3, 4)),
    "lax.dynamic_update_slice_in_dim": lambda w: lax.dynamic_update_slice_in_dim(w, jnp.ones((2, 12)), 1, 0),
    "lax.dynamic_update_index_in_dim": lambda w: lax.dynamic_update_index_in_dim(jnp.zeros((2, 16, 12)), w, 1, 0),
    "lax.gather": lambda w: lax.gather(w, ROWS[:, None], _ROWS_GATHER, (1, 12)),
    "lax.scatter": _scatter(lax.scatter),
    "lax.scatter_add": _scatter(lax.scatter_add),
    "lax.scatter_sub": _scatter(lax.scatter_sub),
    "lax.scatter_mul": _scatter(lax.scatter_mul),
    "lax.scatter_max": _scatter(lax.scatter_max),
    "lax.scatter_min": _scatter(lax.scatter_min),
    "lax.sort": lambda w: lax.sort(w, dimension=0),
    "lax.sort_key_val": lambda w: lax.sort_key_val(w, M),
    "lax.sort operands": lambda w: lax.sort((M, w), num_keys=2),
    "lax.top_k": lambda w: lax.top_k(w, 3),
    "lax.approx_max_k": lambda w: lax.approx_max_k(w, 2)[0],
    "lax.approx_min_k": lambda w: lax.approx_min_k(w, 2)[0],
    "lax.with_sharding_constraint": lambda w: lax.with_sharding_constraint(
        w, jax.sharding.SingleDeviceSharding(jax.devices()[0])
    ),
}

_REDUCTIONS = {
    "lax.argmax": lambda w: lax.argmax(w, 0, jnp.int32),
    "lax.argmin": lambda w: lax.argmin(w, 1, jnp.int32),
    "lax.cumsum": lambda w: lax.cumsum(w, axis=0),
    "lax.cumprod": lambda w: lax.cumprod(w, axis=1, reverse=True),
    "lax.cummax": lambda w: lax.cummax(w, axis=0),
    "lax.cummin": lambda w: lax.cummin(w, axis=0),
    "lax.cumlogsumexp": lambda w: lax.cumlogsumexp(w, axis=0),
    "lax.reduce": lambda w: lax.reduce(w, jnp.float32(0), lax.add, (0,)),
    "lax.reduce custom": lambda w: lax.reduce(w, jnp.float32(1), lambda a, b: jnp.maximum(a, b), (1,)),
    "lax.reduce_max": lambda w: lax.reduce_max(w, (0,)),
    "lax.reduce_min": lambda w: lax.reduce_min(w, (1,)),
    "lax.reduce_sum": lambda w: lax.reduce_sum(w, (0, 1)),
    "lax.reduce_prod": lambda w: lax.reduce_prod(w, (0,)),
    "lax.reduce_window": lambda w: lax.reduce_window(w, 0.0, lax.add, (2, 2), (1, 1), "VALID"),
    "lax.associative_scan": lambda w: lax.associative_scan(jnp.add, w),
    "lax.map": lambda w: lax.map(lambda row: row * 2 + 1, w),
    "lax.scan rows": lambda w: lax.scan(lambda c, row: (c + row, c * row), C, w),
    "lax.fori_loop": lambda w: lax.fori_loop(0, 3, lambda i, v: v + 1.0, w),
    "lax.while_loop": lambda w: lax.while_loop(lambda v: jnp.max(v) < 9, lambda v: v + 1.0, w),
    "lax.cond": lambda w: lax.cond(C[0] > 0, lambda v: v + 1.0, lambda v: v - 1.0, w),
    "lax.switch": lambda w: lax.switch(1, [lambda v: v, lambda v: v * 3.0], w),
    "lax.custom_root": lambda w: lax.custom_root(
        lambda v: v - w, jnp.zeros((16, 12)), lambda f, v: v - f(v), lambda g, y: y
    ),
}

_PRODUCTS = {
    "lax.dot": lambda w: lax.dot(X, w),
    "lax.dot left": lambda w: lax.dot(w, Y),
    "lax.dot_general": lambda w: lax.dot_general(X, w, _DOT),
    "lax.dot_general left": lambda w: lax.dot_general(w, Y, _DOT),
    "lax.dot_general transposed": lambda w: lax.dot_general(Y.T, w, (((1,), (1,)), ((), ()))),
    "lax.dot_general precision": lambda w: lax.dot_general(X, w, _DOT, precision=lax.Precision.HIGHEST),
    "lax.dot_general preferred": lambda w: lax.dot_general(X, w, _DOT, preferred_element_type=jnp.float32),
    "lax.dot_general middle": lambda w: lax.dot_general(X.reshape(5, 16, 1), w, (((1,), (0,)), ((), ()))),
    "lax.dot vector": lambda w: lax.dot(V, w),
    "lax.scan of products": lambda w: lax.scan(lambda c, x: (c, x @ w), 0.0, X)[1],
    "lax.map of products": lambda w: lax.map(lambda x: jnp.dot(x, w), X),
    "lax.cond of products": lambda w: lax.cond(C[0] > 0, lambda: X @ w, lambda: 2 * (X @ w)),
}

_STACKED = {
    "lax.batch_matmul": lambda w: lax.batch_matmul(jnp.ones((3, 5, 16)), w),
    "lax.dot_general batched": lambda w: lax.dot_general(jnp.ones((3, 5, 16)), w, (((2,), (1,)), ((0,), (0,)))),
    "lax.scan layers": lambda w: lax.scan(lambda c, w: (jnp.tanh(c @ w @ Y @ X), None), X, w)[0],
}

_DENSE_PRODUCTS = {
    "lax.dot_general outer": lambda w: lax.dot_general(w, M, (((), ()), ((), ()))),
    "lax.dot_general all": lambda w: lax.dot_general(w, M, (((0, 1), (0, 1)), ((), ()))),
    "lax.ragged_dot": lambda w: lax.ragged_dot(w, jnp.ones((2, 12, 3)), jnp.array([10, 6])),
    "lax.fft": lambda w: lax.fft(w, "RFFT", (12,)),
}

_KERNEL = {
    "lax.conv": lambda w: lax.conv(jnp.ones((1, 3, 12, 8)), w, (1, 1), "SAME"),
    "lax.conv_with_general_padding": lambda w: lax.conv_with_general_padding(
        jnp.ones((1, 3, 12, 8)), w, (1, 1), ((1, 1), (0, 2)), None, None
    ),
    "lax.conv_general_dilated": lambda w: lax.conv_general_dilated(
        jnp.ones((1, 6, 6, 8)), w, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    ),
    "lax.conv_transpose": lambda w: lax.conv_transpose(jnp.ones((1, 4, 4, 8)), w, (2, 2), "SAME"),
    "lax.conv_general_dilated_patches": lambda w: lax.conv_general_dilated_patches(w, (2, 2), (1, 1), "VALID"),
}

_LINALG = {
    "lax.linalg.cholesky": lambda w: jnp.tril(lax.linalg.cholesky(w)),
    "lax.linalg.eigh": lambda w: lax.linalg.eigh(w)[1],
    "lax.linalg.lu": lax.linalg.lu,
    "lax.linalg.qr": lambda w: jnp.abs(lax.linalg.qr(w)[1]),
    "lax.linalg.svd": lambda w: lax.linalg.svd(w, compute_uv=False),
    "lax.linalg.triangular_solve": lambda w: lax.linalg.triangular_solve(w, V[:, None], left_side=True, lower=True),
    "lax.linalg.symmetric_product": lambda w: lax.linalg.symmetric_product(w, jnp.eye(16)),
    "lax.linalg.hessenberg": lambda w: lax.linalg.hessenberg(w)[0],
    "lax.linalg.schur": lambda w: jnp.abs(lax.linalg.schur(w)[0]),
    "lax.linalg.tridiagonal": lambda w: lax.linalg.tridiagonal(w, lower=True)[1],
    "lax.linalg.householder_product": lambda w: lax.linalg.householder_product(w, V / 100),
    "lax.custom_linear_solve": lambda w: lax.custom_linear_solve(
        lambda v: w @ v, V, lambda f, b: jnp.linalg.solve(jax.jacobian(f)(b), b), symmetric=True
    ),
}

_INTEGER = {
    **simple(lax, "lax", "bitwise_not clz population_count"),
    "lax.bitwise_and": lambda w: lax.bitwise_and(w, jnp.int32(6)),
    "lax.bitwise_or": lambda w: lax.bitwise_or(w, jnp.int32(6)),
    "lax.bitwise_xor": lambda w: lax.bitwise_xor(jnp.int32(6), w),
    "lax.shift_left": lambda w: lax.shift_left(w, jnp.int32(2)),
    "lax.shift_right_arithmetic": lambda w: lax.shift_right_arithmetic(w, jnp.int32(1)),
    "lax.shift_right_logical": lambda w: lax.shift_right_logical(w, jnp.int32(1)),
    "lax.reduce_and": lambda w: lax.reduce_and(w, (0,)),
    "lax.reduce_or": lambda w: lax.reduce_or(w, (1,)),
    "lax.reduce_xor": lambda w: lax.reduce_xor(w, (0, 1)),
    "lax.mulhi": lambda w: lax.mulhi(w, jnp.full((16, 16), 2**30, jnp.int32)),
}
_COMPLEX = simple(lax, "lax", "conj real imag")

CALLS: list[Call] = [
    *table("real", {**_ELEMENTWISE, **_BINARY, **_SHAPES, **_REDUCTIONS, **_DENSE_PRODUCTS}),
    *table("unit", _SPECIAL_UNIT),
    *table("real", _PRODUCTS, dispatches=True),
    *table("stack", _STACKED, dispatches=True),
    *table("kernel", _KERNEL),
    *table("spd", _LINALG),
    *table("integer", _INTEGER),
    *table("complex", _COMPLEX),
]
