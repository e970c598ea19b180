"""`plan_bits`: predicted errors against NumPy, budgets that hold, rules that `quantize_tree` takes, targets."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eformer as ef
from eformer._calibrate.bit_rules import kind_of, readable
from eformer._quantize.leaves import open_tree
from eformer._quantize.plan import Rules
from eformer._quantize.statistics import LeafStatistics, Statistics
from eformer.errors import CalibrationError, CalibrationWarning

FORMATS = ("int3", "nf4", "int8")


def params_of(seed: int = 0, layers: int = 3) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    layer = lambda: {  # noqa: E731
        "up": {"kernel": jnp.asarray(rng.standard_normal((64, 128)), jnp.float32)},
        "down": {"kernel": jnp.asarray(rng.standard_normal((128, 64)), jnp.float32)},
        "norm": {"scale": jnp.ones(64)},
    }
    return {"layers": [layer() for _ in range(layers)], "head": {"kernel": jnp.asarray(rng.standard_normal((64, 80)))}}


def stats_of(params: Any, seed: int = 1, *, diagonal_only: bool = False) -> Statistics:
    rng, found = np.random.default_rng(seed), {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if leaf.ndim == 2:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            x = rng.standard_normal((200, leaf.shape[0])) * rng.uniform(0.1, 3, leaf.shape[0]) * rng.uniform(0.5, 2)
            found[name] = LeafStatistics(
                leaf.shape,
                (0,),
                (),
                None if diagonal_only else x.T @ x,
                (x**2).sum(0),
                np.abs(x).max(0),
                np.asarray(200),
            )
    return Statistics(found)


@pytest.mark.parametrize("diagonal_only", [False, True])
def test_errors_are_those_of_the_products(diagonal_only: bool) -> None:
    params = params_of()
    stats = stats_of(params, diagonal_only=diagonal_only)
    plan = ef.plan_bits(params, stats, "6 bits", formats=("nf4", "int8"))
    dense = {leaf.path: leaf.value for leaf in open_tree(params).leaves}
    for leaf in plan.leaves:
        w = dense[leaf.path]
        e = np.asarray(ef.quantize(w, leaf.config).materialize() - w, np.float64)
        d = stats[leaf.path]
        h = np.diag(d.diagonal) if d.moment is None else d.moment
        w = np.asarray(w, np.float64)
        assert leaf.error == pytest.approx(np.trace(e.T @ h @ e) / np.trace(w.T @ h @ w), rel=1e-4), leaf.path


@pytest.mark.thorough
def test_errors_are_those_of_the_method() -> None:
    params = params_of(layers=1)
    stats = stats_of(params)
    rounded = ef.plan_bits(params, stats, "4.6 bits", formats=("int3", "nf4"))
    judged: list[Any] = []
    plan = ef.plan_bits(params, stats, "4.6 bits", formats=("int3", "nf4"), method="gptq", evaluate=judged.append)
    made = ef.quantize_tree(params, plan.rules, calibration=stats, method="gptq", donate=False, min_size=0)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.all(a == b)), judged[0], made))
    quantized = {leaf.path: leaf.value for leaf in open_tree(made).leaves}
    dense = {leaf.path: leaf.value for leaf in open_tree(params).leaves}
    for leaf, before in zip(plan.leaves, rounded.leaves, strict=True):
        w, h = np.asarray(dense[leaf.path], np.float64), np.asarray(stats[leaf.path].moment)
        e = np.asarray(quantized[leaf.path].materialize(), np.float64) - w
        np.testing.assert_allclose(leaf.error, np.sum(e * (h @ e)) / np.sum(w * (h @ w)), rtol=1e-3)
        assert leaf.error < before.error or leaf.config != before.config
    with pytest.raises(ValueError, match="needs statistics"):
        ef.plan_bits(params, None, "4.6 bits", method="gptq")


def test_stacks_and_several_uses() -> None:
    rng = np.random.default_rng(5)
    w = jnp.asarray(rng.standard_normal((2, 64, 64)), jnp.float32)
    x = rng.standard_normal((2, 300, 64)) * rng.uniform(0.1, 2, (2, 1, 64))
    moment = np.einsum("stk,stj->skj", x, x)
    stacked = LeafStatistics((2, 64, 64), (1,), (0,), moment, (x**2).sum(1), np.abs(x).max(1), np.full(2, 300.0))
    params = {"mlp": {"kernel": w}}
    plan = ef.plan_bits(params, Statistics({"mlp/kernel": stacked}), "5 bits", formats=("nf4",))
    e = np.asarray(ef.quantize_tree(params, plan.rules, donate=False)["mlp"]["kernel"].materialize() - w, np.float64)
    energy = lambda a: np.einsum("skn,skj,sjn->", a, moment, a)  # noqa: E731
    assert plan.leaves[0].error == pytest.approx(energy(e) / energy(np.asarray(w, np.float64)), rel=1e-4)


@pytest.mark.parametrize("budget", ["4.6 bits", 30_000, "0.0305 MB"])
def test_the_budget_holds_and_nothing_better_fits(budget: Any) -> None:
    params = params_of()
    stats = stats_of(params)
    plan = ef.plan_bits(params, stats, budget, formats=FORMATS)
    size = ef.size(params)
    limit = {"4.6 bits": 4.6 * size / 8, "0.0305 MB": 30_500}.get(budget, budget)
    made = ef.quantize_tree(params, plan.rules, donate=False)
    assert ef.report(made).nbytes == plan.nbytes <= limit
    assert ef.report(made).bits_per_weight == pytest.approx(plan.bits_per_weight)
    # every choice there is: errors and bytes by plans of one format
    alone = [{leaf.path: leaf for leaf in ef.plan_bits(params, stats, 10**9, formats=(f,)).leaves} for f in FORMATS]
    kept = plan.nbytes - sum(leaf.nbytes for leaf in plan.leaves)
    best = min(
        sum(o.error for o in chosen)
        for chosen in itertools.product(*[[table[leaf.path] for table in alone] for leaf in plan.leaves])
        if sum(o.nbytes for o in chosen) + kept <= limit
    )
    assert plan.error == pytest.approx(best)


def test_rules_are_for_people() -> None:
    params = params_of(layers=2)
    plan = ef.plan_bits(params, stats_of(params), 10**9, formats=FORMATS)
    assert plan.rules == {
        "head/kernel": "int8",
        "layers/*/down/kernel": "int8",
        "layers/*/up/kernel": "int8",
    }
    assert str(plan).splitlines()[0].split()[:3] == ["path", "format", "bits/weight"]
    assert "predicted error" in str(plan)
    dense = ef.plan_bits(params, stats_of(params), 10**9, formats=(None, "nf4"))
    assert set(dense.rules.values()) == {None}
    assert dense.error == 0
    assert kind_of("a1/2/3b/44") == "a1/*/3b/*"
    # a pattern that would match another kind gives way to paths
    clash = {"a/0/q": "nf4", "a/1/q": "nf4", "a/0/b/q": "int8"}
    rules = Rules(readable(clash))
    assert [str(rules.first(path).config.dtype) for path in clash] == list(clash.values())


def test_without_statistics_the_error_of_the_weights_counts() -> None:
    params = params_of()
    plan = ef.plan_bits(params, budget="4.6 bits", formats=FORMATS)
    report = {leaf.path: leaf for leaf in ef.report(ef.quantize_tree(params, plan.rules, donate=False), params).leaves}
    for leaf in plan.leaves:
        wanted = report[leaf.path].relative_error
        assert wanted is not None
        assert math.sqrt(leaf.error) == pytest.approx(wanted, rel=1e-4)
    some = Statistics({path: leaf for path, leaf in stats_of(params).items() if "up" in path})
    with pytest.warns(CalibrationWarning, match=r"nothing of 'head/kernel' \(and 3 more\)"):
        ef.plan_bits(params, some, budget="4.6 bits", formats=FORMATS)


def forward(params: Any, tokens: jax.Array) -> jax.Array:
    x = jax.nn.one_hot(tokens, 64)
    x = jnp.cumsum(x, axis=1)
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["up"]["kernel"] / 8) @ layer["down"]["kernel"] / 10
    return x @ params["head"]["kernel"] / 16


def test_targets_and_sensitivity_are_measured() -> None:
    params = params_of()
    tokens = np.random.default_rng(0).integers(0, 64, 129)
    judged = []

    def judge(p: Any) -> Any:
        judged.append(ef.report(p).nbytes)
        return ef.evaluate(forward, p, tokens, against=params, window=32)

    plan = ef.plan_bits(params, stats_of(params), "4.6 bits", formats=FORMATS, evaluate=judge)
    assert plan.measured is not None
    assert plan.measured.divergence is not None
    assert judged == [plan.nbytes]
    judged.clear()
    weighed = ef.plan_bits(params, stats_of(params), "4.6 bits", formats=FORMATS, evaluate=judge, sensitivity=True)
    assert len(judged) == 3 + 1  # up, down, head; the plan
    assert len({leaf.weight for leaf in weighed.leaves}) == 3
    wanted = 0.5 * (weighed.measured.change.value if weighed.measured and weighed.measured.change else 0)
    reached = ef.plan_bits(
        params, stats_of(params), target=f"+{100 * abs(wanted):.4f} % perplexity", formats=FORMATS, evaluate=judge
    )
    assert reached.measured is not None
    assert reached.measured.change is not None
    assert reached.measured.change.value <= abs(wanted) + 1e-9


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({}, ValueError, "either budget= or target="),
        ({"budget": "4 bits", "target": 0.1}, ValueError, "either budget= or target="),
        ({"target": 0.1}, ValueError, "needs evaluate="),
        ({"budget": "4.5 beans"}, ValueError, "4.25 bits"),
        ({"budget": "1 bits"}, ValueError, "too small: with the smallest"),
        ({"budget": 10**6, "formats": "nf4"}, ValueError, "a tuple of formats"),
        ({"target": "a bit", "evaluate": lambda p: None}, ValueError, "1 % perplexity"),
    ],
)
def test_bad_input(options: dict[str, Any], error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        ef.plan_bits(params_of(), stats_of(params_of()), **options)


def test_statistics_of_another_model() -> None:
    stats = stats_of(params_of())
    other = {"head/kernel": stats["layers/0/up/kernel"]}
    with pytest.raises(CalibrationError, match="another model"):
        ef.plan_bits({"head": params_of()["head"]}, other, "8 bits")
