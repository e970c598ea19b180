"""Statistics in plain numpy, from inputs that a model's own code hands over."""

from __future__ import annotations

import numpy as np

RTOL = 1e-4


def check(use, xs, axes, stack=()):
    """`xs` are the inputs of every matrix of the stack, (stack..., tokens, K), in one array or one per batch."""
    xs = [np.asarray(x, np.float64) for x in (xs if isinstance(xs, list) else [xs])]
    moment = sum(np.swapaxes(x, -1, -2) @ x for x in xs)
    diagonal = np.diagonal(moment, axis1=-2, axis2=-1)
    assert use is not None
    assert (use.axes, use.stack) == (tuple(axes), tuple(stack))
    if use.moment is not None:
        np.testing.assert_allclose(use.moment, moment, rtol=RTOL, atol=RTOL * diagonal.max())
    np.testing.assert_allclose(use.diagonal, diagonal, rtol=RTOL, atol=1e-30)
    np.testing.assert_allclose(use.absmax, np.max([abs(x).max(-2) for x in xs], axis=0), rtol=RTOL)
    tokens = sum(x.shape[-2] for x in xs)
    np.testing.assert_array_equal(use.count, np.full(xs[0].shape[:-2], tokens))
