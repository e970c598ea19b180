"""Adapters on a model: `add_lora`, `split_trainable` and `merge` while it is trained, `merge_lora` at the end."""

from __future__ import annotations

import dataclasses
import math
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer import _table
from eformer._core import ImplicitArray
from eformer._formats.activations.array import ActivationArray
from eformer._formats.arguments import is_storage
from eformer._messages import NOTHING_TO_TRAIN, called_otherwise, shown
from eformer._quantize.config import QuantizationConfig, config_of, quantize_stack
from eformer._quantize.leaves import GROUPS, Leaf, Role, map_tree, open_tree, roles_of
from eformer._quantize.plan import Choice, Rule, as_config, skipped_kinds
from eformer._quantize.report import relative_error
from eformer.errors import UnusedRuleWarning

from .array import LoraArray, check_shapes
from .dora import DoraArray
from .parts import ADAPTERS, Adapter, low_rank, with_trained

Ranks = str | Iterable[str] | Mapping[str, int | None]


@called_otherwise(
    r="the rank is rank={value}",
    lora_alpha="it is alpha={value}",
    lora_dropout="it is dropout={value}",
    target_modules='patterns of paths are rules, such as rules=["*q_proj*", "*v_proj*"]',
    use_rslora="it is rank_stabilized={value}",
    use_dora="it is dora={value}",
)
def add_lora(
    params: Any,
    rules: Ranks = "*",
    rank: int = 8,
    key: jax.Array | None = None,
    *,
    alpha: float | None = None,
    dtype: Any = jnp.float32,
    skip: Iterable[str] = tuple(GROUPS),
    rank_stabilized: bool = False,
    dropout: float = 0.0,
    dora: bool = False,
) -> Any:
    """Put a `LoraArray` around every matrix whose path matches. Initially the model computes what it did before.

    Args:
        params: a model, quantized or not: any pytree, or a Flax NNX module.
        rules: one pattern, several, or an ordered `pattern -> rank` (None: no adapter); the first match decides.
        rank: used where `rules` give none.
        key: for the random factor, on the input side; the other starts at zero. Every path gets its own random numbers.
        alpha: updates are scaled by `alpha / rank`; by default by 1.
        dtype: the dtype of the factors.
        skip: groups of leaves that get none, as for `quantize_tree`; by default all but the kernels of layers.
        rank_stabilized: scale updates by `alpha / sqrt(rank)` instead (rsLoRA), so that a high rank learns as quickly.
        dropout: the share of inputs that the factors do not see in training, where `lora_dropout` is called.
        dora: train the length of every column separately from its direction: a `DoraArray`.

    >>> add_lora({"q": jnp.ones((8, 4)), "k": jnp.ones((8, 4))}, "q", 2, jax.random.key(0))["q"].a.shape
    (8, 2)
    """
    if key is None:
        raise TypeError("add_lora needs key=, for example jax.random.key(0): one factor of every adapter is random.")
    if not hasattr(key, "dtype"):
        raise TypeError(f"key={shown(key)} is not a random key; give one, such as jax.random.key(0).")
    _check_alpha(alpha)
    if rank_stabilized and alpha is None:
        raise TypeError("add_lora(rank_stabilized=True) needs alpha=, which it divides by the root of the rank.")
    ranks, tree, kinds = _ranks(rules, rank), open_tree(params), skipped_kinds(skip)
    used: set[str] = set()
    made: dict[int, Any] = {}
    results = []
    for leaf, role in zip(tree.leaves, roles_of(tree.leaves), strict=True):
        rule = next((r for r in ranks if r.matches(leaf.path)), None)
        value = leaf.value
        if rule is not None and _can_have_one(leaf, role, kinds):
            used.add(rule.pattern)
            size = ranks[rule]
            if size is not None:
                scale = 1.0 if alpha is None else alpha / (math.sqrt(size) if rank_stabilized else size)
                if id(value) not in made:
                    made[id(value)] = _adapted(leaf, role, size, key, scale, dtype, dropout, dora)
                value = made[id(value)]
        results.append(value)
    unused = [rule.pattern for rule in ranks if rule.pattern not in used]
    if unused:
        near = ", ".join(repr(leaf.path) for leaf in tree.leaves[:3])
        message = f"add_lora: {unused} match no matrix; paths look like {near}"
        taken = [x.path for x in tree.leaves if isinstance(x.value, ADAPTERS) and any(r.matches(x.path) for r in ranks)]
        if taken:
            message = (
                f"add_lora: {taken[0]!r} already has an adapter, which stays. Call merge_lora first to add another."
            )
        warnings.warn(message, UnusedRuleWarning, stacklevel=3)
    return tree.rebuild(results)


