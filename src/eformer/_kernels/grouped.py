"""Mixture of experts: consecutive groups of rows, each times its own matrix of a stack.

Declared as `qmatmul` is: linear in x, the transpose is the other form. Without a native kernel the groups are cut into
tiles of equal height, and a scan multiplies one tile at a time.
"""

from __future__ import annotations

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax

from eformer._jax.avals import vary, varying_axes

from . import cpu, cuda, offsets, tpu
from .group_tiles import cut, joined
from .matmul import PRODUCT, on_floats, product_sharded_like, with_scales
from .operation import Operation, one_after_another
from .parameters import Options, Parameters, Problem, as_operands, check_x, out_shape, parameters_of, problem_of
from .partition import split_groups
from .scale_gradient import scale_gradient_of_groups
from .select import Candidate, always, anything


def qragged_dot(
    x: Any,
    codes: Any,
    scale: Any,
    group_sizes: Any,
    *,
    offset: Any = None,
    factor: Any = None,
    x_scale: Any = None,
    **options: Unpack[Options],
) -> jax.Array:
    """Consecutive groups of rows of x (M, K), each times its own matrix: codes (G, R, ...), group_sizes (G,).

    The quantized counterpart of `jax.lax.ragged_dot`, with the options of `qmatmul`. Rows after the last group are
    zeros. One expert is decoded at a time, and experts without rows are not decoded at all.

    >>> codes = jnp.array([[[1]], [[2]], [[3]]], jnp.int8)
    >>> x, scale = jnp.ones((4, 1)), jnp.ones((3, 1, 1))
    >>> qragged_dot(x, codes, scale, jnp.array([2, 0, 1]), fmt="int8", form="dot", cols=1)[:, 0]
    Array([1., 1., 3., 0.], dtype=float32)
    """
    x, codes, scale, offset, factor, x_scale = as_operands(x, codes, scale, offset, factor, x_scale)
    (sizes,) = as_operands(group_sizes)
    parameters = parameters_of(x, codes, scale, offset, factor, **options)
    _check_groups(parameters, x, codes, sizes)
    numbers, x_scale = with_scales(parameters, x, codes, [scale, offset, factor], x_scale)
    if 0 in (codes.shape[0], x.shape[0]):
        return jnp.zeros(out_shape(parameters, x, codes), parameters.out_dtype)

    def product(parameters: Parameters, x: jax.Array) -> jax.Array:
        if parameters.offset is None or not parameters.by_scale:
            return GROUPED_PRODUCT.bind(parameters, x, codes, sizes, *numbers, *x_scale)
        large = jnp.promote_types(parameters.out_dtype, jnp.float32)  # with a derivative in scale and offset
        y = GROUPED_PRODUCT.bind(parameters.without_offset(large), x, codes, sizes, numbers[0], *x_scale)
        more = offsets.of_groups(problem_of(parameters, "", x, codes, *numbers), x, codes, sizes, *numbers)
        return (y + more).astype(parameters.out_dtype)

    return on_floats(parameters, x, product)


def _check_groups(parameters: Parameters, x: Any, codes: Any, group_sizes: Any) -> None:
    rank = parameters.format.core_ndim + 1
    if codes.ndim != rank or x.ndim != 2:
        raise ValueError(
            f"qragged_dot takes x of shape (M, K) and codes of rank {rank} with the experts in front, got "
            f"{list(x.shape)} and {list(codes.shape)}; use vmap for more axes."
        )
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer) or group_sizes.shape != codes.shape[:1]:
        raise ValueError(
            f"group_sizes must be integers of shape {codes.shape[:1]}, one per expert, got "
            f"{group_sizes.dtype}{list(group_sizes.shape)}."
        )
    check_x(parameters, x, jax.ShapeDtypeStruct(codes.shape[1:], codes.dtype))


def _tiled(
    problem: Problem,
    x: jax.Array,
    codes: jax.Array,
    sizes: jax.Array,
    scale: Any = None,
    x_scale: Any = None,
    *,
    offset: Any = None,
    factor: Any = None,
) -> jax.Array:
    """The product in plain JAX, one tile of one expert at a time."""
    parameters = problem.parameters
    m, groups = x.shape[0], codes.shape[0]
    tiles = cut(sizes, m, height=1 << (max(m // groups, 1) - 1).bit_length())

    def step(_: None, tile: tuple[Any, ...]) -> tuple[None, jax.Array]:
        values, group, used, *scales = tile
        numbers = [array[group] for array in (scale, offset, factor) if array is not None]
        # Inside shard_map both branches must vary over the same axes.
        axes = frozenset[str]().union(*map(varying_axes, (values, group, codes)))
        return None, lax.cond(
            used,
            lambda: PRODUCT.bind(parameters, values, codes[group], *numbers, *scales, announced=True),
            lambda: vary(jnp.zeros((values.shape[0], problem.outs), problem.out_dtype), axes),
        )

    rows, *scales = (o.at[tiles.rows].get(mode="fill", fill_value=0) for o in (x, x_scale) if o is not None)
    return joined(tiles, lax.scan(step, None, (rows, tiles.group, tiles.rows[:, 0] < m, *scales))[1])


GROUPED_PRODUCT = Operation(
    "qragged_dot",
    ("x", "codes", "group_sizes", "scale"),
    result=lambda parameters, x, codes, *rest: [(out_shape(parameters, x, codes), parameters.out_dtype)],
    problem=lambda parameters, platform, x, codes, sizes, *scale: problem_of(parameters, platform, x, codes, *scale),
    candidates=(
        Candidate(
            "native_cpu", "native", cpu.refuses_product, cpu.qragged, takes_offsets=cpu.takes_offsets,
            takes_scales=cpu.takes_scales,
        ),
        Candidate("native_cuda", "native", cuda.refuses_ragged, cuda.qragged, takes_offsets=always),
        Candidate("pallas_tpu", "native", tpu.refuses_product, tpu.qragged, takes_offsets=always),
        Candidate("xla", "xla", anything, _tiled, takes_offsets=always, takes_scales=always),
        Candidate(
            "native_cpu", "native", cpu.refuses_rounded, cpu.byte_ragged, rounds_x=True, takes_scales=cpu.takes_scales
        ),
        Candidate("xla", "xla", anything, _tiled, rounds_x=True, takes_offsets=always, takes_scales=always),
    ),
    batch=one_after_another,  # groups of different programs do not line up
    split=split_groups,
    sharded_like=product_sharded_like,
    scale_gradient=scale_gradient_of_groups,
    correction=offsets.of_groups,
)  # fmt: skip
