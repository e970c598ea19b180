"""How grouped products and lookups split over devices.

Experts of a product and rows of a table may be split like everything else. A device then computes the rows of x that
belong to its own experts, or looks up the indices that fall into its own rows, and gives zeros for all others: the sum
over devices is exact, because one of them holds each value.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .partition import Plan, Rule, columns, operation, pad_last, position
from .partition_matmul import code_labels, in_whole_groups, local_problem, product_rule, scale_labels
from .problem import PER_CODE, Problem

Run = Callable[..., jax.Array]


def split_ragged(
    run: Run, problem: Problem, x: jax.Array, codes: jax.Array, scale: jax.Array | None, sizes: jax.Array
) -> jax.Array:
    """`run(problem, x, codes, scale, sizes)` as an operation XLA's partitioner can split."""
    spec = problem.spec
    x, scale, extra = in_whole_groups(spec, x, codes, scale)
    whole = dataclasses.replace(problem, spec=dataclasses.replace(spec, cols=spec.cols + extra))
    y = _ragged(run, whole)(x, codes, sizes, *(() if scale is None else (scale,)))
    return y[..., : spec.cols] if extra and spec.form == "axpy" else y


@functools.lru_cache(maxsize=512)
def _ragged(run: Run, problem: Problem) -> Any:
    plain = product_rule(dataclasses.replace(problem, batch=()), [], [("m", problem.m)])
    x, codes, *scale = plain.operands
    # Every device needs all group sizes, to know where its rows begin: their axis has a factor of its own.
    operands = (x, ("g", *codes), ("e",), *(("g", *labels) for labels in scale))
    rule = dataclasses.replace(plain, operands=operands, counts=(*plain.counts, ("g", problem.batch[0])))

    def whole(x: jax.Array, codes: jax.Array, sizes: jax.Array, *scale: jax.Array) -> jax.Array:
        return run(problem, x, codes, scale[0] if scale else None, sizes)

    def local(plan: Plan, x: jax.Array, codes: jax.Array, sizes: jax.Array, *scale: jax.Array) -> jax.Array:
        mine = local_problem(problem, x, codes, scale[0] if scale else None)
        if any(plan.get(name) for name in plain.contracted):  # rows of other experts are zeros, and add up exactly
            mine = mine.with_out_dtype(mine.compute_dtype)
        sizes, begin = _own_groups(plan, sizes, x.shape[0], codes.shape[0])
        if not plan.get("g"):
            return run(mine, x, codes, scale[0] if scale else None, sizes)
        y = run(mine, jnp.roll(x, -begin, 0), codes, scale[0] if scale else None, sizes)
        return jnp.roll(y, begin, 0)

    return operation(rule, whole, local, problem.spec.out_dtype)


def _own_groups(plan: Plan, sizes: jax.Array, rows: int, experts: int) -> tuple[jax.Array, jax.Array]:
    """Of the rows of x and the experts this device holds: the size of every group, and where the first begins."""
    sizes = sizes.astype(jnp.int32)
    first_row = position(plan.get("m", ())) * rows
    ends = jnp.cumsum(sizes) - first_row
    begins, ends = (jnp.clip(at, 0, rows) for at in (ends - sizes, ends))
    first = position(plan.get("g", ())) * experts
    return lax.dynamic_slice_in_dim(ends - begins, first, experts), begins[first]


def split_lookup(run: Run, lookup: Any, codes: jax.Array, scale: jax.Array | None, indices: jax.Array) -> jax.Array:
    """`run(lookup, codes, scale, indices)` as an operation XLA's partitioner can split."""
    group = int(lookup.block or PER_CODE[lookup.fmt])
    cols = codes.shape[1] * group
    extra = cols - lookup.cols
    if extra and scale is not None and lookup.fmt != "nf4" and scale.shape[-1] != 1:
        scale = pad_last(scale, extra)
    shape = None if scale is None else tuple(scale.shape)
    operands = (codes, indices.astype(jnp.int32), *(() if scale is None else (scale,)))
    y = _lookup(run, lookup.resized(codes.shape[0], indices.shape[0], cols), shape)(*operands)
    return y[:, : lookup.cols] if extra else y


@functools.lru_cache(maxsize=512)
def _lookup(run: Run, lookup: Any, scale_shape: tuple[int, ...] | None) -> Any:
    group = int(lookup.block or PER_CODE[lookup.fmt])
    groups = lookup.cols // group
    wide = columns(groups, group)
    operands = [code_labels(lookup.fmt), ("n",)]
    if scale_shape is not None:
        operands.append(scale_labels(lookup.fmt, scale_shape, lookup.rows, wide))
    counts = (("r", lookup.rows), ("q", groups), ("n", lookup.count))
    rule = Rule(tuple(operands), ("n", wide), counts, (0, 1), group)

    def whole(codes: jax.Array, indices: jax.Array, *scale: jax.Array) -> jax.Array:
        return run(lookup, codes, scale[0] if scale else None, indices)

    def local(plan: Plan, codes: jax.Array, indices: jax.Array, *scale: jax.Array) -> jax.Array:
        rows, groups = codes.shape[:2]
        mine = lookup.resized(rows, indices.shape[0], groups * group)
        if not plan.get("r"):
            return run(mine, codes, scale[0] if scale else None, indices)
        here = indices - position(plan["r"]) * rows
        found = run(mine, codes, scale[0] if scale else None, jnp.clip(here, 0, rows - 1))
        return jnp.where(((here >= 0) & (here < rows))[:, None], found, 0)

    return operation(rule, whole, local, lookup.out_dtype)
