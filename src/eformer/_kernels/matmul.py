"""Products with a stored matrix.

`qmatmul` is linear in x, so its derivative is itself and its transpose is the other form: the backward pass decodes the
codes again and nothing dense is kept between the passes. It is linear in the scale, too (`by_scale`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from . import activations, cpu, cuda, offsets, stacked, tpu, xla
from .formats import decode, with_batch_of
from .operation import Axes, Operation, one_after_another
from .parameters import (
    Options,
    Parameters,
    Problem,
    as_operands,
    check_x,
    out_shape,
    parameters_of,
    problem_of,
    result_dtype,
)
from .partition import split_product
from .scale_gradient import scale_gradient
from .select import Candidate, Choice, always, anything


def qmatmul(
    x: Any,
    codes: Any,
    scale: Any,
    *,
    offset: Any = None,
    factor: Any = None,
    x_scale: Any = None,
    out_sharding: Any = None,
    **options: Unpack[Options],
) -> jax.Array:
    """x @ D.T (`form="dot"`) or x @ D (`form="axpy"`) for the matrix D of `cols` columns stored in codes and scale.

    `offset` holds zero points or biases of blocks of integers, in the shape of the scale, `factor` what multiplies all
    scales of a matrix; `formats` says which.
    x is (..., K) for one matrix, (batch..., M, K) when the codes have batch axes. The result has dtype `out_dtype`, by
    default that of x; sums are accumulated in float32 or wider. `out_sharding` is for meshes with explicit axes:
    without it rows are sharded as those of x, columns as those of D. With `activations` rows of x are rounded to 8 bits
    first, by the scales `x_scale` (...) where those are given: `activations.py` says how.

    >>> codes = jnp.array([[1, -2], [3, 4]], jnp.int8)
    >>> qmatmul(jnp.array([1.0, 10.0]), codes, jnp.full((1, 1), 0.5), fmt="int8", form="dot", cols=2)
    Array([-9.5, 21.5], dtype=float32)
    """
    x, codes, scale, offset, factor, x_scale = as_operands(x, codes, scale, offset, factor, x_scale)
    if options.get("out_dtype") is None:
        options["out_dtype"] = result_dtype(x)  # depends on settings of JAX, so it is part of what is remembered
    if isinstance(precision := options.get("precision"), list):
        options["precision"] = tuple(precision)
    types = (None if o is None else jax.typeof(o) for o in (x, codes, scale, offset, factor))
    parameters = _checked(*types, tuple(options.items()))
    numbers, x_scale = with_scales(parameters, x, codes, [scale, offset, factor], x_scale)

    def product(parameters: Parameters, x: jax.Array) -> jax.Array:
        if x.ndim > 1:  # axes of rows stay apart, so that each may be split over devices
            return _bound(parameters, x, codes, numbers, x_scale, out=out_sharding)
        one = [s.reshape(1) for s in x_scale]
        y = _bound(parameters, x.reshape(1, -1), codes, numbers, one).reshape(-1)
        return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)

    return on_floats(parameters, x, product)


def _bound(parameters: Parameters, x: Any, codes: Any, numbers: Any, x_scale: Any, out: Any = None) -> Any:
    if parameters.offset is not None and parameters.by_scale:
        without = functools.partial(PRODUCT.bind, out=out)
        return offsets.differentiable(
            parameters, lambda plain: without(plain, x, codes, numbers[0], *x_scale), x, codes, *numbers
        )
    stored = stacked.operands_of(parameters, x, codes, *numbers) if out is None else None
    if stored is not None:
        return IN_STACK.bind(parameters, x, *stored, *x_scale)
    return PRODUCT.bind(parameters, x, codes, *numbers, *x_scale, out=out)


@functools.lru_cache(maxsize=4096)
def _checked(
    x: Any, codes: Any, scale: Any, offset: Any, factor: Any, options: tuple[tuple[str, Any], ...]
) -> Parameters:
    """The parameters of a product of operands of these types, if they fit: found once, then remembered."""
    parameters = parameters_of(x, codes, scale, offset, factor, **dict(options))
    check_x(parameters, x, codes)
    return parameters


def with_scales(
    parameters: Parameters, x: Any, codes: Any, numbers: list[Any], x_scale: Any
) -> tuple[list[Any], list[Any]]:
    """The scale, and what belongs to it, with the batch axes of the codes, and the scale of x, as far as they exist.

    Products that round x have a scale always.
    """
    if x_scale is not None:
        if parameters.activations is None or x_scale.shape != x.shape[:-1]:
            raise ValueError(
                f"x_scale of shape {list(x_scale.shape)} was given for {parameters.activations=} and x of shape "
                f"{list(x.shape)}: it has one number per row, {list(x.shape[:-1])}, and needs activations."
            )
        x_scale = x_scale.astype(activations.wide(x.dtype))
    if numbers[0] is None and (parameters.activations or parameters.backward):
        numbers = [jnp.ones((1, 1), jnp.float32)]
    numbers = [with_batch_of(codes, array, parameters.fmt) for array in numbers if array is not None]
    return numbers, [] if x_scale is None else [x_scale]


def on_floats(parameters: Parameters, x: jax.Array, product: Callable[[Parameters, jax.Array], jax.Array]) -> jax.Array:
    """A product of floating x, for any x: integers are converted; a complex x is two products, since D is real."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return product(parameters, x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        real = dataclasses.replace(parameters, out_dtype=jnp.finfo(parameters.out_dtype).dtype)
        return lax.complex(product(real, x.real), product(real, x.imag))
    return product(parameters, x.astype(jnp.result_type(x.dtype, jnp.float32)))


