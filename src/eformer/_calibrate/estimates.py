"""Means over the tokens of a text, each with its error of estimation."""

from __future__ import annotations

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A value and its standard error; the error is None where one window says nothing of it."""

    value: float
    error: float | None = None

    def __str__(self) -> str:
        return self.text()

    def text(self, digits: int = 4, percent: bool = False, sign: bool = False) -> str:
        """
        >>> Estimate(0.0424, 0.0031).text(2, percent=True, sign=True), str(Estimate(16.98))
        ('+4.24% ± 0.31%', '16.9800')
        """
        kind = "%" if percent else "f"
        shown = f"{self.value:{'+' if sign else ''}.{digits}{kind}}"
        return shown if self.error is None else f"{shown} ± {self.error:.{digits}{kind}}"


def mean_of(sums: np.ndarray, counts: np.ndarray) -> Estimate:
    """The mean per token of windows with these sums and numbers of tokens.

    Tokens of one window depend on each other, so windows are the samples: the error is that of a ratio of two sums
    over them, which needs no more than that windows are independent.

    >>> mean_of(np.array([2.0, 4.0]), np.array([2, 2]))
    Estimate(value=1.5, error=0.5)
    """
    total, windows = counts.sum(), len(counts)
    mean = float(sums.sum() / total)
    if windows < 2:
        return Estimate(mean)
    spread = np.square(sums - mean * counts).sum() * windows / (windows - 1)
    return Estimate(mean, float(np.sqrt(spread) / total))


def exponential(of: Estimate, less: float = 0.0) -> Estimate:
    """exp of an estimate minus a number, the error carried along to first order.

    >>> exponential(Estimate(0.0, 0.1), less=1.0)
    Estimate(value=0.0, error=0.1)
    """
    grown = math.inf if of.value > 700 else math.exp(of.value)
    return Estimate(grown - less, None if of.error is None else grown * of.error)
