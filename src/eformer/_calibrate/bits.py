"""`plan_bits`: the format of every leaf, so that the error of a model's products is least within a budget.

The error of a leaf in a format is that of its products, relative to them: with E = Q(W) - W, and H the second moment of
what the leaf was multiplied with in a calibration, trace(Eᵀ H E) / trace(Wᵀ H W). The error of a model is their sum,
each times how much the output depends on it, where that was measured. That errors of leaves add up is a model of what
happens, good as long as they are small.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from eformer import _table
from eformer._core import materialize
from eformer._quantize.config import QuantizationConfig, check_method
from eformer._quantize.leaves import nbytes_of, open_tree
from eformer._quantize.methods import choose
from eformer._quantize.plan import MIN_SIZE, SKIP, Choice, Decision, plan
from eformer._quantize.statistics import LeafStatistics, check_statistics
from eformer.errors import CalibrationWarning

from .bit_rules import bytes_of, fraction, kind_of, named, readable, short
from .evaluate import Evaluation
from .knapsack import least_error
from .product_error import error_of

# From 3.25 bits on: what is smaller needs training.
FORMATS: tuple[Choice, ...] = (
    {"dtype": "int3", "block_size": 128},
    "int3",
    {"dtype": "nf4", "double_quant": True},
    "nf4",
    {"dtype": "int5", "block_size": 128},
    {"dtype": "int6", "block_size": 128},
    "int8",
)
Judge = Callable[[Any], Evaluation]
_TRIES = 6  # of budgets, where a target is asked for


@dataclasses.dataclass(frozen=True)
class LeafBits:
    """One leaf: what was chosen for it, its bytes, and the error that is predicted for it."""

    path: str
    config: QuantizationConfig | None
    nbytes: int
    size: int
    error: float
    weight: float

    @property
    def bits(self) -> float:
        return 8 * self.nbytes / max(self.size, 1)


@dataclasses.dataclass(frozen=True)
class BitPlan:
    """What `plan_bits` chose. `rules` are for `quantize_tree(params, plan.rules)`; edit them as you like.

    `error` is the predicted one, the sum over leaves. `measured` is what `evaluate` found for the quantized model.
    """

    rules: dict[str, Choice]
    leaves: tuple[LeafBits, ...]
    nbytes: int
    bits_per_weight: float
    measured: Evaluation | None = None

    @property
    def error(self) -> float:
        return math.fsum(leaf.error * leaf.weight for leaf in self.leaves)

    def __str__(self) -> str:
        total = sum(leaf.error * leaf.weight for leaf in self.leaves) or 1.0
        rows = [
            [leaf.path, named(leaf.config), f"{leaf.bits:.2f}", f"{leaf.nbytes:,}", f"{math.sqrt(leaf.error):.4f}"]
            + [f"{leaf.error * leaf.weight / total:.1%}"]
            for leaf in self.leaves
        ]
        columns = ("path", "format", "bits/weight", "bytes", "rel. error of products", "share")
        last = [f"{self.nbytes:,} bytes, {self.bits_per_weight:.3f} bits per weight, predicted error {self.error:.4g}"]
        return "\n".join(
            [*_table.lines(columns, rows), *last, *([] if self.measured is None else [str(self.measured)])]
        )


def plan_bits(
    params: Any,
    stats: Mapping[str, LeafStatistics] | None = None,
    budget: int | str | None = None,
    *,
    formats: Sequence[Choice] = FORMATS,
    target: str | float | None = None,
    evaluate: Judge | None = None,
    sensitivity: bool = False,
    method: str | None = None,
    min_size: int = MIN_SIZE,
    skip: Iterable[str] = SKIP,
) -> BitPlan:
    """Choose the format of every leaf so that the predicted error is least within a budget.

    Args:
        params: the dense model, as `quantize_tree` takes it; nothing of it is freed.
        stats: what `calibrate` found. Without it, or for leaves it does not have, the error of the weights counts.
        budget: of the whole model, with what stays dense: "4.25 bits" (per weight), a number of bytes, or "2.1 GB".
        formats: to choose from: names, configurations, or None to keep a leaf dense.
        target: instead of a budget, how much larger the perplexity may be: "+1 % perplexity" or 0.01. The smallest of a
            few budgets that reach it is taken, by what `evaluate` measures.
        evaluate: a function of quantized parameters, such as `lambda p: ef.evaluate(forward, p, tokens,
            against=params)`; the plan then has what it `measured`.
        sensitivity: measure with `evaluate` how much the output depends on leaves of each kind (leaves whose paths
            differ in numbers only), one run for each, and weigh their errors by it.
        method: count the errors that this method of `quantize_tree` leaves, with `stats`; by default those of rounding,
            which take less time. Give `quantize_tree` the same one.
        min_size: as in `quantize_tree`.
        skip: as in `quantize_tree`.

    >>> params = {"a": {"kernel": jnp.eye(64)}, "b": {"kernel": jnp.sin(jnp.arange(4096.0)).reshape(64, 64)}}
    >>> plan_bits(params, budget="6.5 bits", formats=("nf4", "int8")).rules
    {'a/kernel': 'nf4', 'b/kernel': 'int8'}
    """
    looks_like_budget = isinstance(stats, (str, int, float)) and budget is None and target is None
    named_so = f"{stats} bits" if isinstance(stats, float) else stats
    meant = f"The second argument is the statistics; pass the budget by name: plan_bits(params, budget={named_so!r})."
    check_statistics(stats, "stats", meant if looks_like_budget else "")
    if (budget is None) == (target is None):
        raise ValueError("give either budget= or target=, not both and not neither.")
    if evaluate is None and (target is not None or sensitivity):
        raise ValueError("a target or sensitivity=True needs evaluate=, a function of quantized parameters.")
    check_method(method)
    table = _Table(params, stats, formats, min_size, skip, method or "round")
    if sensitivity and evaluate is not None:
        table.weigh(evaluate)
    if budget is not None:
        chosen = table.plan(bytes_of(budget, table.size))
        return chosen if evaluate is None else dataclasses.replace(chosen, measured=evaluate(table.made(chosen)))
    assert evaluate is not None
    return _smallest(table, fraction(target), evaluate)


def _smallest(table: _Table, wanted: float, judge: Judge) -> BitPlan:
    """The plan of the least budget whose measured change is at most `wanted`, by bisection between the ends."""

    def measured(budget: int) -> BitPlan:
        chosen = table.plan(budget)
        return dataclasses.replace(chosen, measured=judge(table.made(chosen)))

    def change(chosen: BitPlan) -> float:
        if chosen.measured is None or chosen.measured.change is None:
            raise ValueError("evaluate must compare with a reference: give it `against=`.")
        return chosen.measured.change.value

    low, high = table.ends
    best = measured(high)
    if not change(best) <= wanted:
        raise ValueError(
            f"no choice of these formats reaches the target: with the largest of them the perplexity changes by "
            f"{change(best):+.2%}, and {wanted:+.2%} was requested. Give larger formats, or include None."
        )
    for _ in range(_TRIES):
        middle = (low + high) // 2
        tried = measured(middle)
        if change(tried) <= wanted:
            best, high = tried, tried.nbytes
        else:
            low = middle
    return best


class _Table:
    """Bytes and errors of every leaf in every format."""

    def __init__(self, params: Any, stats: Any, formats: Any, min_size: int, skip: Iterable[str], method: str):
        if isinstance(formats, (str, Mapping, QuantizationConfig)) or not len(formats):
            raise ValueError(f"formats={formats!r} is not a choice; give a tuple of formats.")
        self.tree, self.weights = open_tree(params), {}
        options: dict[str, Any] = {"min_size": min_size, "skip": tuple(skip)}
        plans = [plan(self.tree.leaves, default=f, **options).decisions for f in formats if f is not None]
        makers = _makers(plans, stats, method)
        first: dict[int, str] = {}
        self.rows: list[_Row] = []
        self.kept, self.size = 0, 0
        unknown = []
        for number, leaf in enumerate(self.tree.leaves):
            if not hasattr(leaf.value, "shape") or first.setdefault(id(leaf.value), leaf.path) != leaf.path:
                continue  # tied weights count once
            self.size += math.prod(leaf.value.shape)
            decided = [
                (decisions[number], make[leaf.path])
                for decisions, make in zip(plans, makers, strict=True)
                if decisions[number].config is not None
            ]
            dense = sum(nbytes_of(x) for x in jax.tree.leaves(leaf.value))
            if not decided:
                self.kept += dense
                continue
            found = None if stats is None else stats.get(leaf.path)
            if stats is not None and found is None:
                unknown.append(leaf.path)
            self.rows.append(_row(decided, found, dense if None in tuple(formats) else None))
        if not self.rows:
            raise ValueError("nothing can be quantized; plan_tree(params) says why each leaf stays dense.")
        if unknown:
            more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
            what = f"the statistics have nothing of {unknown[0]!r}{more}: the error of its weights counts instead."
            warnings.warn(what, CalibrationWarning, stacklevel=4)
        self.weights = dict.fromkeys((row.path for row in self.rows), 1.0)

    @property
    def ends(self) -> tuple[int, int]:
        """The smallest and the largest number of bytes that a plan can have."""
        return tuple(self.kept + sum(pick(o.nbytes for o in row.options) for row in self.rows) for pick in (min, max))  # pyright: ignore[reportReturnType]

    def plan(self, budget: int) -> BitPlan:
        errors = [[o.error * self.weights[row.path] for o in row.options] for row in self.rows]
        costs = [[o.nbytes for o in row.options] for row in self.rows]
        picks = least_error(errors, costs, budget - self.kept)
        if picks is None:
            least = self.ends[0]
            raise ValueError(
                f"the budget of {budget:,} bytes ({8 * budget / self.size:.3f} bits per weight) is too small: with "
                f"the smallest formats the model has {least:,} bytes ({8 * least / self.size:.3f} bits per weight)."
            )
        return self._plan([row.options[i] for row, i in zip(self.rows, picks, strict=True)])

    def _plan(self, options: Sequence[_Option]) -> BitPlan:
        leaves = tuple(
            LeafBits(row.path, option.config, option.nbytes, row.size, option.error, self.weights[row.path])
            for row, option in zip(self.rows, options, strict=True)
        )
        nbytes = self.kept + sum(leaf.nbytes for leaf in leaves)
        chosen = {leaf.path: option.choice for leaf, option in zip(leaves, options, strict=True)}
        return BitPlan(readable(chosen), leaves, nbytes, 8 * nbytes / self.size)

    def made(self, chosen: BitPlan, only: str | None = None) -> Any:
        """The model in the formats of a plan; of one kind of leaf alone if it is named."""
        picked = {leaf.path: leaf.config for leaf in chosen.leaves if only is None or kind_of(leaf.path) == only}
        makers = {row.path: {o.config: o.make for o in row.options} for row in self.rows}
        made: dict[int, Any] = {}
        for leaf in self.tree.leaves:
            config = picked.get(leaf.path)
            if config is not None:
                made[id(leaf.value)] = makers[leaf.path][config](jnp.asarray(leaf.value))
        return self.tree.rebuild(made.get(id(leaf.value), leaf.value) for leaf in self.tree.leaves)

    def weigh(self, judge: Judge) -> None:
        """Set the weights: the divergence that leaves of one kind cause, by the sum of their errors."""
        coarse = self._plan([max(row.options, key=lambda o: o.error) for row in self.rows])
        for kind in dict.fromkeys(kind_of(row.path) for row in self.rows):
            found = judge(self.made(coarse, kind))
            if found.divergence is None:
                raise ValueError("evaluate must compare with a reference: give it `against=`.")
            errors = math.fsum(leaf.error for leaf in coarse.leaves if kind_of(leaf.path) == kind)
            weight = max(found.divergence.value, 0.0) / errors if errors else 1.0
            self.weights |= {row.path: weight for row in self.rows if kind_of(row.path) == kind}


@dataclasses.dataclass(frozen=True)
class _Option:
    choice: Choice
    config: QuantizationConfig | None
    nbytes: int
    error: float
    make: Callable[[jax.Array], Any] = materialize


@dataclasses.dataclass(frozen=True)
class _Row:
    path: str
    size: int
    options: tuple[_Option, ...]


def _makers(plans: Sequence[Sequence[Decision]], stats: Any, method: str) -> list[dict[str, Callable[..., Any]]]:
    """For every format, what quantizes a leaf by its path."""
    found = []
    for number, decisions in enumerate(plans):
        with warnings.catch_warnings():
            if number:  # said of the first format already
                warnings.simplefilter("ignore", CalibrationWarning)
            chosen = choose(decisions, None if method == "round" else stats, method)
        makers: dict[str, Callable[..., Any]] = {}
        for decision in decisions:
            if decision.config is not None:
                how = chosen[decision.leaf.path]
                makers[decision.leaf.path] = functools.partial(how.encode, config=decision.config, decision=decision)
        found.append(makers)
    return found


def _row(decided: Sequence[tuple[Decision, Any]], stats: LeafStatistics | None, dense: int | None) -> _Row:
    leaf = decided[0][0].leaf
    w = jnp.asarray(leaf.value)
    measure = error_of(w, stats, leaf.path)
    options = [] if dense is None else [_Option(None, None, dense, 0.0)]
    for decision, make in decided:
        assert decision.config is not None
        q = make(w)
        error = measure(materialize(q))
        if not math.isfinite(error):
            raise ValueError(f"{leaf.path!r} is not finite, or too large, as {decision.config.dtype}.")
        nbytes = sum(nbytes_of(x) for x in jax.tree.leaves(q))
        options.append(_Option(short(decision.config), decision.config, nbytes, error, make))
    return _Row(leaf.path, math.prod(leaf.value.shape), tuple(options))