def explain(problem: Problem) -> Choice:
    """What would compute this product, and why the others would not."""
    return PRODUCT.choice(problem)


def product_sharded_like(parameters: Parameters, x: Any, codes: Any, *rest: Any) -> Axes:
    """Rows as x has them, columns as the codes have them."""
    column = codes.ndim - parameters.format.core_ndim + (parameters.form == "axpy")
    return [*((x, axis) for axis in range(x.ndim - 1)), (codes, column)]


def _batch(bind: Any, parameters: Parameters, operands: Any, dims: Any) -> tuple[Any, int]:
    first_of_x = 2 + len(parameters.apart(operands[2:])[0])  # where the scale of x is, if there is one
    if dims[1] is None and any(d is not None for d in dims[2:first_of_x]):
        # Only scale or offset (and perhaps x) are mapped: a loop; repeating the codes would multiply their memory.
        return one_after_another(bind, parameters, operands, dims)
    size = next(o.shape[d] for o, d in zip(operands, dims, strict=True) if d is not None)
    moved = [o if d is None else jnp.moveaxis(o, d, 0) for o, d in zip(operands, dims, strict=True)]

    def spread(i: int) -> None:
        if i < len(moved) and dims[i] is None:
            moved[i] = jnp.broadcast_to(moved[i], (size, *moved[i].shape))

    if dims[1] is None:
        if len(moved) > first_of_x:  # x and its scale are mapped together
            spread(0)
            spread(first_of_x)
        has_batch = moved[1].ndim > parameters.format.core_ndim
        return _fold_into_rows(bind, parameters, *moved) if has_batch else (bind(*moved), 0)
    for i in (0, *range(2, len(moved))):
        spread(i)
    x, codes, *rest = moved
    batch = codes.ndim - parameters.format.core_ndim
    rows = (*x.shape[:batch], math.prod(x.shape[batch:-1]))  # matrices have one axis of rows
    numbers, of_x = parameters.apart(rest)
    y = bind(x.reshape(*rows, x.shape[-1]), codes, *numbers, *(s.reshape(rows) for s in of_x))
    return y.reshape(out_shape(parameters, x, codes)), 0


def _fold_into_rows(bind: Any, parameters: Parameters, x: jax.Array, codes: Any, *rest: Any) -> tuple[jax.Array, int]:
    """Only x is mapped: its new axis becomes part of M. (b, batch..., M, K) -> (batch..., b * M, K) and back."""
    m_axis = x.ndim - 2
    size, m = x.shape[0], x.shape[m_axis]

    def folded(array: jax.Array) -> jax.Array:
        moved = jnp.moveaxis(array, 0, m_axis - 1)
        return moved.reshape(*moved.shape[: m_axis - 1], size * m, *moved.shape[m_axis + 1 :])

    numbers, of_x = parameters.apart(rest)
    y = bind(folded(x), codes, *numbers, *map(folded, of_x))
    return y.reshape(*y.shape[:-2], size, m, y.shape[-1]), y.ndim - 2


def _in_one_axis_of_rows(run: Any, problem: Problem, x: jax.Array, codes: Any, *rest: Any) -> jax.Array:
    rows = (*problem.batch, problem.m)
    numbers, of_x = problem.apart(rest)
    y = run(problem, x.reshape(*rows, x.shape[-1]), codes, *numbers, *(s.reshape(rows) for s in of_x))
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _fold_scale(parameters: Parameters, ct: jax.Array, codes: Any, scale: Any = None, *offset: Any) -> tuple[Any, ...]:
    """The gradient that is rounded is that of the sums of codes: it is multiplied with the scale of each first."""
    contracted = -1 if parameters.form == "dot" else -2
    if parameters.activations is None or parameters.format.blocked or scale.shape[contracted] == 1:
        return ct, codes, scale, *offset
    if scale.shape[-3 - contracted] != 1:
        return ct, codes, scale
    batch, wide = scale.shape[:-2], activations.wide(ct.dtype)
    factor = jnp.expand_dims(scale.reshape(*batch, -1).astype(wide), range(len(batch), ct.ndim - 1))
    return ct.astype(wide) * factor, codes, jnp.ones((*batch, 1, 1), wide)


