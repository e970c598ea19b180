"""How a product splits over devices under jit, without moving the codes.

Rows of D and of x, batch axes and blocks may all be sharded. Every device decodes the part of D it holds; when the
contracted axis is sharded the partial products are summed across devices. A block never splits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from .problem import PER_CODE, Problem, padded_cols, problem_of
from .select import compute

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Mesh axes of every factor of the product: batch axes, rows of x, rows of D, blocks of D."""

    batch: tuple[Axes, ...]
    m: Axes
    r: Axes
    q: Axes

    def spec(self, *factors: Axes) -> PartitionSpec:
        return PartitionSpec(*(axes or None for axes in (*self.batch, *factors)))


def partitioned(problem: Problem, x: jax.Array, codes: jax.Array, scale: jax.Array | None) -> jax.Array:
    """The product as an operation XLA's partitioner can split."""
    spec = problem.spec
    cols = padded_cols(spec, codes)
    extra = cols - spec.cols
    if extra and spec.form == "dot":  # the rule below needs whole blocks
        x = _pad_last(x, extra)
    if extra and scale is not None and spec.fmt != "nf4" and scale.shape[-1] != 1:
        scale = _pad_last(scale, extra)
    whole = problem_of(dataclasses.replace(spec, cols=cols), problem.platform, x, codes, scale)
    operands = (x, codes) if scale is None else (x, codes, scale)
    shapes = tuple(tuple(a.shape) for a in operands)
    y = _operation(whole, shapes)(*operands)
    return y[..., : spec.cols] if extra and spec.form == "axpy" else y


def _pad_last(array: jax.Array, extra: int) -> jax.Array:
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, extra)])


@functools.lru_cache(maxsize=512)
def _operation(problem: Problem, shapes: tuple[tuple[int, ...], ...]) -> Any:
    def local(*operands: jax.Array) -> jax.Array:
        return compute(problem, *_with_scale(operands))

    def infer(mesh: Any, args: Sequence[Any], result: Any) -> NamedSharding:
        return NamedSharding(mesh, _specs(problem, _plan(problem, mesh, args, result))[0])

    def partition(mesh: Any, args: Sequence[Any], result: Any) -> tuple[Any, Any, Any, Any]:
        plan = _plan(problem, mesh, args, result)
        out, ins = _specs(problem, plan)
        shardings = tuple(NamedSharding(mesh, spec) for spec in ins[: len(args)])

        def on_one_device(*operands: jax.Array) -> jax.Array:
            # Shapes are local here, so a mesh the program has set must not annotate anything.
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return _local_product(problem, plan, *operands)

        return mesh, on_one_device, NamedSharding(mesh, out), shardings

    operation = custom_partitioning(local)
    rule, options = _sharding_rule(problem, len(shapes))
    operation.def_partition(partition, infer, sharding_rule=rule, **options)
    return operation


def _with_scale(operands: Sequence[Any]) -> tuple[Any, Any, Any]:
    return (*operands, None) if len(operands) == 2 else tuple(operands)  # pyright: ignore[reportReturnType]


def _local_product(problem: Problem, plan: Plan, *operands: jax.Array) -> jax.Array:
    """What one device does: its own problem, summed over the devices that hold the rest of the contracted axis."""
    x, codes, scale = _with_scale(operands)
    spec = dataclasses.replace(problem.spec, cols=padded_cols(problem.spec, codes))
    mine = problem_of(spec, problem.platform, x, codes, scale)
    contracted = plan.q if spec.form == "dot" else plan.r
    if not contracted:
        return compute(mine, x, codes, scale)
    part = compute(mine.with_out_dtype(mine.compute_dtype), x, codes, scale)
    return lax.psum(part, contracted).astype(spec.out_dtype)


def _sharding_rule(problem: Problem, count: int) -> tuple[str, dict[str, Any]]:
    """The rule in Shardy's einsum notation: q counts stored groups of columns, s the values in one."""
    spec = problem.spec
    batch = "".join(f"b{i} " for i in range(len(problem.batch)))
    group = int(spec.block or PER_CODE[spec.fmt])
    # Shardy refuses a product of factors one of which has size 1.
    columns = "q" if group == 1 else "s" if spec.cols == group else "(q s)"
    k, out = (columns, "r") if spec.form == "dot" else ("r", columns)
    operands = [f"{batch}m {k}", f"{batch}r q h" if spec.fmt == "nf4" else f"{batch}r q"]
    fixed = (["s"] if group != 1 else []) + (["h"] if spec.fmt == "nf4" else [])
    if count == 3:
        assert problem.scale_shape is not None
        if spec.fmt == "nf4":
            operands.append(f"{batch}r q")
        else:
            row = "r" if problem.scale_shape[0] == problem.rows else "u"
            column = columns if problem.scale_shape[1] != 1 else "v"
            operands.append(f"{batch}{row} {column}")
    sizes = {"s": group} if columns == "(q s)" else {}
    rule = f"{', '.join(operands)} -> {batch}m {out}"
    # Shardy wants the factors that cannot be split in order of appearance.
    return rule, {"need_replication_factors": tuple(sorted(fixed, key=rule.index)), **sizes}


def _plan(problem: Problem, mesh: Any, args: Sequence[Any], result: Any) -> Plan:
    """Give every factor its mesh axes. Codes come first: they are the largest operand and must stay where they are."""
    nb = len(problem.batch)
    x, codes = _axes(args[0]), _axes(args[1])
    y = _axes(result)
    free: set[str] = set(mesh.axis_names)

    def claim(size: int, *wishes: Axes) -> Axes:
        for axes in wishes:
            if axes and free.issuperset(axes) and size % math.prod(mesh.shape[a] for a in axes) == 0:
                free.difference_update(axes)
                return axes
        return ()

    r_of_x, q_of_x = ((), x[-1]) if problem.spec.form == "dot" else (x[-1], ())
    r_of_y, q_of_y = (y[-1], ()) if problem.spec.form == "dot" else ((), y[-1])
    batch = tuple(claim(problem.batch[i], codes[i], x[i], y[i]) for i in range(nb))
    r = claim(args[1].shape[nb], codes[nb], r_of_x)
    q = claim(args[1].shape[nb + 1], codes[nb + 1], q_of_x)
    m = claim(problem.m, x[nb], y[nb])
    return Plan(batch, m, r or claim(args[1].shape[nb], r_of_y), q or claim(args[1].shape[nb + 1], q_of_y))


def _axes(shaped: Any) -> list[Axes]:
    """Mesh axes of every dimension; none where the sharding has no names."""
    spec = getattr(getattr(shaped, "sharding", None), "spec", None) or ()
    named = [() if a is None else (a,) if isinstance(a, str) else tuple(a) for a in spec]
    return named + [()] * (len(shaped.shape) - len(named))


def _specs(problem: Problem, plan: Plan) -> tuple[PartitionSpec, tuple[PartitionSpec, ...]]:
    """Shardings of the result and of x, codes, scale."""
    dot = problem.spec.form == "dot"
    x = plan.spec(plan.m, plan.q if dot else plan.r)
    y = plan.spec(plan.m, plan.r if dot else plan.q)
    if problem.spec.fmt == "nf4":
        return y, (x, plan.spec(plan.r, plan.q, ()), plan.spec(plan.r, plan.q))
    rows, cols = problem.scale_shape or (1, 1)
    scale = plan.spec(plan.r if rows == problem.rows else (), plan.q if cols != 1 else ())
    return y, (x, plan.spec(plan.r, plan.q), scale)
