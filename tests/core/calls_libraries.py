"""Rows of `jax.nn`, `jax.scipy`, `jax.image`, `jax.ops` and `jax.random`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np

from .calls import Call, simple, table
from .calls_numpy import C, M, V, X, Y

KEY = jax.random.key(7)
SEGMENTS = jnp.arange(16) % 4

_NN = {
    **simple(
        jax.nn,
        "jax.nn",
        "celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu log_sigmoid "
        "log_softmax logmeanexp logsumexp mish relu relu6 selu sigmoid silu soft_sign softmax softplus "
        "sparse_plus sparse_sigmoid squareplus standardize swish tanh",
    ),
    "jax.nn.gelu exact": lambda w: jax.nn.gelu(w, approximate=False),
    "jax.nn.softmax where": lambda w: jax.nn.softmax(w, axis=0, where=M > 0),
    "jax.nn.dot_product_attention": lambda w: jax.nn.dot_product_attention(
        jnp.reshape(w, (1, 16, 3, 4)), jnp.reshape(M, (1, 16, 3, 4)), jnp.reshape(M, (1, 16, 3, 4))
    ),
}

_NN_PRODUCTS = {
    "layer gelu": lambda w: jax.nn.gelu(X @ w),
    "layer softmax": lambda w: jax.nn.softmax(X @ w + C),
    "layer swiglu": lambda w: jax.nn.silu(X @ w) * (X @ w),
    "layer standardize": lambda w: jax.nn.standardize(X) @ w,
    "jax.nn.dot_product_attention projected": lambda w: jax.nn.dot_product_attention(
        jnp.reshape(X @ w, (1, 5, 3, 4)), jnp.reshape(X @ w, (1, 5, 3, 4)), jnp.reshape(M[:5], (1, 5, 3, 4))
    ),
    "vjp of a layer": lambda w: jax.vjp(lambda x: x @ w, X)[1](Y.T),
    "grad of a layer": lambda w: jax.grad(lambda x: jnp.tanh(x @ w).sum())(X),
    "checkpoint of a layer": lambda w: jax.checkpoint(lambda x: jnp.tanh(x @ w))(X),
}

_SPECIAL = {
    **simple(
        jsp.special,
        "jsp.special",
        "digamma erf erfc exp1 expi expit gammaln gammasgn i0 i0e i1 i1e log_ndtr log_softmax logsumexp ndtr softmax",
    ),
    "jsp.special.logsumexp weights": lambda w: jsp.special.logsumexp(w, axis=0, b=jnp.abs(M)),
    "jsp.special.boxcox": lambda w: jsp.special.boxcox(jnp.abs(M), w),
    "jsp.special.boxcox1p": lambda w: jsp.special.boxcox1p(jnp.abs(M), w),
}

_SPECIAL_UNIT = {
    **simple(jsp.special, "jsp.special", "entr erfinv factorial gamma logit ndtri spence loggamma"),
    "jsp.special.beta": lambda w: jsp.special.beta(w, 2.0),
    "jsp.special.betainc": lambda w: jsp.special.betainc(2.0, 3.0, w),
    "jsp.special.betaln": lambda w: jsp.special.betaln(w, 2.0),
    "jsp.special.gammainc": lambda w: jsp.special.gammainc(w, 2.0),
    "jsp.special.gammaincc": lambda w: jsp.special.gammaincc(2.0, w),
    "jsp.special.kl_div": lambda w: jsp.special.kl_div(w, 0.5),
    "jsp.special.rel_entr": lambda w: jsp.special.rel_entr(0.5, w),
    "jsp.special.multigammaln": lambda w: jsp.special.multigammaln(w + 3, 3),
    "jsp.special.poch": lambda w: jsp.special.poch(w, 2.0),
    "jsp.special.polygamma": lambda w: jsp.special.polygamma(1, w),
    "jsp.special.xlog1py": lambda w: jsp.special.xlog1py(w, 2.0),
    "jsp.special.xlogy": lambda w: jsp.special.xlogy(2.0, w),
    "jsp.special.zeta": lambda w: jsp.special.zeta(2.0, w),
    "jsp.special.hyp1f1": lambda w: jsp.special.hyp1f1(1.0, 2.0, w),
    "jsp.special.bessel_jn": lambda w: jsp.special.bessel_jn(w[0], v=2, n_iter=20),
}

_STATS = {
    "jsp.stats.norm.pdf": jsp.stats.norm.pdf,
    "jsp.stats.norm.logpdf": jsp.stats.norm.logpdf,
    "jsp.stats.norm.cdf": jsp.stats.norm.cdf,
    "jsp.stats.norm.sf": jsp.stats.norm.sf,
    "jsp.stats.laplace.logpdf": jsp.stats.laplace.logpdf,
    "jsp.stats.cauchy.cdf": jsp.stats.cauchy.cdf,
    "jsp.stats.logistic.logpdf": jsp.stats.logistic.logpdf,
    "jsp.stats.t.logpdf": lambda w: jsp.stats.t.logpdf(w, 3.0),
    "jsp.stats.uniform.pdf": jsp.stats.uniform.pdf,
    "jsp.stats.expon.logpdf": jsp.stats.expon.logpdf,
    "jsp.stats.sem": jsp.stats.sem,
    "jsp.stats.mode": jsp.stats.mode,
    "jsp.stats.rankdata": jsp.stats.rankdata,
    "jsp.integrate.trapezoid": jsp.integrate.trapezoid,
    "jsp.signal.convolve": lambda w: jsp.signal.convolve(w, jnp.ones((3, 2))),
    "jsp.signal.convolve2d": lambda w: jsp.signal.convolve2d(w, jnp.ones((2, 3)), mode="same"),
    "jsp.signal.correlate": lambda w: jsp.signal.correlate(w, jnp.ones((3, 2))),
    "jsp.signal.correlate2d": lambda w: jsp.signal.correlate2d(w, jnp.ones((2, 3))),
    "jsp.signal.detrend": jsp.signal.detrend,
    "jsp.signal.fftconvolve": lambda w: jsp.signal.fftconvolve(w, jnp.ones((3, 2))),
    "jsp.ndimage.map_coordinates": lambda w: jsp.ndimage.map_coordinates(w, [V[:4] + 3, V[4:8] + 3], order=1),
    "jsp.fft.dct": jsp.fft.dct,
    "jsp.fft.dctn": jsp.fft.dctn,
    "jsp.fft.idct": jsp.fft.idct,
    "jsp.fft.idctn": jsp.fft.idctn,
    "jsp.linalg.block_diag": lambda w: jsp.linalg.block_diag(w, jnp.ones((2, 2))),
    "jsp.linalg.svd": lambda w: jsp.linalg.svd(w, compute_uv=False),
    "jsp.linalg.toeplitz": lambda w: jsp.linalg.toeplitz(w[:, 0]),
}

_LINALG = {
    **simple(jsp.linalg, "jsp.linalg", "det inv expm"),
    "jsp.linalg.cholesky": lambda w: jsp.linalg.cholesky(w, lower=True),
    "jsp.linalg.cho_factor": lambda w: jnp.triu(jsp.linalg.cho_factor(w)[0]),
    "jsp.linalg.cho_solve": lambda w: jsp.linalg.cho_solve((w, True), V),
    "jsp.linalg.eigh": lambda w: jsp.linalg.eigh(w, eigvals_only=True),
    "jsp.linalg.lu": jsp.linalg.lu,
    "jsp.linalg.lu_factor": jsp.linalg.lu_factor,
    "jsp.linalg.lu_solve": lambda w: jsp.linalg.lu_solve((w, jnp.arange(16)), V),
    "jsp.linalg.polar": jsp.linalg.polar,
    "jsp.linalg.qr": lambda w: jnp.abs(jsp.linalg.qr(w)[1]),
    "jsp.linalg.solve": lambda w: jsp.linalg.solve(w, V, assume_a="pos"),
    "jsp.linalg.solve_triangular": lambda w: jsp.linalg.solve_triangular(w, V, lower=True),
    "jsp.linalg.sqrtm": lambda w: jnp.real(jsp.linalg.sqrtm(w)),
    "jsp.sparse.linalg.cg": lambda w: jsp.sparse.linalg.cg(lambda v: w @ v, V)[0],
    "jsp.stats.multivariate_normal.logpdf": lambda w: jsp.stats.multivariate_normal.logpdf(V, jnp.zeros(16), w),
}

_OTHERS = {
    "jax.ops.segment_sum": lambda w: jax.ops.segment_sum(w, SEGMENTS, num_segments=4),
    "jax.ops.segment_prod": lambda w: jax.ops.segment_prod(w, SEGMENTS, num_segments=4),
    "jax.ops.segment_max": lambda w: jax.ops.segment_max(w, SEGMENTS, num_segments=4),
    "jax.ops.segment_min": lambda w: jax.ops.segment_min(w, SEGMENTS, num_segments=4),
    "jax.image.resize linear": lambda w: jax.image.resize(w, (8, 24), "linear"),
    "jax.image.resize nearest": lambda w: jax.image.resize(w, (8, 24), "nearest"),
    "jax.image.resize cubic": lambda w: jax.image.resize(w, (20, 10), "cubic"),
    "jax.image.scale_and_translate": lambda w: jax.image.scale_and_translate(
        w, (8, 8), (0, 1), jnp.array([0.5, 0.5]), jnp.array([1.0, 0.0]), "linear"
    ),
    "jax.random.categorical": lambda w: jax.random.categorical(KEY, w),
    "jax.random.choice": lambda w: jax.random.choice(KEY, w, (5,)),
    "jax.random.permutation": lambda w: jax.random.permutation(KEY, w),
    "jax.random.multivariate_normal mean": lambda w: jax.random.multivariate_normal(KEY, w, jnp.eye(12)),
    "jax.pure_callback": lambda w: jax.pure_callback(
        lambda a: np.asarray(a) * 2, jax.ShapeDtypeStruct((16, 12), jnp.float32), w
    ),
    "jax.jit nested": lambda w: jax.jit(jax.jit(lambda v: v + 1))(w),
    "jax.vmap rows": lambda w: jax.vmap(lambda row: jnp.sort(row))(w),
    "jax.vmap columns": lambda w: jax.vmap(jnp.cumsum, in_axes=1, out_axes=1)(w),
    "jax.grad": lambda w: jax.grad(lambda v: jnp.sum(jnp.sin(v)))(w),
    "jax.jvp": lambda w: jax.jvp(jnp.sin, (w,), (M,)),
    "jax.linearize": lambda w: jax.linearize(jnp.exp, w)[1](M),
    "jax.jacfwd": lambda w: jax.jacfwd(lambda s: jnp.sum(w * s, axis=0))(2.0),
    "jax.hessian": lambda w: jax.hessian(lambda c: jnp.sum(jnp.sin(w * c)))(C),
    "jax.checkpoint": lambda w: jax.checkpoint(jnp.sin)(w),
}

_RANDOM_UNIT = {
    "jax.random.bernoulli": lambda w: jax.random.bernoulli(KEY, w),
    "jax.random.uniform": lambda w: jax.random.uniform(KEY, (16, 16), minval=w, maxval=2.0),
    "jax.nn.log1mexp": jax.nn.log1mexp,
}

_INTEGER = {"jax.nn.one_hot": lambda w: jax.nn.one_hot(w, 5)}

CALLS: list[Call] = [
    *table("real", {**_NN, **_SPECIAL, **_STATS, **_OTHERS}),
    *table("unit", {**_SPECIAL_UNIT, **_RANDOM_UNIT}),
    *table("real", _NN_PRODUCTS, dispatches=True),
    *table("spd", _LINALG),
    *table("integer", _INTEGER),
]
