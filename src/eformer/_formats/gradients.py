"""Who may be differentiated: a stored scale never, a factor multiplied into it always.

All values decoded from an array pass its scale, so it is enough to guard that. `q * a` multiplies the scale by `a`,
whose gradient is an ordinary one: the stored scale is guarded before the factor touches it, and their product is a
`FactoredScale`. In second derivatives of a product the gradient is refused.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from eformer._core import ImplicitArray
from eformer._jax import jaxprs, traces
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


class _Declined(Exception):
    """The quick product does not exist for these operands."""


def product(fast: Callable[..., Any], dense: Callable[..., Any], x: Any, q: Any, *rest: Any) -> Any:
    """`fast(x, q, *rest)`, whose derivative with respect to a factor in the scale of `q` is taken through `dense`.

    Both are linear in x and in the scale. `fast` keeps the codes and has a derivative in x only.
    """
    if not q.carries_factor:
        return fast(x, q, *rest)
    linear = [p.field for p in q.parts if p.is_scale or (p.is_offset and q.part(p) is not None)]
    stored = {p.field: getattr(q, p.field) for p in q.parts if p.field not in linear}

    # Everything traced is an argument: what a rule closes over may belong to a trace that is gone when it runs.
    @jax.custom_jvp
    def run(x: Any, factored: Any, stored: Any, rest: Any) -> Any:
        out = fast(x, q.replaced(**stored, **factored), *rest)
        if out is NotImplemented:
            raise _Declined
        return out

    def rule(primals: Any, tangents: Any) -> Any:
        x, factored, stored, rest = primals
        terms = []
        if not jaxprs.is_symbolic_zero(tangents[0]):
            terms.append(run(tangents[0], factored, stored, rest))
        if not all(map(jaxprs.is_symbolic_zero, tangents[1].values())):
            changes = {
                name: jnp.zeros_like(factored[name]) if jaxprs.is_symbolic_zero(tangent) else tangent
                for name, tangent in tangents[1].items()
            }
            terms.append(dense(x, q.with_factor(changes.pop(q.scale_part.field), **changes, **stored), *rest))
        y = run(*primals)
        return y, sum(terms[1:], terms[0]) if terms else jaxprs.symbolic_zero(jax.typeof(y))

    run.defjvp(rule, symbolic_zeros=True)
    try:
        return run(x, {p.field: q.part(p) for p in q.parts if p.field in linear}, stored, rest)
    except _Declined:
        return NotImplemented
