"""Products that round x to 8 bits first: what they are, and how plain JAX computes them.

With `activations="int8"` or `"fp8"` a product rounds every row of x to codes c and one scale sx, and multiplies these:

    sx = max(max|x| / L, 2**-126)           L = 127 (int8) or 448 (fp8), of each row, a division rounded correctly
    c  = round(x / sx), to the nearest, a tie to even: an integer from -127 to 127, or a float8_e4m3fn
    y  = sum over groups of (sum over the group of c * w) * (sx * sw)

w is what the codes of the weight stand for and sw their scale; a group is what shares one: a block, or all that is
summed up. Everything is float32 (float64 where x or the result is), and the result is rounded once to `out_dtype`. Sums
of int8 products are those of integers: exact, in int32 for up to 2**17 of them. A row of zeros gives zeros. A row with
a NaN or an infinity in it gives a row of NaN and leaves the others alone. Where sx is below 2**-64, sx * sw might be no
normal number, and the sum is multiplied with sx first. Values of x that are not normal count as zero or as they are.
GPUs divide less exactly: plain JAX corrects sx and codes of int8; of fp8 a code may be the other one of two that are
nearly as near.

Such a product is the product of `matmul` and `grouped` with one more parameter and one more operand, so that an
implementation is a row of their tables (`rounds_x=True`) and gets

    run(problem, x, codes, scale[, x_scale])                    run(problem, x, codes, group_sizes, scale[, x_scale])

    problem   .activations is "int8" or "fp8"; .form, .fmt, .cols, .block, .rows, .m and .batch as for other products
    x         (batch..., M, K) of any floating type, not yet rounded; grouped (M, K)
    codes     as `formats` has them, where K is C in the dot form and R in the axpy form:
                  int8          int8 (R, C): x @ w with w (K, N) as it is stored is the *axpy* form, R = K and C = N;
                                x @ w.T with w (N, K) the dot form
                  fp8_e4m3      uint8 (R, C), in either form too; fp8_e5m2 likewise
                  others        packed along C, in the dot form where K = C is what is packed: int8_block int8
                                (N, blocks, block), nf4 and int4 uint8 (N, blocks, block/2), ternary uint8 (N, K/4), ...
    scale     never None (ones of shape (1, 1) where the format needs none), floating, as `formats` has it. Without
              blocks it is (1 or R, 1 or C); where `problem.scales_results_only` it has size 1 along what is summed up,
              and one sum of codes is multiplied with sx * sw. Refuse problems where neither this holds nor the dot form
              of a format in blocks: there scales differ along the sum, and the codes of x are multiplied with decoded
              values, by the products that do not round x.
    x_scale   (batch..., M) float32: sx, to be used as it is. NaN gives a row of NaN, and so does a NaN or an infinity
              in x. It is left out where the implementation finds sx by the definition: always but for static scales,
              rows that are split over devices, and rows along several axes.

Of a format with a table (nf4, iq4_nl, fp4) the values are the entries as they are: an implementation may take integers
for them (round(32767 * value), or two bytes) where the result is within 1e-4 of the definition, relative to |c| @ |w|.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eformer._jax.avals import zeros_like_in

from . import xla
from .parameters import ACTIVATIONS, Problem

# Products of codes whose sum is exact: in float32 (127 * 128 * 2**10 < 2**24), in int32.
EXACT_FLOATS, EXACT_INTEGERS = 1 << 10, 1 << 17
SMALL = 2.0**-64  # scales of rows that are multiplied with sums before those of the weight are


def wide(dtype: Any) -> Any:
    """What rows of this dtype are rounded in: float32, or float64 for that."""
    return dtype if dtype == jnp.float64 else np.dtype(np.float32)


def holding(dtype: Any) -> Any:
    """The type in which codes of x are multiplied: that of x, where it holds all of them."""
    return dtype if np.dtype(dtype).itemsize > 1 else np.dtype(np.float32)


def largest_magnitude(x: jax.Array, axes: Any = -1) -> jax.Array:
    """max|x| of each row, in float32 at least; infinity where a value is none or infinite."""
    values = jnp.abs(x.astype(wide(x.dtype)))
    return jnp.max(
        jnp.where(values < jnp.inf, values, jnp.inf), axis=axes, initial=0
    )  # XLA may lose a NaN in a maximum


def row_scale(largest: jax.Array, activations: str) -> jax.Array:
    """sx of rows whose largest magnitudes these are; NaN where one is infinite.

    >>> row_scale(jnp.array([254.0, 0.0, jnp.inf]), "int8").tolist()
    [2.0, 1.1754943508222875e-38, nan]
    """
    # By a value XLA cannot fold: it would multiply with the inverse, which is off by one ulp at times.
    limit = ACTIVATIONS[activations]
    divisor = jnp.where(largest < jnp.inf, limit, jnp.nan).astype(largest.dtype)
    lift = jnp.where(largest < 1, 2.0**64, 0.25).astype(largest.dtype)  # no result below the normal numbers or above
    scale = corrected(largest * lift / divisor, largest * lift, limit) / lift
    return jnp.maximum(scale, np.finfo(np.float32).tiny.astype(largest.dtype))


def corrected(quotient: jax.Array, x: jax.Array, limit: int) -> jax.Array:
    """x / limit, rounded correctly, of a quotient that may be off by some ulps.

    The limit is a power of two less a smaller one, so that the remainder is exact, with fused operations or without.
    """
    power = 1 << limit.bit_length()
    rest = (x - power * quotient) + (power - limit) * quotient
    return quotient + rest * (1 / limit)


def nearest(quotient: jax.Array, x: jax.Array, factor: jax.Array, limit: int) -> jax.Array:
    """round(x / factor), up to a limit below 2**8, of the correctly rounded quotient; given one that is some ulps off.

    Two integers are possible; `apart` says on which side of the middle x is, and all of it is exact near there: the
    middle has 8 bits, so its products with the two halves of the factor are. A quotient within half an ulp of the
    middle is rounded to it, and then to the even integer.
    """
    lift = jnp.where(factor < SMALL, 2.0**64, 1.0).astype(factor.dtype)
    size, by = jnp.abs(x) * lift, factor * lift
    below = jnp.minimum(jnp.floor(jnp.abs(quotient)), limit - 1)
    middle = below + 0.5
    high = _masked(by, 0xFFFFF000)
    apart = (size - middle * high) - middle * (by - high)
    reach = by * (_masked(middle, 0xFF800000) * 2.0**-24)  # half an ulp of the middle, which is half as much below 1/2
    even = below + below % 2
    found = jnp.where(apart < jnp.where(below == 0, -reach / 2, -reach), below, even)
    return jnp.sign(x) * jnp.where(apart > reach, below + 1, found)


def _masked(x: jax.Array, mask: int) -> jax.Array:
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(mask), jnp.float32)


def rounded(x: jax.Array, x_scale: jax.Array | None, activations: str) -> tuple[jax.Array, jax.Array]:
    """The codes of x (..., K), int8 or float8_e4m3fn, and the factor (...) of each row; NaN where a row is NaN.

    >>> codes, factor = rounded(jnp.array([[1.0, -254.0], [jnp.nan, 1.0]]), None, "int8")
    >>> codes[0].tolist(), factor.tolist()
    ([0, -127], [2.0, nan])
    """
    codes, factor = round_by(x, None if x_scale is None else x_scale[..., None], activations, (x.ndim - 1,))
    return codes, factor[..., 0]


def round_by(
    x: jax.Array, x_scale: jax.Array | None, activations: str, axes: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """The same for rows along any axes of x, which scales and factors have with size 1."""
    largest = jnp.expand_dims(largest_magnitude(x, axes), axes)
    factor = row_scale(largest, activations) if x_scale is None else x_scale.astype(largest.dtype)
    factor = jnp.where(largest < jnp.inf, factor, jnp.nan)
    # XLA would divide by what is the same for a row only once, and multiply with that (see `blocks.quotient`).
    values, limit = x.astype(largest.dtype), ACTIVATIONS[activations]
    quotients = values / (factor + 0 * values)
    if activations == "fp8":
        return jnp.clip(quotients, -limit, limit).astype(jnp.float8_e4m3fn), factor
    exact = values.dtype == jnp.float64
    codes = jnp.round(jnp.clip(quotients, -limit, limit)) if exact else nearest(quotients, values, factor, limit)
    return jnp.where(jnp.isnan(codes), 0, codes).astype(jnp.int8), factor


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def values_of_rounded(x: jax.Array, x_scale: jax.Array | None, activations: str) -> jax.Array:
    """What x (..., K) is rounded to, in float32 at least; differentiated as x."""
    codes, factor = rounded(x, x_scale, activations)
    return codes.astype(factor.dtype) * factor[..., None]


@values_of_rounded.defjvp
def _straight_through(activations: str, primals: Any, tangents: Any) -> Any:
    y = values_of_rounded(*primals, activations)
    return y, tangents[0].astype(y.dtype)


def qmatmul(
    product: Callable[..., jax.Array],
    problem: Problem,
    x: jax.Array,
    codes: jax.Array,
    scale: jax.Array,
    x_scale: jax.Array | None = None,
    sums_of: Callable[..., jax.Array] = xla.qmatmul,
) -> jax.Array:
    """The product of one problem without batch axes; `product` computes those that do not round x, and `sums_of` those
    of codes without a scale."""
    dtype = problem.compute_dtype
    small, factor = rounded(x, x_scale, problem.activations or "")
    factor = factor[:, None].astype(dtype)
    held = holding(x.dtype)
    plain = problem.replace(activations=None, backward=None, x_dtype=held, out_dtype=dtype)
    if problem.is_empty or not problem.scales_results_only:
        return (product(plain, small.astype(held), codes, scale) * factor).astype(problem.out_dtype)
    if problem.fmt == "int8" and problem.activations == "int8":
        sums = _integer_sums(problem, small, codes).astype(dtype)
    else:
        sums = sums_of(plain.replace(scale_shape=None), small.astype(held), codes)
    first = jnp.where(factor < SMALL, factor, 1)
    y = sums * first * (jnp.where(factor < SMALL, 1, factor) * scale.astype(dtype).reshape(1, -1))
    return y.astype(problem.out_dtype)


def _integer_sums(problem: Problem, x: jax.Array, codes: jax.Array) -> jax.Array:
    """The exact sums of products of int8 codes. XLA has no quick ones for the CPU: there short ones in float32."""
    axis = 1 if problem.form == "dot" else 0
    in_floats = problem.platform == "cpu"
    most, size = (EXACT_FLOATS if in_floats else EXACT_INTEGERS), codes.shape[axis]
    operand, sums = (jnp.float32, jnp.float32) if in_floats else (jnp.int8, jnp.int32)
    total = jnp.int32 if size <= EXACT_INTEGERS else problem.compute_dtype

    def part(start: Any, count: int) -> jax.Array:
        rows = lax.dynamic_slice_in_dim(x, start, count, 1).astype(operand)
        stored = lax.dynamic_slice_in_dim(codes, start, count, axis).astype(operand)
        dims = (((1,), (axis,)), ((), ()))
        return lax.dot_general(rows, stored, dims, precision="highest", preferred_element_type=sums).astype(total)

    count, rest = divmod(size, most)
    y = part(count * most, rest) if rest else zeros_like_in((x.shape[0], codes.shape[1 - axis]), total, x)
    return lax.fori_loop(0, count, lambda i, y: y + part(i * most, most), y) if count else y