def _one_matrix_at_a_time(run: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`run` for one matrix, in a loop over the batch axes: only one decoded panel exists at any time."""

    @functools.wraps(run)
    def looped(problem: Problem, *operands: jax.Array, **extras: jax.Array) -> jax.Array:
        if not problem.batch:
            return run(problem, *operands, **extras)
        one = problem.replace(batch=())
        count, axes = math.prod(problem.batch), len(problem.batch)
        flat = jax.tree.map(lambda operand: operand.reshape(count, *operand.shape[axes:]), (operands, extras))
        y = lax.map(lambda given: run(one, *given[0], **given[1]), flat)
        return y.reshape(*problem.batch, *y.shape[1:])

    return looped


def reference(
    problem: Problem, x: jax.Array, codes: jax.Array, scale: jax.Array | None = None, *, offset: Any = None
) -> jax.Array:
    """The readable twin of every fast path: decode the whole matrix, then one plain product in the compute dtype.

    The others are tested against it, and for tiny problems it is the quickest.
    """
    dtype = problem.compute_dtype
    dense = decode(codes, scale, offset, fmt=problem.fmt, cols=problem.cols, dtype=dtype)
    batch = tuple(range(len(problem.batch)))
    contracted = x.ndim - 1 if problem.form == "dot" else x.ndim - 2
    dims = (((x.ndim - 1,), (contracted,)), (batch, batch))
    y = lax.dot_general(x.astype(dtype), dense, dims, precision=problem.precision, preferred_element_type=dtype)
    return y.astype(problem.out_dtype)


def _rounding_reference(
    problem: Problem, x: jax.Array, codes: jax.Array, scale: jax.Array, x_scale: Any = None, *, offset: Any = None
) -> jax.Array:
    """The readable twin of those that round x: the product of its codes, then the scale of every row."""
    dtype = problem.compute_dtype
    small, factor = activations.rounded(x, x_scale, problem.activations or "")
    plain = problem.replace(activations=None, backward=None, out_dtype=dtype, precision="highest")
    y = reference(plain, small.astype(dtype), codes, scale, offset=offset)
    return (y * factor[..., None].astype(dtype)).astype(problem.out_dtype)


def _rounding_x(problem: Problem, *operands: Any) -> jax.Array:
    return activations.qmatmul(PRODUCT.compute, problem, *operands)


def _as_floats(problem: Problem, *operands: Any, **extras: Any) -> jax.Array:
    """Rows rounded to fp8 are an x of floats to the kernels for the CPU."""
    return activations.qmatmul(functools.partial(cpu.qmatmul, **extras), problem, *operands, sums_of=cpu.qmatmul)


# Up to this many values both paths in JAX take about as long, and the reference compiles faster.
TINY = 1 << 14


def _tiny(problem: Problem) -> str | None:
    if problem.rows * problem.cols <= TINY:
        return None
    return f"{problem.rows} x {problem.cols} is more than {TINY} values, so decoding all of them at once is slower"


# Fastest first. `small` is the reference where it is the quickest choice in JAX; the last row takes everything.
PRODUCT = Operation(
    "qmatmul",
    ("x", "codes", "scale"),
    result=lambda parameters, x, codes, *rest: [(out_shape(parameters, x, codes), parameters.out_dtype)],
    problem=problem_of,
    candidates=(
        Candidate(
            "native_cpu", "native", cpu.refuses_product, cpu.qmatmul,
            in_stack=cpu.qmatmul, takes_offsets=cpu.takes_offsets, takes_scales=cpu.takes_scales,
        ),
        Candidate("xla_batch", "xla", xla.refuses_batch, xla.batched_qmatmul),
        Candidate(
            "native_cuda", "native", cuda.refuses_product, cuda.qmatmul, in_stack=cuda.qmatmul, takes_offsets=always
        ),
        Candidate("pallas_tpu", "native", tpu.refuses_product, tpu.qmatmul, takes_offsets=always),
        Candidate(
            "reference", "small", _tiny, _one_matrix_at_a_time(reference),
            why=f"at most {TINY} values: decoding all of them is as quick, and compiles faster", takes_offsets=always,
        ),
        Candidate("xla", "xla", anything, _one_matrix_at_a_time(xla.qmatmul)),
        Candidate("reference", "reference", anything, reference, takes_offsets=always),
        Candidate(
            "native_cpu", "native", cpu.refuses_rounded, cpu.byte_matmul, rounds_x=True,
            in_stack=cpu.byte_matmul, takes_scales=cpu.takes_scales,
        ),
        Candidate(
            "native_cuda", "native", cuda.refuses_rounded, cuda.byte_matmul, rounds_x=True,
            in_stack=cuda.byte_matmul, supports_in_stack=cuda.refuses_rounded_in_stack,
        ),
        Candidate(
            "native_cpu", "native", cpu.refuses_floats, _one_matrix_at_a_time(_as_floats), rounds_x=True,
            takes_scales=cpu.takes_scales,
        ),
        Candidate("xla", "xla", anything, _one_matrix_at_a_time(_rounding_x), rounds_x=True),
        Candidate("reference", "reference", anything, _rounding_reference, rounds_x=True, takes_offsets=always),
    ),
    batch=_batch,
    split=split_product,
    sharded_like=product_sharded_like,
    arrange=_in_one_axis_of_rows,
    fold=_fold_scale,
    scale_gradient=scale_gradient,
    correction=offsets.of_product,
)  # fmt: skip
IN_STACK = stacked.in_stack(PRODUCT)
