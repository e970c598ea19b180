"""How an operation splits over devices under jit, without moving the codes.

An operation is described by factors, as in einsum notation: every axis of an operand or of the result is one of
them. A factor may be split as the codes are, or else as the other operands or the result are. Every device computes
with the part of the codes it holds. Where a factor that is not in the result is split, the partial results are summed
across devices, and left in parts (a reduce-scatter) where the result is wanted so. A block never splits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

Axes = tuple[str, ...]
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

    @property
    def text(self) -> str:
        """The rule in Shardy's notation."""
        return f"{', '.join(' '.join(axes) for axes in self.operands)} -> {' '.join(self.result)}"

    @property
    def options(self) -> dict[str, Any]:
        """Factors that are never split, in order of appearance as Shardy wants them, and sizes it cannot see."""
        names = self.text.translate(str.maketrans("(),->", "     ")).split()
        fixed = tuple(dict.fromkeys(name for name in names if name not in dict(self.counts)))
        sizes = {"s": self.group} if "(q s)" in self.text else {}
        return {"need_replication_factors": fixed, **sizes}

    @property
    def contracted(self) -> tuple[str, ...]:
        """Factors that are summed over, or picked from."""
        kept = {_factor(label) for label in self.result}
        return tuple(name for name, _ in self.counts if name not in kept)


def columns(groups: int, group: int) -> str:
    """The label of an axis of columns that are stored in groups."""
    # Shardy refuses a product of factors one of which has size 1.
    return "q" if group == 1 else "s" if groups == 1 else "(q s)"


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
    made.def_partition(partition, infer, sharding_rule=rule.text, **rule.options)
    return made


def position(mesh_axes: Axes) -> jax.Array:
    """Which of the parts along these axes this device holds; for use in `local`."""
    return lax.axis_index(mesh_axes) if mesh_axes else jnp.zeros((), jnp.int32)


def _plan(rule: Rule, mesh: Any, args: Sequence[Any], result: Any) -> Plan:
    """Give every factor its mesh axes."""
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
    named = [() if a is None else (a,) if isinstance(a, str) else tuple(a) for a in spec]
    return named + [()] * (len(shaped.shape) - len(named))
