"""How `qmatmul` splits over devices: rows of x, rows of D, groups of columns of D, and batch axes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from .partition import Plan, Rule, columns, operation, pad_last
from .problem import PER_CODE, Problem, Spec, padded_cols, problem_of
from .select import compute_rows

Factors = list[tuple[str, int]]  # names and sizes


def partitioned(problem: Problem, x: jax.Array, codes: jax.Array, scale: jax.Array | None) -> jax.Array:
    """The product as an operation XLA's partitioner can split."""
    spec = problem.spec
    x, scale, extra = in_whole_groups(spec, x, codes, scale)
    whole = problem_of(dataclasses.replace(spec, cols=spec.cols + extra), problem.platform, x, codes, scale)
    operands = (x, codes) if scale is None else (x, codes, scale)
    y = _operation(whole, tuple(x.shape[len(problem.batch) : -1]))(*operands)
    return y[..., : spec.cols] if extra and spec.form == "axpy" else y


def in_whole_groups(spec: Spec, x: jax.Array, codes: jax.Array, scale: Any) -> tuple[jax.Array, Any, int]:
    """x and scale padded to the columns the codes hold, and how many were missing: rules need whole groups."""
    extra = padded_cols(spec, codes) - spec.cols
    if extra and spec.form == "dot":
        x = pad_last(x, extra)
    if extra and scale is not None and spec.fmt != "nf4" and scale.shape[-1] != 1:
        scale = pad_last(scale, extra)
    return x, scale, extra


@functools.lru_cache(maxsize=512)
def _operation(problem: Problem, rows: tuple[int, ...]) -> Any:
    batch = [(f"b{i}", size) for i, size in enumerate(problem.batch)]
    rule = product_rule(problem, batch, [(f"m{i}", size) for i, size in enumerate(rows)])

    def whole(x: jax.Array, codes: jax.Array, *scale: jax.Array) -> jax.Array:
        return compute_rows(problem, x, codes, scale[0] if scale else None)

    def local(plan: Plan, x: jax.Array, codes: jax.Array, *scale: jax.Array) -> jax.Array:
        mine = local_problem(problem, x, codes, scale[0] if scale else None)
        if any(plan.get(name) for name in rule.contracted):
            mine = mine.with_out_dtype(mine.compute_dtype)
        return compute_rows(mine, x, codes, scale[0] if scale else None)

    return operation(rule, whole, local, problem.spec.out_dtype)


def local_problem(problem: Problem, x: Any, codes: Any, scale: Any) -> Problem:
    """The problem of one device, given its operands."""
    spec = dataclasses.replace(problem.spec, cols=padded_cols(problem.spec, codes))
    return problem_of(spec, problem.platform, x, codes, scale)


def product_rule(problem: Problem, batch: Factors, rows: Factors) -> Rule:
    """x, codes, scale -> y, all with the batch axes in front, x and y with these axes of rows."""
    spec = problem.spec
    group = int(spec.block or PER_CODE[spec.fmt])
    groups = spec.cols // group
    wide = columns(groups, group)
    lead, m = (tuple(name for name, _ in factors) for factors in (batch, rows))
    k, out = (wide, "r") if spec.form == "dot" else ("r", wide)
    operands = [(*lead, *m, k), (*lead, *code_labels(spec.fmt))]
    if problem.scale_shape is not None:
        operands.append((*lead, *scale_labels(spec.fmt, problem.scale_shape, problem.rows, wide)))
    counts = (*batch, *rows, ("r", problem.rows), ("q", groups))
    return Rule(tuple(operands), (*lead, *m, out), counts, (1, 0), group)


def code_labels(fmt: str) -> tuple[str, ...]:
    return ("r", "q", "h") if fmt == "nf4" else ("r", "q")


def scale_labels(fmt: str, shape: tuple[int, ...], rows: int, wide: str) -> tuple[str, ...]:
    """An axis of size 1 serves all rows or columns."""
    if fmt == "nf4":
        return ("r", "q")
    return "r" if shape[0] == rows else "u", wide if shape[1] != 1 else "v"
