"""Values that may be used but not differentiated: what is decoded from codes and scales."""

from __future__ import annotations

import functools
from typing import Any

import jax

from eformer._kernels.operation import NO_GRADIENT
from eformer.errors import QuantizedGradientError

_FACTORS = "\nA factor multiplied into the array counts as part of it; multiply the result of the product instead."


def frozen(scale: Any, fmt: str) -> Any:
    """The scale itself (or None), refusing to be differentiated.

    All values decoded from an array pass its scale, so it is enough to guard that. A scale nobody differentiates has
    no tangent, and the rule of a function of one argument is then never asked.
    """
    return None if scale is None else _guard(fmt)(scale)


def refusal(fmt: str) -> QuantizedGradientError:
    return QuantizedGradientError(NO_GRADIENT.format(what="values", fmt=fmt) + _FACTORS)


@functools.cache
def _guard(fmt: str) -> Any:
    @jax.custom_jvp
    def frozen_scale(scale: jax.Array) -> jax.Array:
        return scale

    @frozen_scale.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise refusal(fmt)

    return frozen_scale
