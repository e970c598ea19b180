"""What the tests of all frameworks share."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def close(found: Any, expected: Any, tol: float = 3e-5) -> None:
    """Equal trees of arrays, up to `tol` times the largest value of each (and a tenth of that of all).

    Some gradients are zero in theory, such as that of the bias of attention keys: they consist of rounding errors.
    """
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    floor = 0.1 * max(float(np.abs(np.asarray(leaf, np.float64)).max()) for leaf in jax.tree.leaves(expected))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=tol, atol=tol * max(float(np.abs(b).max()), floor))