def _ranks(rules: Ranks, rank: int) -> dict[Rule, int | None]:
    if not isinstance(rules, (str, Iterable)):
        raise TypeError(
            f"rules={shown(rules)} is not allowed; give patterns, or pattern -> rank. One rank for all: rank=."
        )
    pairs = [(rules, rank)] if isinstance(rules, str) else rules.items() if isinstance(rules, Mapping) else None
    ranks = {Rule(p, None): r for p, r in (pairs if pairs is not None else ((p, rank) for p in rules))}
    wrong = [r for r in ranks.values() if r is not None and (not isinstance(r, int) or isinstance(r, bool) or r < 1)]
    if wrong:
        raise ValueError(
            f"rank={shown(wrong[0])} is not allowed; give a whole number, at least 1, or None for no adapter. The "
            "order is add_lora(params, rules, rank, key)."
        )
    return ranks


def _check_alpha(alpha: Any) -> None:
    number = isinstance(alpha, (int, float, np.integer, np.floating)) and not isinstance(alpha, bool)
    if alpha is not None and not (number and math.isfinite(alpha)):
        raise ValueError(f"alpha={alpha!r} is not allowed; give a finite number, or None to scale updates by 1.")


def _can_have_one(leaf: Leaf, role: Role, skip: frozenset[str]) -> bool:
    value = leaf.value
    matrix = hasattr(value, "dtype") and hasattr(value, "shape") and len(value.shape) >= 2
    floating = matrix and jnp.issubdtype(value.dtype, jnp.floating)
    return floating and role.kind not in (*skip, "optimizer") and not isinstance(value, ADAPTERS)


def _adapted(
    leaf: Leaf, role: Role, rank: int, key: jax.Array, scale: float, dtype: Any, dropout: float, dora: bool
) -> Adapter:
    value = leaf.value
    shape, input_first = tuple(value.shape), role.inputs[0] < role.outputs[0]
    # After both comes the window of a convolution (out, in, window...), which is summed over as the inputs are.
    inputs = (*role.inputs, *range(max(*role.inputs, *role.outputs) + 1, 0))
    first, second = (inputs, role.outputs) if input_first else (role.outputs, inputs)
    batch = len(shape) - len(first) - len(second)
    widest = min(math.prod(shape[axis] for axis in axes) for axes in (first, second))
    if rank > widest:
        raise ValueError(
            f"rank={rank} is more than {leaf.path!r} of shape {shape} can have, {widest}. Give a smaller rank=, or "
            f"rules with one of its own: {{{leaf.path!r}: {max(widest // 2, 1)}, ...}}; None is no adapter."
        )
    a, b = (*shape[: batch + len(first)], rank), (*shape[:batch], rank, *shape[batch + len(first) :])
    fan_in = math.prod(shape[axis] for axis in inputs)
    # A key of the leaf's own path, so that it does not depend on which other leaves have adapters.
    own = jax.random.fold_in(key, zlib.crc32(leaf.path.encode()))
    random = jax.random.normal(own, a if input_first else b, dtype) / math.sqrt(max(fan_in, 1))
    zeros = jnp.zeros(b if input_first else a, dtype)
    a, b = (random, zeros) if input_first else (zeros, random)
    made = LoraArray(value, a, b, scale, len(first), len(second), dropout)
    return DoraArray.over(made, columns=input_first) if dora else made


# -- training: what is trained apart from the rest, and joined again ---------------------------------------------------


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Hole:
    """Where a trainable array belongs. Static, so it passes through `jax.jit` inside the frozen part."""

    name: str


def split_trainable(params: Any, also: str | Iterable[str] = ()) -> tuple[dict[str, jax.Array], Any]:
    """A flat dict of what is trained (the factors of every `LoraArray`), and the model with holes in their place.

    Differentiate with respect to the first, `merge` both inside the loss. A leaf that appears twice is trained once.

    Args:
        params: any pytree, or a Flax NNX module.
        also: patterns of dense floating leaves to train as well; "*" for all of them.

    >>> params = {"norm": jnp.ones(2), "w": LoraArray(jnp.ones((2, 2)), jnp.ones((2, 1)), jnp.ones((1, 2)))}
    >>> trainable, frozen = split_trainable(params, also="*norm")
    >>> list(trainable)
    ['norm', 'w/a', 'w/b']
    >>> merge(trainable, frozen)["norm"]
    Array([1., 1.], dtype=float32)
    """
    patterns = [Rule(p, None) for p in ([also] if isinstance(also, str) else also)]
    tree, used = open_tree(params), set()
    trainable: dict[str, Any] = {}
    opened: dict[int, Any] = {}
    for leaf in tree.leaves:
        value = leaf.value
        if id(value) in opened:
            continue
        if isinstance(value, ADAPTERS):
            prefix = f"{leaf.path}/" if leaf.path else ""
            opened[id(value)] = with_trained(value, lambda name, x, at=prefix: _hole(f"{at}{name}", x, trainable))
        elif _is_dense(value) and (hits := [p.pattern for p in patterns if p.matches(leaf.path)]):
            used.update(hits)
            opened[id(value)] = _hole(leaf.path, value, trainable)
    unused = [p.pattern for p in patterns if p.pattern not in used]
    if unused:
        warnings.warn(f"split_trainable: {unused} match no dense leaf", UnusedRuleWarning, stacklevel=2)
    elif not trainable:
        warnings.warn(NOTHING_TO_TRAIN, UnusedRuleWarning, stacklevel=2)
    return trainable, tree.rebuild(opened.get(id(leaf.value), leaf.value) for leaf in tree.leaves)


