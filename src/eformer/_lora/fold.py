"""`merge_lora`: adapters folded into their weights, and the cost of rounding them again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from eformer import _table
from eformer._core import ImplicitArray
from eformer._quantize.config import QuantizationConfig, config_of, quantize_stack
from eformer._quantize.leaves import Role, open_tree, roles_of
from eformer._quantize.plan import Choice, as_config
from eformer._quantize.report import relative_error

from .array import LoraArray


@dataclasses.dataclass(frozen=True)
class MergeCost:
    """One merged weight: how far it is from `w + update`, and how large the update was, both relative to that sum.

    An error near the size of the update means that the new rounding swallowed what was trained.
    """

    path: str
    format: str
    relative_error: float
    update: float


@dataclasses.dataclass(frozen=True)
class MergeReport:
    """What `merge_lora` cost, leaf by leaf; prints as a table."""

    leaves: tuple[MergeCost, ...]

    @property
    def relative_error(self) -> float:
        """The largest of all leaves."""
        return max((leaf.relative_error for leaf in self.leaves), default=0.0)

    def __iter__(self) -> Iterator[MergeCost]:
        return iter(self.leaves)

    def __str__(self) -> str:
        rows = [(c.path, c.format, f"{c.relative_error:.4f}", f"{c.update:.4f}") for c in self.leaves]
        return "\n".join(_table.lines(("path", "format", "rel. error", "update"), rows))


def merge_lora(params: Any, into: Choice = "base") -> tuple[Any, MergeReport]:
    """The model without adapters, and a report of the error of each new rounding.

    Args:
        params: any pytree, or a Flax NNX module.
        into: "base" quantizes `w + update` as `w` was (and keeps a dense `w` dense); "dense" gives dense arrays;
            anything else is a format, as in rules.

    >>> import jax.numpy as jnp
    >>> q = LoraArray(jnp.ones((2, 2)), jnp.ones((2, 1)), jnp.ones((1, 2)))
    >>> merged, report = merge_lora({"w": q})
    >>> merged["w"].tolist(), report.relative_error
    ([[2.0, 2.0], [2.0, 2.0]], 0.0)
    """
    tree = open_tree(params)
    made: dict[int, Any] = {}
    costs = []
    for leaf, role in zip(tree.leaves, roles_of(tree.leaves), strict=True):
        q = leaf.value
        if isinstance(q, LoraArray) and id(q) not in made:
            dense = q.materialize()
            made[id(q)] = merged = _requantized(dense, q, role, into, leaf.path)
            fmt = getattr(merged, "format", merged.dtype.name)
            costs.append(MergeCost(leaf.path, fmt, relative_error(merged, dense), relative_error(q.w, dense)))
    return tree.rebuild(made.get(id(leaf.value), leaf.value) for leaf in tree.leaves), MergeReport(tuple(costs))


def _requantized(dense: jax.Array, q: LoraArray, role: Role, into: Choice, path: str) -> Any:
    wanted = _config_of(q.w, path) if into == "base" else None if into == "dense" else as_config(into)
    if wanted is None:
        return dense
    if wanted.axis is None:
        wanted = dataclasses.replace(wanted, axis=role.axis(wanted.format.scales_many_axes))
    made = quantize_stack(dense, wanted, q.ndim - q.left - q.right)
    sharding = getattr(q.w, "sharding", None) if isinstance(q.w, ImplicitArray) else None
    return made if sharding is None else made.with_sharding(sharding)


def _config_of(w: Any, path: str) -> QuantizationConfig | None:
    """How an array was quantized; None for a dense one."""
    if not isinstance(w, ImplicitArray):
        return None
    found = config_of(w)
    if found is None:
        raise TypeError(
            f"{path!r} is a {type(w).__name__}, which merge_lora cannot quantize again as it was. Give into='dense' or "
            "a format."
        )
    return found
