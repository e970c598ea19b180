"""`add_lora`: adapters on the matrices of a model."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer._quantize.leaves import GROUPS, Leaf, Role, open_tree, roles_of
from eformer._quantize.plan import Rule, skipped_kinds
from eformer.errors import UnusedRuleWarning

from .array import LoraArray

Ranks = str | Iterable[str] | Mapping[str, int | None]


def add_lora(
    params: Any,
    rules: Ranks = "*",
    rank: int = 8,
    key: jax.Array | None = None,
    *,
    alpha: float | None = None,
    dtype: Any = jnp.float32,
    skip: Iterable[str] = tuple(GROUPS),
) -> Any:
    """Put a `LoraArray` around every matrix whose path matches. At first the model computes what it did before.

    Args:
        params: a model, quantized or not: any pytree, or a Flax NNX module.
        rules: a pattern, several, or ordered `pattern -> rank` (None: no adapter); the first match decides.
        rank: where `rules` give none.
        key: for the random factor, on the side of the input; the other starts at zero. Every path draws its own.
        alpha: updates are scaled by `alpha / rank`; by default by 1.
        dtype: of the factors.
        skip: groups of leaves that get none, as for `quantize_tree`; by default all but the kernels of layers.

    >>> add_lora({"q": jnp.ones((8, 4)), "k": jnp.ones((8, 4))}, "q", 2, jax.random.key(0))["q"].a.shape
    (8, 2)
    """
    if key is None:
        raise TypeError("add_lora needs key=, for example jax.random.key(0): one factor of every adapter is random.")
    _check_alpha(alpha)
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
                scale = 1.0 if alpha is None else alpha / size
                if id(value) not in made:
                    made[id(value)] = _adapted(leaf, role, size, key, scale, dtype)
                value = made[id(value)]
        results.append(value)
    unused = [rule.pattern for rule in ranks if rule.pattern not in used]
    if unused:
        near = ", ".join(repr(leaf.path) for leaf in tree.leaves[:3])
        warnings.warn(f"add_lora: {unused} match no matrix; paths look like {near}", UnusedRuleWarning, stacklevel=2)
    return tree.rebuild(results)


def _ranks(rules: Ranks, rank: int) -> dict[Rule, int | None]:
    pairs = [(rules, rank)] if isinstance(rules, str) else rules.items() if isinstance(rules, Mapping) else None
    ranks = {Rule(p, None): r for p, r in (pairs if pairs is not None else ((p, rank) for p in rules))}
    wrong = [r for r in ranks.values() if r is not None and (not isinstance(r, int) or isinstance(r, bool) or r < 1)]
    if wrong:
        raise ValueError(f"rank={wrong[0]!r} is not allowed; give a whole number, at least 1, or None for no adapter.")
    return ranks


def _check_alpha(alpha: Any) -> None:
    number = isinstance(alpha, (int, float, np.integer, np.floating)) and not isinstance(alpha, bool)
    if alpha is not None and not (number and math.isfinite(alpha)):
        raise ValueError(f"alpha={alpha!r} is not allowed; give a finite number, or None to scale updates by 1.")


def _can_have_one(leaf: Leaf, role: Role, skip: frozenset[str]) -> bool:
    value = leaf.value
    matrix = hasattr(value, "dtype") and hasattr(value, "shape") and len(value.shape) >= 2
    floating = matrix and jnp.issubdtype(value.dtype, jnp.floating)
    return floating and role.kind not in skip and not isinstance(value, LoraArray)


def _adapted(leaf: Leaf, role: Role, rank: int, key: jax.Array, scale: float, dtype: Any) -> LoraArray:
    value = leaf.value
    shape, input_first = tuple(value.shape), role.inputs[0] < role.outputs[0]
    # After both comes the window of a convolution (out, in, window...), which is summed over as the inputs are.
    inputs = (*role.inputs, *range(max(*role.inputs, *role.outputs) + 1, 0))
    first, second = (inputs, role.outputs) if input_first else (role.outputs, inputs)
    batch = len(shape) - len(first) - len(second)
    a, b = (*shape[: batch + len(first)], rank), (*shape[:batch], rank, *shape[batch + len(first) :])
    fan_in = math.prod(shape[axis] for axis in inputs)
    # A key of the leaf's own path, so that it does not depend on which other leaves have adapters.
    own = jax.random.fold_in(key, zlib.crc32(leaf.path.encode()))
    random = jax.random.normal(own, a if input_first else b, dtype) / math.sqrt(max(fan_in, 1))
    zeros = jnp.zeros(b if input_first else a, dtype)
    a, b = (random, zeros) if input_first else (zeros, random)
    return LoraArray(value, a, b, scale, len(first), len(second))
