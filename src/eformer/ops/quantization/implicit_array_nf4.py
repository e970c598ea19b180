"""4-bit NormalFloat arrays.

>>> import jax.numpy as jnp
>>> w = ArrayNF4.quantize(jnp.ones((128, 256)), block_size=64)
>>> w
ArrayNF4(float32[128,256], nf4, 4.50 bits per weight)
>>> (jnp.ones((32, 128)) @ w).shape
(32, 256)
"""

from __future__ import annotations

from typing import Any

import jax

from eformer._formats.families import documented_handlers
from eformer._formats.nf4.array import ArrayNF4 as ArrayNF4
from eformer._formats.training import straight_through_nf4 as straight_through_nf4


def safe_materialize(arr: Any) -> tuple[Any, bool]:
    """(dense array, True) for an `ArrayNF4`; anything else unchanged, and False."""
    return (arr.materialize(), True) if isinstance(arr, ArrayNF4) else (arr, False)


def safe_delete(arr: jax.Array | ArrayNF4 | Any, materialized: bool) -> None:
    """Does nothing: JAX frees arrays that are no longer referenced."""
    del arr, materialized


_handlers = documented_handlers("nf4", __name__)
globals().update(_handlers, __all__=["ArrayNF4", "safe_delete", "safe_materialize", "straight_through_nf4", *_handlers])
