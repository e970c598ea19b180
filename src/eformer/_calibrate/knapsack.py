"""One choice for each of several things, so that the sum of their errors is least and that of their costs fits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_UNITS = 1 << 16  # of the budget, in the exact solution: where costs have no unit this large in common, less exact


def least_error(errors: Sequence[Sequence[float]], costs: Sequence[Sequence[int]], budget: int) -> list[int] | None:
    """The number of the choice for each thing; None if the budget is too small for any.

    Lagrange multipliers give choices that are the best for what they cost; dynamic programming then fills the budget.
    It is exact where costs differ by multiples of 1/65536 of what is left above the cheapest choices. The better of
    both is taken, so nothing is lost where it is not.

    >>> least_error([[9.0, 1.0], [5.0, 0.0]], [[1, 4], [1, 3]], budget=5)
    [1, 0]
    """
    least = sum(min(row) for row in costs)
    if least > budget:
        return None
    found = [_by_multipliers(errors, costs, budget), _by_table(errors, costs, budget - least)]
    return min(found, key=lambda picks: (_total(errors, picks), _total(costs, picks)))


def _total(rows: Sequence[Sequence[float]], picks: Sequence[int]) -> float:
    return math.fsum(row[i] for row, i in zip(rows, picks, strict=True))


def _by_multipliers(errors: Sequence[Sequence[float]], costs: Sequence[Sequence[int]], budget: int) -> list[int]:
    """The least price of a unit of cost at which everything fits, by bisection."""

    def picks(price: float) -> list[int]:
        return [
            min(range(len(row)), key=lambda i, row=row, cost=cost: (row[i] + price * cost[i], cost[i]))
            for row, cost in zip(errors, costs, strict=True)
        ]

    if _total(costs, free := picks(0.0)) <= budget:
        return free
    low, high = 0.0, 1e-12
    while _total(costs, picks(high)) > budget:
        low, high = high, high * 4
        if high > 1e30:
            return [int(np.argmin(cost)) for cost in costs]
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _total(costs, picks(middle)) <= budget else (middle, high)
    return picks(high)


def _by_table(errors: Sequence[Sequence[float]], costs: Sequence[Sequence[int]], slack: int) -> list[int]:
    """`best[s]` is the least error of the things so far for at most s units above the cheapest choices."""
    extra = [[cost - min(row) for cost in row] for row in costs]
    unit = max(math.gcd(*(value for row in extra for value in row)), 1)
    if slack // unit > _UNITS:
        unit = -(-slack // _UNITS)
    room = slack // unit
    best, chosen = np.zeros(room + 1), []
    for row, cost in zip(errors, extra, strict=True):
        options = []
        for error, value in zip(row, cost, strict=True):
            units = -(-value // unit)  # rounded up: what is chosen fits
            taken = np.full(room + 1, np.inf)
            if units <= room:
                taken[units:] = best[: room + 1 - units] + error
            options.append(taken)
        table = np.stack(options)
        pick = np.argmin(table, axis=0)
        best = table[pick, np.arange(room + 1)]
        chosen.append((pick.astype(np.int16), [-(-value // unit) for value in cost]))
    picks, left = [], room
    for pick, units in reversed(chosen):
        picks.append(int(pick[left]))
        left -= units[picks[-1]]
    return picks[::-1]
