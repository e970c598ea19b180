"""Rows of `jax.numpy`, `jax.numpy.linalg` and `jax.numpy.fft`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .calls import Call, simple, table

C = jnp.linspace(0.5, 2.0, 12)  # broadcasts against a row of `real`
M = jnp.asarray(np.random.default_rng(0).normal(size=(16, 12)), jnp.float32)
S = jnp.asarray(np.random.default_rng(1).normal(size=(16, 16)), jnp.float32)
X = jnp.asarray(np.random.default_rng(2).normal(size=(5, 16)), jnp.float32)
Y = jnp.asarray(np.random.default_rng(3).normal(size=(12, 5)), jnp.float32)
V = X[0]
ROWS = jnp.array([3, 0, 15])
INDEX = jnp.arange(192).reshape(16, 12) % 16

_ELEMENTWISE = simple(
    jnp,
    "jnp",
    "abs absolute angle arctan asinh arcsinh atan cbrt ceil conj conjugate cos cosh deg2rad degrees exp exp2 "
    "expm1 fabs floor frexp i0 imag isfinite isinf isnan isneginf isposinf iscomplex isreal logical_not modf "
    "negative positive rad2deg radians real reciprocal rint round around sign signbit sin sinc sinh square tan "
    "tanh trunc nan_to_num log log1p log2 log10 sqrt spacing",
)

_UNIT = simple(jnp, "jnp", "acos arccos acosh arccosh arcsin asin arctanh atanh")

_BINARY = {
    "jnp.add": lambda w: jnp.add(w, C),
    "jnp.subtract": lambda w: jnp.subtract(C, w),
    "jnp.multiply": lambda w: jnp.multiply(w, M),
    "jnp.multiply scalar": lambda w: jnp.multiply(w, 2.0),
    "jnp.divide": lambda w: jnp.divide(w, C),
    "jnp.true_divide": lambda w: jnp.true_divide(M, w),
    "jnp.floor_divide": lambda w: jnp.floor_divide(w, 0.25),
    "jnp.mod": lambda w: jnp.mod(w, 0.75),
    "jnp.remainder": lambda w: jnp.remainder(w, 0.5),
    "jnp.fmod": lambda w: jnp.fmod(w, 0.5),
    "jnp.divmod": lambda w: jnp.divmod(w, 0.5),
    "jnp.power": lambda w: jnp.power(w, 3),
    "jnp.pow": lambda w: jnp.pow(w, 2.0),
    "jnp.float_power": lambda w: jnp.float_power(w, 2),
    "jnp.arctan2": lambda w: jnp.arctan2(w, C),
    "jnp.atan2": lambda w: jnp.atan2(C, w),
    "jnp.copysign": lambda w: jnp.copysign(M, w),
    "jnp.heaviside": lambda w: jnp.heaviside(w, 0.5),
    "jnp.hypot": lambda w: jnp.hypot(w, M),
    "jnp.ldexp": lambda w: jnp.ldexp(w, 2),
    "jnp.logaddexp": lambda w: jnp.logaddexp(w, C),
    "jnp.logaddexp2": lambda w: jnp.logaddexp2(C, w),
    "jnp.maximum": lambda w: jnp.maximum(w, C),
    "jnp.minimum": lambda w: jnp.minimum(M, w),
    "jnp.fmax": lambda w: jnp.fmax(w, 0.5),
    "jnp.fmin": lambda w: jnp.fmin(w, 0.5),
    "jnp.nextafter": lambda w: jnp.nextafter(w, M),
    "jnp.equal": lambda w: jnp.equal(w, 0.5),
    "jnp.not_equal": lambda w: jnp.not_equal(w, 0.5),
    "jnp.greater": lambda w: jnp.greater(w, M),
    "jnp.greater_equal": lambda w: jnp.greater_equal(w, 0.5),
    "jnp.less": lambda w: jnp.less(M, w),
    "jnp.less_equal": lambda w: jnp.less_equal(w, 0.5),
    "jnp.isclose": lambda w: jnp.isclose(w, 0.5),
    "jnp.allclose": lambda w: jnp.allclose(w, M),
    "jnp.array_equal": lambda w: jnp.array_equal(w, w),
    "jnp.array_equiv": lambda w: jnp.array_equiv(w, C),
    "jnp.logical_and": lambda w: jnp.logical_and(w, M > 0),
    "jnp.logical_or": lambda w: jnp.logical_or(w > 0, w),
    "jnp.logical_xor": lambda w: jnp.logical_xor(M > 0, w),
    "jnp.clip": lambda w: jnp.clip(w, -1.0, 1.0),
    "jnp.where": lambda w: jnp.where(w > 0, w, M),
    "jnp.select": lambda w: jnp.select([w > 1, w < -1], [w, M], 0.0),
    "jnp.choose": lambda w: jnp.choose(INDEX % 2, [w, M], mode="clip"),
    "jnp.piecewise": lambda w: jnp.piecewise(w, [w > 0], [lambda v: v * 2, lambda v: v - 1]),
    "jnp.interp": lambda w: jnp.interp(w, jnp.array([-1.0, 0.0, 1.0]), jnp.array([2.0, 0.0, 5.0])),
    "jnp.polyval": lambda w: jnp.polyval(jnp.array([1.0, 2.0, 3.0]), w),
    "jnp.vectorize": lambda w: jnp.vectorize(lambda a, b: a * b)(w, C),
    "jnp.frompyfunc": lambda w: jnp.frompyfunc(jnp.add, nin=2, nout=1, identity=0).reduce(w, axis=0),
    "jnp.ufunc.reduce": lambda w: jnp.add.reduce(w, axis=0),
    "jnp.ufunc.outer": lambda w: jnp.multiply.outer(w[0], C),
}

_REDUCTIONS = {
    **simple(
        jnp,
        "jnp",
        "all any amax amin argmax argmin average count_nonzero max mean median min nanargmax nanargmin nanmax "
        "nanmean nanmedian nanmin nanprod nanstd nansum nanvar prod ptp std sum var cumsum cumprod nancumsum "
        "nancumprod",
    ),
    "jnp.sum axis": lambda w: jnp.sum(w, axis=0),
    "jnp.mean keepdims": lambda w: jnp.mean(w, axis=1, keepdims=True),
    "jnp.max axis": lambda w: jnp.max(w, axis=-1),
    "jnp.var ddof": lambda w: jnp.var(w, axis=0, ddof=1),
    "jnp.cumulative_sum": lambda w: jnp.cumulative_sum(w, axis=0),
    "jnp.cumulative_prod": lambda w: jnp.cumulative_prod(w, axis=1),
    "jnp.quantile": lambda w: jnp.quantile(w, 0.3, axis=0),
    "jnp.nanquantile": lambda w: jnp.nanquantile(w, 0.3),
    "jnp.percentile": lambda w: jnp.percentile(w, 40.0),
    "jnp.nanpercentile": lambda w: jnp.nanpercentile(w, 40.0, axis=1),
    "jnp.trapezoid": lambda w: jnp.trapezoid(w, axis=0),
    "jnp.diff": lambda w: jnp.diff(w, axis=0),
    "jnp.ediff1d": jnp.ediff1d,
    "jnp.gradient": jnp.gradient,
    "jnp.apply_along_axis": lambda w: jnp.apply_along_axis(jnp.sum, 0, w),
    "jnp.apply_over_axes": lambda w: jnp.apply_over_axes(jnp.sum, w, [0, 1]),
    "jnp.histogram": lambda w: jnp.histogram(w, bins=5, range=(-3.0, 3.0)),
    "jnp.histogram_bin_edges": lambda w: jnp.histogram_bin_edges(w, bins=4),
    "jnp.digitize": lambda w: jnp.digitize(w, jnp.array([-1.0, 0.0, 1.0])),
    "jnp.cov": jnp.cov,
    "jnp.corrcoef": jnp.corrcoef,
    "jnp.unwrap": jnp.unwrap,
}

_SHAPES = {
    **simple(
        jnp,
        "jnp",
        "array asarray atleast_1d atleast_2d atleast_3d copy diagflat diagonal fliplr flipud matrix_transpose "
        "ravel rot90 trace transpose tril triu unstack zeros_like ones_like empty_like flip ndim size shape "
        "iscomplexobj isrealobj",
    ),
    "jnp.append": lambda w: jnp.append(w, M, axis=0),
    "jnp.array_split": lambda w: jnp.array_split(w, 5),
    "jnp.astype": lambda w: jnp.astype(w, jnp.int32),
    "jnp.block": lambda w: jnp.block([[w, M], [M, w]]),
    "jnp.broadcast_arrays": lambda w: jnp.broadcast_arrays(w, C),
    "jnp.broadcast_to": lambda w: jnp.broadcast_to(w, (2, 16, 12)),
    "jnp.column_stack": lambda w: jnp.column_stack([w, V]),
    "jnp.concatenate": lambda w: jnp.concatenate([w, M, w], axis=1),
    "jnp.concat": lambda w: jnp.concat([M, w]),
    "jnp.delete": lambda w: jnp.delete(w, 3, axis=0),
    "jnp.diag": lambda w: jnp.diag(w, 1),
    "jnp.dstack": lambda w: jnp.dstack([w, w]),
    "jnp.expand_dims": lambda w: jnp.expand_dims(w, 1),
    "jnp.fill_diagonal": lambda w: jnp.fill_diagonal(w, 7.0, inplace=False),
    "jnp.full_like": lambda w: jnp.full_like(w, 3.0),
    "jnp.hsplit": lambda w: jnp.hsplit(w, 3),
    "jnp.hstack": lambda w: jnp.hstack([w, M]),
    "jnp.insert": lambda w: jnp.insert(w, 2, 5.0, axis=1),
    "jnp.ix_": lambda w: w[jnp.ix_(ROWS, jnp.array([1, 2]))],
    "jnp.meshgrid": lambda w: jnp.meshgrid(w[0], w[1]),
    "jnp.moveaxis": lambda w: jnp.moveaxis(w, 0, 1),
    "jnp.pad": lambda w: jnp.pad(w, 2, mode="reflect"),
    "jnp.pad constant": lambda w: jnp.pad(w, ((1, 0), (0, 2)), constant_values=3.0),
    "jnp.permute_dims": lambda w: jnp.permute_dims(w, (1, 0)),
    "jnp.place": lambda w: jnp.place(w, M > 0, C, inplace=False),
    "jnp.put": lambda w: jnp.put(w, ROWS, 9.0, inplace=False),
    "jnp.put_along_axis": lambda w: jnp.put_along_axis(w, INDEX[:1], 4.0, axis=0, inplace=False),
    "jnp.repeat": lambda w: jnp.repeat(w, 3, axis=1),
    "jnp.reshape": lambda w: jnp.reshape(w, (4, -1)),
    "jnp.resize": lambda w: jnp.resize(w, (7, 5)),
    "jnp.roll": lambda w: jnp.roll(w, (2, 1), axis=(0, 1)),
    "jnp.rollaxis": lambda w: jnp.rollaxis(w, 1),
    "jnp.split": lambda w: jnp.split(w, [3, 9]),
    "jnp.squeeze": lambda w: jnp.squeeze(w[:1]),
    "jnp.stack": lambda w: jnp.stack([w, M], axis=1),
    "jnp.swapaxes": lambda w: jnp.swapaxes(w, 0, 1),
    "jnp.tile": lambda w: jnp.tile(w, (2, 3)),
    "jnp.vsplit": lambda w: jnp.vsplit(w, 4),
    "jnp.vstack": lambda w: jnp.vstack([C, w]),
    "jnp.vander": lambda w: jnp.vander(w[:, 0], 3),
    "jnp.result_type": lambda w: jnp.zeros((), jnp.result_type(w, jnp.float16)),
    "jnp.tril_indices_from": jnp.tril_indices_from,
    "jnp.triu_indices_from": jnp.triu_indices_from,
    "jnp.einsum transpose": lambda w: jnp.einsum("ij->ji", w),
    "jnp.einsum reduce": lambda w: jnp.einsum("ij->j", w),
}

_INDEXING = {
    **simple(jnp, "jnp", "argsort sort sort_complex"),
    "jnp.argpartition": lambda w: jnp.sort(jnp.argpartition(w, 3, axis=0)[:3], axis=0),
    "jnp.partition": lambda w: jnp.partition(w, 3)[:, 3],
    "jnp.lexsort": lambda w: jnp.lexsort((w[:, 0], w[:, 1])),
    "jnp.searchsorted": lambda w: jnp.searchsorted(C, w),
    "jnp.take": lambda w: jnp.take(w, ROWS, axis=0),
    "jnp.take fill": lambda w: jnp.take(w, jnp.array([0, 99]), axis=0, mode="fill"),
    "jnp.take_along_axis": lambda w: jnp.take_along_axis(w, INDEX, axis=0),
    "jnp.isin": lambda w: jnp.isin(w, jnp.array([0.5, 0.25, -0.125])),
    "jnp.nonzero size": lambda w: jnp.nonzero(w > 0, size=20),
    "jnp.unique size": lambda w: jnp.unique(w, size=30),
    "jnp.union1d size": lambda w: jnp.union1d(w[0], C, size=24),
    "getitem row": lambda w: w[3],
    "getitem slice": lambda w: w[2:14:3, ::-1],
    "getitem rows": lambda w: w[ROWS],
    "getitem newaxis": lambda w: w[:, None, ..., 0],
    "getitem pairs": lambda w: w[ROWS, jnp.array([1, 2, 3])],
    "at set": lambda w: jnp.asarray(w).at[2].set(1.0),
    "at add": lambda w: jnp.asarray(w).at[ROWS].add(1.0),
    "at multiply": lambda w: jnp.asarray(w).at[:, 2].multiply(3.0),
    "at get": lambda w: w.at[ROWS].get(mode="clip"),
}

_CONCRETE = {
    **simple(jnp, "jnp", "argwhere flatnonzero nonzero unique unique_all unique_counts unique_inverse unique_values"),
    "jnp.extract": lambda w: jnp.extract(w > 0, w),
    "jnp.compress": lambda w: jnp.compress(np.arange(16) % 3 == 0, w, axis=0),
    "jnp.trim_zeros": lambda w: jnp.trim_zeros(w[0]),
    "jnp.intersect1d": lambda w: jnp.intersect1d(w, w[0]),
    "jnp.setdiff1d": lambda w: jnp.setdiff1d(w, w[0]),
    "jnp.setxor1d": lambda w: jnp.setxor1d(w, w[0]),
    "jnp.union1d": lambda w: jnp.union1d(w, C),
    "getitem mask": lambda w: w[w > 0],
    "float()": lambda w: float(w[0, 0]),
    "bool()": lambda w: bool(jnp.any(w)),
    "item()": lambda w: w[1, 2].item(),
    "tolist()": lambda w: w.tolist(),
}

_PRODUCTS = {
    "jnp.matmul": lambda w: jnp.matmul(X, w),
    "jnp.matmul left": lambda w: jnp.matmul(w, Y),
    "jnp.matmul vector": lambda w: jnp.matmul(V, w),
    "jnp.matmul stacked x": lambda w: jnp.matmul(X[None] * jnp.ones((2, 1, 1)), w),
    "jnp.dot": lambda w: jnp.dot(X, w),
    "jnp.dot left": lambda w: jnp.dot(w, Y),
    "jnp.dot 3d": lambda w: jnp.dot(X.reshape(5, 1, 16), w),
    "jnp.einsum": lambda w: jnp.einsum("bk,kn->bn", X, w),
    "jnp.einsum left": lambda w: jnp.einsum("kn,bk->bn", w, X),
    "jnp.einsum transposed": lambda w: jnp.einsum("kn,nb->bk", w, Y),
    "jnp.einsum vector": lambda w: jnp.einsum("k,kn", V, w),
    "jnp.einsum chain": lambda w: jnp.einsum("bk,kn,nm->bm", X, w, Y, optimize="optimal"),
    "jnp.tensordot": lambda w: jnp.tensordot(X, w, axes=1),
    "jnp.tensordot axes": lambda w: jnp.tensordot(w, X, axes=([0], [1])),
    "jnp.inner": lambda w: jnp.inner(Y.T, w),
    "jnp.matvec": lambda w: jnp.matvec(w, C),
    "jnp.vecmat": lambda w: jnp.vecmat(V, w),
    "jnp.linalg.matmul": lambda w: jnp.linalg.matmul(X, w),
    "jnp.linalg.tensordot": lambda w: jnp.linalg.tensordot(X, w, axes=1),
    "jnp.linalg.multi_dot": lambda w: jnp.linalg.multi_dot([X, w, Y]),
    "x @ w": lambda w: X @ w,
    "w @ y": lambda w: w @ Y,
    "dense layer": lambda w: jax.nn.relu(jnp.dot(X, w) + C),
    "jit dense layer": lambda w: jax.jit(lambda x, w: jnp.tanh(x @ w))(X, w),
    "vmap dense layer": lambda w: jax.vmap(lambda x: jnp.dot(x, w))(X),
    "two layers": lambda w: jnp.tanh(X @ w) @ Y @ X @ w,
}

_STACKED = {
    "jnp.matmul batched": lambda w: jnp.matmul(jnp.ones((3, 5, 16)), w),
    "jnp.matmul batched left": lambda w: jnp.matmul(w, jnp.ones((3, 12, 5))),
    "jnp.einsum batched": lambda w: jnp.einsum("bmk,bkn->bmn", jnp.ones((3, 5, 16)), w),
    "jnp.vectorize matmul": lambda w: jnp.vectorize(jnp.matmul, signature="(m,k),(k,n)->(m,n)")(
        jnp.ones((3, 5, 16)), w
    ),
    "vmap matmul": lambda w: jax.vmap(lambda w: X @ w)(w),
}

_PRODUCTS_DENSE = {
    "jnp.vdot": lambda w: jnp.vdot(w, M),
    "jnp.vecdot": lambda w: jnp.vecdot(w, M),
    "jnp.tensordot all": lambda w: jnp.tensordot(w, M, axes=2),
    "jnp.outer": lambda w: jnp.outer(w, C),
    "jnp.kron": lambda w: jnp.kron(w, jnp.ones((2, 2))),
    "jnp.cross": lambda w: jnp.cross(w[:, :3], C[:3]),
    "jnp.convolve": lambda w: jnp.convolve(w[0], C[:3]),
    "jnp.correlate": lambda w: jnp.correlate(w[0], C[:3]),
    "jnp.matmul self": lambda w: jnp.matmul(w, jnp.transpose(w)),
    "jnp.polyadd": lambda w: jnp.polyadd(w[0], C),
    "jnp.polysub": lambda w: jnp.polysub(w[0], C),
    "jnp.polymul": lambda w: jnp.polymul(w[0], C),
    "jnp.polyder": lambda w: jnp.polyder(w[0]),
    "jnp.polyint": lambda w: jnp.polyint(w[0]),
    "jnp.polydiv": lambda w: jnp.polydiv(w[0], C[:2]),
    "jnp.poly": lambda w: jnp.poly(w[0]),
    "jnp.linalg.outer": lambda w: jnp.linalg.outer(w[0], w[1]),
    "jnp.linalg.vecdot": lambda w: jnp.linalg.vecdot(w, M),
    "jnp.linalg.cross": lambda w: jnp.linalg.cross(w[:, :3], M[:, :3]),
    "jnp.linalg.norm": jnp.linalg.norm,
    "jnp.linalg.norm ord": lambda w: jnp.linalg.norm(w, ord=1, axis=0),
    "jnp.linalg.vector_norm": jnp.linalg.vector_norm,
    "jnp.linalg.matrix_norm": jnp.linalg.matrix_norm,
    "jnp.linalg.matrix_transpose": jnp.linalg.matrix_transpose,
    "jnp.linalg.diagonal": jnp.linalg.diagonal,
    "jnp.linalg.trace": jnp.linalg.trace,
    "jnp.linalg.svdvals": jnp.linalg.svdvals,
    "jnp.linalg.matrix_rank": jnp.linalg.matrix_rank,
    "jnp.linalg.pinv": jnp.linalg.pinv,
    "jnp.linalg.qr r": lambda w: jnp.abs(jnp.linalg.qr(w, mode="r")),
    "jnp.linalg.lstsq": lambda w: jnp.linalg.lstsq(w, V)[0],
}

_LINALG_SPD = {
    **simple(jnp.linalg, "jnp.linalg", "cholesky cond det eigvalsh inv slogdet"),
    "jnp.linalg.eigh": lambda w: jnp.linalg.eigh(w).eigenvalues,
    "jnp.linalg.eigvals": lambda w: jnp.sort(jnp.real(jnp.linalg.eigvals(w))),
    "jnp.linalg.solve": lambda w: jnp.linalg.solve(w, V),
    "jnp.linalg.matrix_power": lambda w: jnp.linalg.matrix_power(w, 3),
    "jnp.linalg.svd": lambda w: jnp.linalg.svd(w).S,
    "jnp.linalg.tensorinv": lambda w: jnp.linalg.tensorinv(w, ind=1),
    "jnp.linalg.tensorsolve": lambda w: jnp.linalg.tensorsolve(w, V),
}

_FFT = {
    **simple(jnp.fft, "jnp.fft", "fft fft2 fftn ifft ifft2 ifftn rfft rfft2 rfftn ihfft fftshift ifftshift"),
}
_FFT_COMPLEX = {
    **simple(jnp.fft, "jnp.fft", "irfft irfft2 irfftn hfft"),
    "jnp.fft.fft complex": lambda w: jnp.fft.fft(w, axis=0),
    "jnp.real complex": jnp.real,
    "jnp.imag complex": jnp.imag,
    "jnp.angle complex": jnp.angle,
    "jnp.conj complex": jnp.conj,
    "jnp.abs complex": jnp.abs,
}

_INTEGER = {
    **simple(jnp, "jnp", "bitwise_count bitwise_invert bitwise_not invert"),
    "jnp.bitwise_and": lambda w: jnp.bitwise_and(w, 12),
    "jnp.bitwise_or": lambda w: jnp.bitwise_or(w, 12),
    "jnp.bitwise_xor": lambda w: jnp.bitwise_xor(12, w),
    "jnp.left_shift": lambda w: jnp.left_shift(w, 2),
    "jnp.right_shift": lambda w: jnp.right_shift(w, 1),
    "jnp.bitwise_left_shift": lambda w: jnp.bitwise_left_shift(w, 2),
    "jnp.bitwise_right_shift": lambda w: jnp.bitwise_right_shift(w, 1),
    "jnp.gcd": lambda w: jnp.gcd(w, 12),
    "jnp.lcm": lambda w: jnp.lcm(w, 6),
    "jnp.bincount": lambda w: jnp.bincount(jnp.ravel(w), length=40),
    "jnp.packbits": lambda w: jnp.packbits(w > 0),
    "jnp.unravel_index": lambda w: jnp.unravel_index(jnp.abs(w), (16, 16)),
    "jnp.sum integer": jnp.sum,
    "jnp.mean integer": jnp.mean,
}

CALLS: list[Call] = [
    *table("real", {**_ELEMENTWISE, **_BINARY, **_REDUCTIONS, **_SHAPES, **_INDEXING, **_PRODUCTS_DENSE, **_FFT}),
    *table("unit", _UNIT),
    *table("real", _CONCRETE, concrete=True),
    *table("real", _PRODUCTS, dispatches=True),
    *table("stack", _STACKED, dispatches=True),
    *table("spd", _LINALG_SPD),
    *table("complex", _FFT_COMPLEX),
    *table("integer", _INTEGER),
]
