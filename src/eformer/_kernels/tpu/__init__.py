"""Pallas kernels for the TPU. Pallas is imported when the first of them is traced."""

from __future__ import annotations

from typing import Any

import jax

from eformer import _settings

from ._refusals import chip_kind, refuses_platform
from ._refusals import refuses_gather as refuses_gather
from ._refusals import refuses_product as refuses_product
from ._refusals import refuses_ragged as refuses_ragged


def qmatmul(problem: Any, x: jax.Array, codes: jax.Array, scale: jax.Array | None, **options: Any) -> jax.Array:
    """The product of one problem, batch axes included."""
    from . import _products

    return _products.qmatmul(problem, x, codes, scale, **options)


def qragged(
    problem: Any, x: jax.Array, codes: jax.Array, scale: jax.Array | None, group_sizes: jax.Array, **options: Any
) -> jax.Array:
    """Groups of rows of x (M, K), each times its own matrix; rows behind the last group give zeros."""
    from . import _grouped

    return _grouped.qragged(problem, x, codes, scale, group_sizes, **options)


def qgather(problem: Any, codes: jax.Array, scale: jax.Array | None, indices: jax.Array, **options: Any) -> jax.Array:
    """Decoded rows for indices (n,) inside the table."""
    from . import _lookup

    return _lookup.qgather(problem, codes, scale, indices, **options)


def state() -> dict[str, Any]:
    """What `doctor` says of these kernels. There is no library to load: Pallas compiles them with the program."""
    found: dict[str, Any] = {"backend": "tpu", "path": None, "instructions": None}
    if not _settings.kernels_enabled():
        return {**found, "state": "turned off (EFORMER_KERNELS)"}
    if jax.default_backend() != "tpu":
        return {**found, "state": "there is no such device"}
    return {**found, "instructions": chip_kind(), "state": refuses_platform("tpu") or "compiled by Pallas"}
