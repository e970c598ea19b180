"""The best choice within a budget, against all choices there are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from eformer._calibrate import knapsack
from eformer._calibrate.knapsack import least_error


def best(errors: np.ndarray, costs: np.ndarray, budget: int) -> float | None:
    things, options = errors.shape
    fitting = [
        sum(errors[i, pick] for i, pick in enumerate(picks))
        for picks in itertools.product(range(options), repeat=things)
        if sum(costs[i, pick] for i, pick in enumerate(picks)) <= budget
    ]
    return min(fitting, default=None)


@pytest.mark.parametrize("seed", range(12))
def test_nothing_better_fits(seed: int):
    rng = np.random.default_rng(seed)
    things, options = rng.integers(1, 6), rng.integers(1, 5)
    errors, costs = rng.uniform(0, 1, (things, options)) ** 3, rng.integers(1, 60, (things, options)) * 7
    for budget in rng.integers(0, 60 * 7 * things, 5).tolist():
        picks = least_error(errors.tolist(), costs.tolist(), budget)
        wanted = best(errors, costs, budget)
        if wanted is None:
            assert picks is None
            continue
        assert picks is not None
        assert sum(costs[i, pick] for i, pick in enumerate(picks)) <= budget
        assert sum(errors[i, pick] for i, pick in enumerate(picks)) == pytest.approx(wanted)


def test_large_numbers_still_fit_and_are_nearly_the_best(monkeypatch: pytest.MonkeyPatch):
    """Costs without a common unit: the table is coarse, but the budget holds."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(10**6, 10**7, 60)
    bits = np.array([3.25, 4.5, 5.25, 8.0])
    costs = (sizes[:, None] * bits / 8).astype(int)
    errors = rng.uniform(0.1, 10, (60, 1)) * 4.0**-bits
    budget = int(sizes.sum() * 4.6 / 8)
    picks = least_error(errors.tolist(), costs.tolist(), budget)
    assert picks is not None
    found = sum(errors[i, pick] for i, pick in enumerate(picks))
    assert sum(costs[i, pick] for i, pick in enumerate(picks)) <= budget
    # No choice can be better than this bound: the Lagrangian at any price.
    bound = max(
        float((errors + price * costs).min(1).sum() - price * budget) for price in np.geomspace(1e-13, 1e-6, 400)
    )
    assert bound <= found <= 1.01 * bound
    monkeypatch.setattr(knapsack, "_UNITS", 64)
    coarse = least_error(errors.tolist(), costs.tolist(), budget)
    assert coarse is not None
    assert sum(costs[i, pick] for i, pick in enumerate(coarse)) <= budget
