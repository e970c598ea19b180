"""How each operation splits over devices: rows of x, rows of D, groups of columns of D, batch axes, indices.

Experts of a grouped product and rows of a table may be split like everything else. A device then computes the rows of x
that belong to its own experts, or looks up the indices that fall into its own rows, and gives zeros for all others: the
sum over devices is exact, because one of them holds each value.

An operation is passed in as it is declared; `compute(problem, *operands)` is all that is used of it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .parameters import Problem, problem_of
from .partition import Plan, Rule, columns, pad_last, position, splittable

Factors = list[tuple[str, int]]  # names and sizes


def split_product(operation: Any, problem: Problem, x: jax.Array, codes: jax.Array, *scale: jax.Array) -> jax.Array:
    whole, x, scale = _in_whole_groups(problem, x, codes, scale)
    y = _product(operation, whole, tuple(x.shape[len(problem.batch) : -1]))(x, codes, *scale)
    return _cut(y, problem, whole)


@functools.lru_cache(maxsize=512)
def _product(operation: Any, problem: Problem, rows: tuple[int, ...]) -> Any:
    rule = _product_rule(problem, _named("b", problem.batch), _named("m", rows))

    def local(plan: Plan, x: jax.Array, codes: jax.Array, *scale: jax.Array) -> jax.Array:
        return operation.compute(_local_problem(problem, rule, plan, x, codes, *scale), x, codes, *scale)

    return splittable(rule, functools.partial(operation.compute, problem), local, problem.out_dtype)


def split_groups(
    operation: Any, problem: Problem, x: jax.Array, codes: jax.Array, sizes: jax.Array, *scale: jax.Array
) -> jax.Array:
    whole, x, scale = _in_whole_groups(problem, x, codes, scale)
    return _cut(_groups(operation, whole)(x, codes, sizes, *scale), problem, whole)


@functools.lru_cache(maxsize=512)
def _groups(operation: Any, problem: Problem) -> Any:
    plain = _product_rule(problem.replace(batch=()), [], [("m", problem.m)])
    x, codes, *scale = plain.operands
    # Every device needs all group sizes, to know where its rows begin: their axis has a factor of its own.
    operands = (x, ("g", *codes), ("e",), *(("g", *labels) for labels in scale))
    rule = dataclasses.replace(plain, operands=operands, counts=(*plain.counts, ("g", problem.batch[0])))

    def local(plan: Plan, x: jax.Array, codes: jax.Array, sizes: jax.Array, *scale: jax.Array) -> jax.Array:
        # By the rule of a plain product: rows of other experts are zeros, and add up exactly.
        mine = _local_problem(problem, plain, plan, x, codes, *scale)
        sizes, begin = _own_groups(plan, sizes, x.shape[0], codes.shape[0])
        if not plan.get("g"):
            return operation.compute(mine, x, codes, sizes, *scale)
        return jnp.roll(operation.compute(mine, jnp.roll(x, -begin, 0), codes, sizes, *scale), begin, 0)

    return splittable(rule, functools.partial(operation.compute, problem), local, problem.out_dtype)


def _own_groups(plan: Plan, sizes: jax.Array, rows: int, experts: int) -> tuple[jax.Array, jax.Array]:
    """Of the rows of x and the experts this device holds: the size of every group, and where the first begins."""
    sizes = sizes.astype(jnp.int32)
    first_row = position(plan.get("m", ())) * rows
    ends = jnp.cumsum(sizes) - first_row
    begins, ends = (jnp.clip(at, 0, rows) for at in (ends - sizes, ends))
    first = position(plan.get("g", ())) * experts
    return lax.dynamic_slice_in_dim(ends - begins, first, experts), begins[first]


def split_lookup(
    operation: Any, problem: Problem, codes: jax.Array, indices: jax.Array, *scale: jax.Array
) -> jax.Array:
    whole, _, scale = _in_whole_groups(problem, None, codes, scale)
    y = _lookup(operation, whole, tuple(indices.shape))(codes, indices.astype(jnp.int32), *scale)
    return _cut(y, problem, whole)


@functools.lru_cache(maxsize=512)
def _lookup(operation: Any, problem: Problem, shape: tuple[int, ...]) -> Any:
    wide, factors, stored, scale = _stored_labels(problem)
    asked = _named("n", shape)
    labels = tuple(name for name, _ in asked)
    rule = Rule((stored, labels, *scale), (*labels, wide), (*factors, *asked), (0, 1), _group(problem))

    def local(plan: Plan, codes: jax.Array, indices: jax.Array, *scale: jax.Array) -> jax.Array:
        rows, cols = codes.shape[0], problem.format.columns_held(codes)
        mine = problem.replace(rows=rows, m=indices.size, cols=cols)
        if not plan.get("r"):
            return operation.compute(mine, codes, indices, *scale)
        here = indices - position(plan["r"]) * rows
        found = operation.compute(mine, codes, jnp.clip(here, 0, rows - 1), *scale)
        return jnp.where(((here >= 0) & (here < rows))[..., None], found, 0)

    return splittable(rule, functools.partial(operation.compute, problem), local, problem.out_dtype)


# -- what the rules share ----------------------------------------------------------------------------------------------


def _in_whole_groups(problem: Problem, x: Any, codes: jax.Array, scale: tuple[Any, ...]) -> tuple[Problem, Any, Any]:
    """The problem with all columns the codes hold, and x and scale padded to them: rules need whole groups."""
    cols = problem.format.columns_held(codes)
    extra = cols - problem.cols
    if extra and problem.form == "dot":
        x = pad_last(x, extra)
    if extra and scale and not problem.format.blocked and scale[0].shape[-1] != 1:
        scale = (pad_last(scale[0], extra),)
    shape = tuple(scale[0].shape[len(problem.batch) :]) if scale else None
    return problem.replace(cols=cols, scale_shape=shape), x, scale


def _cut(y: jax.Array, problem: Problem, whole: Problem) -> jax.Array:
    """The result without the columns that were padding."""
    return y if problem.form == "dot" or whole.cols == problem.cols else y[..., : problem.cols]


def _local_problem(problem: Problem, rule: Rule, plan: Plan, x: Any, codes: Any, *scale: Any) -> Problem:
    """The product of one device, given its operands; its result is wide where partial sums are added up."""
    partial = any(plan.get(name) for name in rule.contracted)
    here = problem.replace(
        cols=problem.format.columns_held(codes), out_dtype=problem.compute_dtype if partial else problem.out_dtype
    )
    return problem_of(here, problem.platform, x, codes, *scale)


def _product_rule(problem: Problem, batch: Factors, rows: Factors) -> Rule:
    """x, codes, scale -> y, all with the batch axes in front, x and y with these axes of rows."""
    wide, factors, stored, scale = _stored_labels(problem)
    lead, m = (tuple(name for name, _ in named) for named in (batch, rows))
    k, out = (wide, "r") if problem.form == "dot" else ("r", wide)
    operands = ((*lead, *m, k), (*lead, *stored), *((*lead, *labels) for labels in scale))
    return Rule(operands, (*lead, *m, out), (*batch, *rows, *factors), (1, 0), _group(problem))


def _stored_labels(problem: Problem) -> tuple[str, Factors, tuple[str, ...], list[tuple[str, ...]]]:
    """The label of columns, the factors r (rows) and q (groups of columns), and labels of codes and scale."""
    group = _group(problem)
    groups = problem.cols // group
    wide, blocked = columns(groups, group), problem.format.blocked
    scale: list[tuple[str, ...]] = []
    if problem.scale_shape is not None and blocked:
        scale = [("r", "q")]
    elif problem.scale_shape is not None:  # an axis of size 1 serves all rows or columns
        per_row, per_column = problem.scale_shape[0] == problem.rows, problem.scale_shape[1] != 1
        scale = [("r" if per_row else "u", wide if per_column else "v")]
    return wide, [("r", problem.rows), ("q", groups)], ("r", "q", "h") if blocked else ("r", "q"), scale


def _group(problem: Problem) -> int:
    return problem.format.group(problem.block)


def _named(letter: str, sizes: tuple[int, ...]) -> Factors:
    return [(f"{letter}{i}", size) for i, size in enumerate(sizes)]