def merge(trainable: Mapping[str, Any], frozen: Any) -> Any:
    """Join the two parts of `split_trainable` into one model."""
    seen: set[str] = set()

    def fill(x: Any) -> Any:
        if isinstance(x, ADAPTERS):
            return _checked(with_trained(x, lambda _, part: fill(part)), x)
        if not isinstance(x, Hole):
            return x
        if x.name not in trainable:
            raise ValueError(f"the trainable part lacks {x.name!r}; it holds {sorted(trainable)[:5]}.")
        seen.add(x.name)
        return trainable[x.name]

    merged = map_tree(fill, frozen, lambda x: isinstance(x, (Hole, *ADAPTERS)))
    extra = sorted(set(trainable) - seen)
    if extra:
        raise ValueError(
            f"the frozen part has no place for {extra[:5]}; both must come from one split_trainable. "
            "Call merge outside of implicit, which hides the places: implicit(f)(merge(trainable, frozen), x)."
        )
    return merged


def lora_mask(params: Any) -> Any:
    """A tree like `params` of booleans, True for the factors of adapters.

    For what treats the two differently: a count, a decay mask, the labels of `optax.multi_transform`. To freeze the
    rest, `optax.masked` is not enough: it passes updates outside the mask through unchanged, and `apply_updates` adds
    them. Use `optax.set_to_zero` for those, or train what `split_trainable` returns.
    """

    def mask(leaf: Any) -> Any:
        if not isinstance(leaf, ADAPTERS):
            return jax.tree.map(lambda _: False, leaf)
        return with_trained(leaf, lambda *_: True, lambda rest: jax.tree.map(lambda _: False, rest))

    return map_tree(mask, params, lambda x: isinstance(x, ImplicitArray))


def _is_dense(value: Any) -> bool:
    is_array = isinstance(value, (jax.Array, np.ndarray)) and not isinstance(value, ImplicitArray)
    return is_array and jnp.issubdtype(value.dtype, jnp.floating)


def _checked(filled: Any, opened: Any) -> Any:
    """Factors that were filled in must fit `w`: of one layer inside a scan, of one device inside `shard_map`."""
    made, holes = low_rank(filled), low_rank(opened)
    if is_storage(made.w, made.a, made.b):
        try:
            check_shapes(made)
        except ValueError as err:
            raise ValueError(f"{holes.a!r} and {holes.b!r} cannot be filled: {err}") from err
    return filled


def _hole(name: str, value: Any, trainable: dict[str, Any]) -> Hole:
    free, number = name, 1
    while free in trainable:  # two keys that print the same
        number += 1
        free = f"{name}#{number}"
    trainable[free] = value
    return Hole(free)


# -- merging: adapters folded into their weights, and the cost of rounding them again ----------------------------------


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
        if isinstance(q, ADAPTERS) and id(q) not in made:
            dense, base = q.materialize(), low_rank(q)
            made[id(q)] = merged = _requantized(dense, base, role, into, leaf.path)
            fmt = getattr(merged, "format", merged.dtype.name)
            costs.append(MergeCost(leaf.path, fmt, relative_error(merged, dense), relative_error(base.w, dense)))
    return tree.rebuild(made.get(id(leaf.value), leaf.value) for leaf in tree.leaves), MergeReport(tuple(costs))


def _requantized(dense: jax.Array, q: LoraArray, role: Role, into: Choice, path: str) -> Any:
    rounds = into == "base" and isinstance(q.w, ActivationArray)
    w = q.w.w if rounds else q.w
    wanted = _config_of(w, path) if into == "base" else None if into == "dense" else as_config(into)
    if wanted is None:
        return dense
    if wanted.axis is None:
        wanted = dataclasses.replace(wanted, axis=role.axis(wanted.scales_many_axes))
    made = quantize_stack(dense, wanted, q.ndim - q.left - q.right)
    sharding = getattr(w, "sharding", None) if isinstance(w, ImplicitArray) else None
    made = made if sharding is None else made.with_sharding(sharding)
    return q.w.around(made) if rounds else made


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
