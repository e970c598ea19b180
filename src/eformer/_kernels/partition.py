"""How an operation splits over devices under jit, without moving the codes.

An operation is described by factors, as in einsum notation: every axis of an operand or of the result is one of
them. A factor may be split as the codes are, or else as the other operands or the result are. Every device computes
with the part of the codes it holds. Where a factor that is not in the result is split, the partial results are summed
across devices, and left in parts (a reduce-scatter) where the result is wanted so. A block never splits.

Experts of a grouped product and rows of a table may be split like everything else. A device then computes the rows of x
that belong to its own experts, or looks up the indices that fall into its own rows, and gives zeros for all others: the
sum over devices is exact, because one of them holds each value.

An operation is passed in as it is declared; `compute(problem, *operands)` is all that is used of it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from eformer._jax.avals import mesh_axes

from .activations import largest_magnitude, row_scale
from .parameters import Problem, problem_of

Axes = tuple[str, ...]
Factors = list[tuple[str, int]]  # names and sizes
Plan = Mapping[str, Axes]  # mesh axes of every factor that is split


@dataclasses.dataclass(frozen=True)
class Rule:
    """The factors of an operation.

    `operands` and `result` name the factor of every axis; "(q s)" is an axis of q groups of s values, which splits
    between groups only. `counts` are the factors that may be split, with their sizes; `group` is the size of s. The
    sharding of the operands in `first` decides, in this order: the codes, being the largest, come first.
    """

    operands: tuple[tuple[str, ...], ...]
    result: tuple[str, ...]
    counts: tuple[tuple[str, int], ...]
    first: tuple[int, ...]
    group: int = 1

    def in_shardy(self, mesh: Any, operands: Any = None, results: Any = None) -> tuple[str, dict[str, Any]]:
        """The rule in Shardy's notation; factors that are never split, in order of appearance, and sizes it cannot see.

        Where an axis of the mesh does not divide the groups, Shardy would split them over a part of that axis, which
        JAX cannot name. Columns then have a factor of their own, so that no sharding goes from them to the codes.
        """
        text = f"{', '.join(' '.join(axes) for axes in self.operands)} -> {' '.join(self.result)}"
        if any(dict(self.counts).get("q", 0) % size for size in mesh.shape.values()):
            text = text.replace("(q s)", "k")
        names = text.translate(str.maketrans("(),->", "     ")).split()
        fixed = tuple(dict.fromkeys(name for name in names if name not in ("k", *dict(self.counts))))
        sizes = {"s": self.group} if "(q s)" in text else {}
        return text, {"need_replication_factors": fixed, **sizes}

    @property
    def contracted(self) -> tuple[str, ...]:
        """Factors that are summed over, or picked from."""
        kept = {_factor(label) for label in self.result}
        return tuple(name for name, _ in self.counts if name not in kept)


def pad_last(array: jax.Array, extra: int) -> jax.Array:
    return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, extra)])


def splittable(rule: Rule, whole: Callable[..., jax.Array], local: Callable[..., jax.Array], out_dtype: Any) -> Any:
    """A function XLA can split: `whole(*operands)` where it does not, else `local(plan, *operands)` on every device.

    `local` gives a partial sum where a contracted factor is split, in the dtype it is to be summed in.
    """

    def infer(mesh: Any, args: Sequence[Any], result: Any) -> NamedSharding:
        plan = _plan(rule, mesh, args, result)
        return NamedSharding(mesh, _spec(rule.result, plan))

    def partition(mesh: Any, args: Sequence[Any], result: Any) -> tuple[Any, Any, Any, Any]:
        plan = _plan(rule, mesh, args, result)
        scattered = _scattered(rule, plan, mesh, result)
        summed = tuple(axis for name in rule.contracted for axis in plan.get(name, ()))

        def on_one_device(*operands: jax.Array) -> jax.Array:
            # Shapes are local here, so a mesh the program has set must not annotate anything.
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                part = local(plan, *operands)
                return _sum(part, summed, scattered).astype(out_dtype)

        ins = tuple(NamedSharding(mesh, _spec(labels, plan)) for labels in rule.operands)
        return mesh, on_one_device, NamedSharding(mesh, _spec(rule.result, plan, scattered)), ins

    made = custom_partitioning(whole)
    made.def_partition(partition, infer, sharding_rule=rule.in_shardy)
    return made


def position(mesh_axes: Axes) -> jax.Array:
    """Which of the parts along these axes this device holds; for use in `local`."""
    return lax.axis_index(mesh_axes) if mesh_axes else jnp.zeros((), jnp.int32)


def _plan(rule: Rule, mesh: Any, args: Sequence[Any], result: Any) -> Plan:
    free, plan, counts = set(mesh.axis_names), {}, dict(rule.counts)
    asked = [(args[i], rule.operands[i]) for i in rule.first]
    for shaped, labels in (*asked, (result, rule.result)):
        for label, axes in zip(labels, _axes(shaped), strict=True):
            name = _factor(label)
            if name not in counts or name in plan or not axes or not free.issuperset(axes):
                continue
            if counts[name] % math.prod(mesh.shape[axis] for axis in axes) == 0:
                plan[name] = axes
                free.difference_update(axes)
    return plan


def _scattered(rule: Rule, plan: Plan, mesh: Any, result: Any) -> list[Axes]:
    """For every axis of the result, mesh axes that are summed over and along which it is wanted in parts."""
    left = {axis for name in rule.contracted for axis in plan.get(name, ())}
    found = []
    for label, size, wanted in zip(rule.result, result.shape, _axes(result), strict=True):
        held = plan.get(_factor(label), ())
        more = wanted[len(held) :]
        fits = left.issuperset(more) and wanted[: len(held)] == held
        fits = fits and size % math.prod(mesh.shape[axis] for axis in wanted) == 0
        found.append(more if fits else ())
        left.difference_update(found[-1])
    return found


def _sum(part: jax.Array, summed: Axes, scattered: Sequence[Axes]) -> jax.Array:
    for dimension, axes in enumerate(scattered):
        if axes:
            part = lax.psum_scatter(part, axes, scatter_dimension=dimension, tiled=True)
    rest = tuple(axis for axis in summed if not any(axis in axes for axes in scattered))
    return lax.psum(part, rest) if rest else part


def _factor(label: str) -> str:
    return label.strip("()").split()[0]


def _spec(labels: Sequence[str], plan: Plan, more: Sequence[Axes] | None = None) -> PartitionSpec:
    more = more or [()] * len(labels)
    return PartitionSpec(*((*plan.get(_factor(a), ()), *b) or None for a, b in zip(labels, more, strict=True)))


def _axes(shaped: Any) -> list[Axes]:
    """Mesh axes of every dimension; none where the sharding has no names."""
    spec = getattr(getattr(shaped, "sharding", None), "spec", None) or ()
    named = [mesh_axes(entry) for entry in spec]
    return named + [()] * (len(shaped.shape) - len(named))


# -- the operations: rows of x, rows of D, groups of columns of D, batch axes and indices may be split -----------------


def split_product(operation: Any, problem: Problem, x: jax.Array, codes: jax.Array, *scale: jax.Array) -> jax.Array:
    whole, x, scale = _in_whole_groups(problem, x, codes, scale)
    x_scaled = bool(problem.apart(scale)[1])
    y = _product(operation, whole, tuple(x.shape[len(problem.batch) : -1]), x_scaled)(x, codes, *scale)
    return _cut(y, problem, whole)


@functools.lru_cache(maxsize=512)
def _product(operation: Any, problem: Problem, rows: tuple[int, ...], x_scaled: bool) -> Any:
    rule = _product_rule(problem, _named("b", problem.batch), _named("m", rows), x_scaled)

    def local(plan: Plan, x: jax.Array, codes: jax.Array, *scale: jax.Array) -> jax.Array:
        scale = (*scale, *_scales_of_split_rows(problem, rule, plan, x, x_scaled))
        return operation.compute(_local_problem(problem, rule, plan, x, codes, *scale), x, codes, *scale)

    return splittable(rule, functools.partial(operation.compute, problem), local, problem.out_dtype)


def split_groups(
    operation: Any, problem: Problem, x: jax.Array, codes: jax.Array, sizes: jax.Array, *scale: jax.Array
) -> jax.Array:
    whole, x, scale = _in_whole_groups(problem, x, codes, scale)
    x_scaled = bool(problem.apart(scale)[1])
    return _cut(_groups(operation, whole, x_scaled)(x, codes, sizes, *scale), problem, whole)


@functools.lru_cache(maxsize=512)
def _groups(operation: Any, problem: Problem, x_scaled: bool) -> Any:
    plain = _product_rule(problem.replace(batch=()), [], [("m", problem.m)], x_scaled)
    x, codes, *scale = plain.operands
    x_scale = [scale.pop()] if x_scaled else []
    # Every device needs all group sizes, to know where its rows begin: their axis has a factor of its own.
    operands = (x, ("g", *codes), ("e",), *(("g", *labels) for labels in scale), *x_scale)
    rule = dataclasses.replace(plain, operands=operands, counts=(*plain.counts, ("g", problem.batch[0])))

    def local(plan: Plan, x: jax.Array, codes: jax.Array, sizes: jax.Array, *scale: jax.Array) -> jax.Array:
        # By the rule of a plain product: rows of other experts are zeros, and add up exactly.
        scale = (*scale, *_scales_of_split_rows(problem, plain, plan, x, x_scaled))
        mine = _local_problem(problem, plain, plan, x, codes, *scale)
        sizes, begin = _own_groups(plan, sizes, x.shape[0], codes.shape[0])
        if not plan.get("g"):
            return operation.compute(mine, x, codes, sizes, *scale)
        numbers, of_x = problem.apart(scale)
        x, *rolled = (jnp.roll(o, -begin, 0) for o in (x, *of_x))
        return jnp.roll(operation.compute(mine, x, codes, sizes, *numbers, *rolled), begin, 0)

    return splittable(rule, functools.partial(operation.compute, problem), local, problem.out_dtype)


def _scales_of_split_rows(problem: Problem, rule: Rule, plan: Plan, x: jax.Array, given: bool) -> list[jax.Array]:
    """Where x is rounded and its rows are split, the scale of a row is that of all its parts."""
    axes = tuple(axis for name in rule.contracted for axis in plan.get(name, ()))
    if problem.activations is None or given or not axes:
        return []
    return [row_scale(lax.pmax(largest_magnitude(x), axes), problem.activations)]


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


def _in_whole_groups(problem: Problem, x: Any, codes: jax.Array, scale: tuple[Any, ...]) -> tuple[Problem, Any, Any]:
    """The problem with all columns the codes hold, and x and scale padded to them: rules need whole groups."""
    cols = problem.format.columns_held(codes)
    extra = cols - problem.cols
    if extra and problem.form == "dot":
        x = pad_last(x, extra)
    if extra and scale and not problem.format.blocked and scale[0].shape[-1] != 1:
        scale = (pad_last(scale[0], extra), *scale[1:])
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


def _product_rule(problem: Problem, batch: Factors, rows: Factors, x_scaled: bool) -> Rule:
    """x, codes, scale (extras, scale of x) -> y, all with the batch axes in front, x and y with these axes of rows."""
    wide, factors, stored, scale = _stored_labels(problem)
    lead, m = (tuple(name for name, _ in named) for named in (batch, rows))
    k, out = (wide, "r") if problem.form == "dot" else ("r", wide)
    operands = ((*lead, *m, k), (*lead, *stored), *((*lead, *labels) for labels in scale))
    operands += ((*lead, *m),) if x_scaled else ()
    return Rule(operands, (*lead, *m, out), (*batch, *rows, *factors), (1, 0), _group(problem))


def _stored_labels(problem: Problem) -> tuple[str, Factors, tuple[str, ...], list[tuple[str, ...]]]:
    """The label of columns, the factors r (rows) and q (groups of columns), labels of codes, of scale and extras."""
    group = _group(problem)
    groups = problem.cols // group
    # Shardy refuses a product of factors one of which has size 1.
    wide = "q" if group == 1 else "s" if groups == 1 else "(q s)"
    blocked = problem.format.blocked
    scale: list[tuple[str, ...]] = []
    if problem.scale_shape is not None and blocked:
        scale = [("r", "q")] * (1 if problem.offset is None else 2) + [("u", "v")] * problem.factored
    elif problem.scale_shape is not None:  # an axis of size 1 serves all rows or columns
        per_row, per_column = problem.scale_shape[0] == problem.rows, problem.scale_shape[1] != 1
        scale = [("r" if per_row else "u", wide if per_column else "v")]
    return wide, [("r", problem.rows), ("q", groups)], ("r", "q", "h") if blocked else ("r", "q"), scale


def _group(problem: Problem) -> int:
    return problem.format.group(problem.block)


def _named(letter: str, sizes: tuple[int, ...]) -> Factors:
    return [(f"{letter}{i}", size) for i, size in enumerate(sizes)]
