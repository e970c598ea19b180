"""Readable twins of the methods, in NumPy, for NF4."""

from __future__ import annotations

import numpy as np

from eformer._formats.nf4.codec import CODEBOOK
from eformer._quantize.methods import gptq
from eformer._quantize.methods.grids import GridNF4
from eformer._quantize.methods.matrices import RIDGE


def nearest(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The values of NF4 nearest to x."""
    table = CODEBOOK.astype(np.float64)
    return table[np.argmin(np.abs(x[..., None] / scale[..., None] - table), axis=-1)] * scale


def twin_scale(w: np.ndarray, diagonal: np.ndarray, block: int) -> np.ndarray:
    """The absmax of every block, by trying the candidates one by one, and then the least squares."""
    weights = diagonal / diagonal.mean() + 0.01
    scales = np.zeros((len(w) // block, w.shape[1]))
    for g in range(len(w) // block):
        for n in range(w.shape[1]):
            x, h = w[g * block : (g + 1) * block, n], weights[g * block : (g + 1) * block]

            def loss(scale: float, x: np.ndarray = x, h: np.ndarray = h) -> float:
                return float(np.sum(h * (x - nearest(x, np.full_like(x, scale))) ** 2))

            tried = [np.abs(x).max() * ratio for ratio in (1.0, *GridNF4.ratios)]
            best = min(tried, key=loss)
            for _ in range(2):
                units = nearest(x, np.full_like(x, best)) / best
                best = min(best, np.sum(h * units * x) / np.sum(h * units * units), key=loss)
            scales[g, n] = best
    return scales


def twin_shrunk(moment: np.ndarray, tokens: int) -> np.ndarray:
    """Correlations made smaller, by the share of their squares that is chance."""
    active = np.flatnonzero(np.diag(moment) > 0)
    k, chance, found = len(active), 0.0, 0.0
    for i in active:
        for j in active[active != i]:
            square = moment[i, j] ** 2 / (moment[i, i] * moment[j, j])
            chance += (1 - square) ** 2 * (tokens + 2) / (tokens**2 - 1)
            found += square
    share = min(1.0, max(chance / found, (k / (k + tokens)) ** 2))
    return (1 - share) * moment + share * np.diag(np.diag(moment))


def twin_gptq(w: np.ndarray, moment: np.ndarray, tokens: int, scales: np.ndarray, block: int) -> np.ndarray:
    """Rows in the order of their inputs; each error goes to the rows that are left, by the inverse of what is left."""
    w, k = w.copy(), len(w)
    moment = twin_shrunk(moment, tokens)
    damped = moment + gptq.DAMPING * np.mean(np.diag(moment)) * np.eye(k)
    left = list(np.argsort(-np.diag(moment), kind="stable"))
    made = np.zeros_like(w)
    while left:
        inverse = np.linalg.inv(damped[np.ix_(left, left)])
        row, left = left[0], left[1:]
        made[row] = nearest(w[row], scales[row // block])
        for place, other in enumerate(left):
            w[other] -= inverse[0, place + 1] / inverse[0, 0] * (w[row] - made[row])
    return made


def twin_damped(moment: np.ndarray, tokens: int) -> np.ndarray:
    moment = twin_shrunk(moment, tokens)
    return moment / np.mean(np.diag(moment)) + gptq.DAMPING * np.eye(len(moment))


def twin_costs(h: np.ndarray) -> np.ndarray:
    """What an error of an input costs where those after it, in the order of `twin_gptq`, make up for what they can."""
    left, costs = list(np.argsort(-np.diag(h), kind="stable")), np.zeros(len(h))
    while left:
        costs[left[0]] = 1 / np.linalg.inv(h[np.ix_(left, left)])[0, 0]
        left = left[1:]
    return costs


def twin_refit(w: np.ndarray, h: np.ndarray, made: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each output the scales of its blocks that leave the least error, and hardly more than is needed."""
    block = len(w) // len(scales)
    better, moved = made.copy(), scales.copy()
    for n in range(w.shape[1]):
        units = np.zeros((len(w), len(scales)))
        for g in range(len(scales)):
            units[g * block : (g + 1) * block, g] = made[g * block : (g + 1) * block, n] / scales[g, n]
        a = units.T @ h @ units
        a += RIDGE * np.diag(np.diag(a))
        moved[:, n] += np.linalg.solve(a, units.T @ h @ (w[:, n] - made[:, n]))
        better[:, n] = units @ moved[:, n]
    return better, moved


def twin_revisit(w: np.ndarray, h: np.ndarray, made: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Row by row, of all values of the format the one with which the outputs have the least error."""
    made, block = made.copy(), len(w) // len(scales)
    for k in range(len(w)):
        for n in range(w.shape[1]):
            off, tried = made[:, n] - w[:, n], CODEBOOK.astype(np.float64) * scales[k // block, n]
            errors = []
            for value in tried:
                off[k] = value - w[k, n]
                errors.append(off @ h @ off)
            made[k, n] = tried[np.argmin(errors)]
    return made
