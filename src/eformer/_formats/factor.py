"""Factors folded into a scale stay differentiable, although the scale itself is not.

`q * a` multiplies the scale by `a`. The gradient with respect to `a` is an ordinary one, so it must pass where that
of the stored scale is refused: the stored scale is guarded before the factor touches it, and the array carries a note
that its scale is no longer the stored one. Where the note is lost (in a function that was compiled for an array without
one), and in second derivatives of a product, the gradient is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from eformer import _jax as compat


class _Declined(Exception):
    """The quick product does not exist for these operands."""


def product(fast: Callable[..., Any], dense: Callable[..., Any], x: Any, q: Any, *rest: Any) -> Any:
    """`fast(x, q, *rest)`, whose derivative with respect to a factor in the scale of `q` is taken through `dense`.

    Both are linear in x and in the scale. `fast` keeps the codes and has a derivative in x only.
    """
    if not q.carries_factor:
        return fast(x, q, *rest)
    field = q.scale_part.field
    stored = {p.field: getattr(q, p.field) for p in q.parts if p.field != field}

    # Everything traced is an argument: what a rule closes over may belong to a trace that is gone when it runs.
    @jax.custom_jvp
    def run(x: Any, scale: Any, stored: Any, rest: Any) -> Any:
        out = fast(x, q.replaced(**stored, **{field: scale}, note=None), *rest)
        if out is NotImplemented:
            raise _Declined
        return out

    def rule(primals: Any, tangents: Any) -> Any:
        x, scale, stored, rest = primals
        terms = []
        if not compat.is_symbolic_zero(tangents[0]):
            terms.append(run(tangents[0], scale, stored, rest))
        if not compat.is_symbolic_zero(tangents[1]):
            terms.append(dense(x, q.replaced(**stored, **{field: tangents[1]}), *rest))
        y = run(*primals)
        return y, sum(terms[1:], terms[0]) if terms else compat.symbolic_zero(jax.typeof(y))

    run.defjvp(rule, symbolic_zeros=True)
    try:
        return run(x, q.part(q.scale_part), stored, rest)
    except _Declined:
        return NotImplemented
