"""What the kernels use of Pallas and Mosaic; differences between JAX releases end here."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

__all__ = ["can_permute", "compiler_params", "grid_spec", "pl", "precision", "scratch", "words"]

# Generations before the fifth have no permutation of sublanes by a vector of indices.
_WITHOUT_PERMUTES = ("TPU v2", "TPU v3", "TPU v4")


def compiler_params(*semantics: Literal["parallel", "arbitrary"]) -> Any:
    """`semantics` says of every grid axis whether its steps may run in any order ("parallel") or not ("arbitrary")."""
    return pltpu.CompilerParams(dimension_semantics=semantics)


def grid_spec(prefetched: int, **options: Any) -> Any:
    """A grid whose first operands are scalars the index maps can read."""
    return pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=prefetched, **options)


def scratch(shape: tuple[int, ...]) -> Any:
    return pltpu.VMEM(shape, jnp.float32)


def words(codes: jax.Array) -> jax.Array:
    """(4 n, lanes) bytes as (n, lanes) words: four rows become one, the first in the low byte. Costs nothing."""
    return pltpu.bitcast(codes, jnp.int32)


def can_permute() -> bool:
    """Of this machine's TPU; True where there is none, that is when a program is exported for another machine."""
    if jax.default_backend() != "tpu":
        return True
    return not jax.local_devices()[0].device_kind.startswith(_WITHOUT_PERMUTES)


def precision(asked: Any) -> lax.Precision:
    """Mosaic multiplies in one pass over bfloat16 or in as many as float32 needs; anything between gets the latter."""
    if asked is None:
        asked = jax.config.values["jax_default_matmul_precision"]
    levels = asked if isinstance(asked, tuple) else (asked,)
    fast = (None, "default", "bfloat16", "fastest", lax.Precision.DEFAULT)
    return lax.Precision.DEFAULT if all(level in fast for level in levels) else lax.Precision.HIGHEST
