"""Pallas kernels for the TPU. Pallas is imported when the first of them is traced."""

from __future__ import annotations

from typing import Any

import jax

from ._refusals import chip_kind as chip_kind
from ._refusals import refuses_gather as refuses_gather
from ._refusals import refuses_platform as refuses_platform
from ._refusals import refuses_product as refuses_product


def qmatmul(problem: Any, x: jax.Array, codes: jax.Array, scale: Any = None, **options: Any) -> jax.Array:
    """The product of one problem, batch axes included."""
    from . import _products

    return _products.qmatmul(problem, x, codes, scale, **options)


def qragged(
    problem: Any, x: jax.Array, codes: jax.Array, group_sizes: jax.Array, scale: Any = None, **options: Any
) -> jax.Array:
    """Groups of rows of x (M, K), each times its own matrix; rows after the last group are zeros."""
    from . import _grouped

    return _grouped.qragged(problem, x, codes, group_sizes, scale, **options)


def qgather(problem: Any, codes: jax.Array, indices: jax.Array, scale: Any = None, **options: Any) -> jax.Array:
    """Decoded rows for indices (n,) inside the table."""
    from . import _lookup

    return _lookup.qgather(problem, codes, indices, scale, **options)
