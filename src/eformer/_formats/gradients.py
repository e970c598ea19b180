"""Who may be differentiated: a stored scale never, a factor multiplied into it always.

All values decoded from an array pass its scale, so it is enough to guard that. `q * a` multiplies the scale by `a`,
whose gradient is an ordinary one: the stored scale is guarded before the factor touches it, and their product is a
`FactoredScale`. Products take it with `by_scale`, and then have a derivative in their scale.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import numpy as np

from eformer._core import ImplicitArray
from eformer._jax import traces
from eformer._kernels.operation import NO_GRADIENT
from eformer.errors import QuantizedGradientError

_FACTORS = "\nA factor multiplied into the array counts as part of it; multiply the result of the product instead."


def frozen(scale: Any, fmt: str) -> Any:
    """The scale itself (or None), refusing to be differentiated.

    A scale that is not differentiated has no tangent, and the rule of a function of one argument is then never called.
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


@dataclasses.dataclass
class FactoredScale(ImplicitArray, frozen=True, warn_on_materialize=False):
    """A stored scale times a value of the program being traced, which may be differentiated.

    It lives inside a program only: rebuilt of an array that has been computed, it is an ordinary scale again.
    """

    value: jax.Array

    core_ndim: ClassVar[int | None] = 0

    @classmethod
    def tree_unflatten(cls, aux_data: Any, children: Iterable[Any]) -> Any:
        (value,) = children
        computed = isinstance(value, (jax.Array, np.ndarray)) and not isinstance(value, traces.Tracer)
        return value if computed else super().tree_unflatten(aux_data, (value,))

    def compute_shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    def compute_dtype(self) -> Any:
        return self.value.dtype

    def expanded(self) -> jax.Array:
        return self.value

    def materialize(self) -> jax.Array:
        return self.value
