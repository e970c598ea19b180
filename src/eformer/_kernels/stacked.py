"""Products with one matrix out of a stack: the layers of a scan, read where they lie.

The operands are those of a product, but codes and scale have one more axis in front, and an index says which entry is
meant. Kernels that take stacks add the index to their pointers. For all others, and wherever more than x differs from
one product to the next, the entry is taken out of the stack first, which is what a scan does on its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eformer import _stacks
from eformer._jax import avals

from .operation import Operation
from .parameters import Parameters, Problem
from .select import Candidate, always


def operands_of(parameters: Parameters, x: Any, codes: Any, *numbers: Any) -> list[Any] | None:
    """The stack of the codes, the index and the stacks of scales and what belongs to them, where these are noted to be
    slices of one entry."""
    found = [_stacks.place_of(array) for array in (codes, *numbers)]
    places = [place for place in found if place is not None]
    if len(places) < len(found) or parameters.by_scale or parameters.backward or avals.typed_by_a_mesh(x, codes):
        return None
    stack, *others = (place.stack for place in places)
    same = all(place.index is places[0].index for place in places)
    return [stack, places[0].index, *others] if same else None


def _taken(parameters: Parameters, codes: Any, index: Any, *rest: Any) -> list[Any]:
    """Codes, scale and its extras of the entry, and the scale of x, which is in no stack."""
    numbers, of_x = parameters.apart(rest)
    return [*(_entry(array, index) for array in (codes, *numbers)), *of_x]


def _entry(array: Any, index: Any) -> Any:
    return lax.dynamic_index_in_dim(array, index, keepdims=False)


def _types(parameters: Parameters, codes: Any, index: Any, *rest: Any) -> list[Any]:
    """As `_taken`, of types."""
    numbers, of_x = parameters.apart(rest)
    stored = [jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for array in (codes, *numbers)]
    return [*stored, *of_x]


def _reads_stacks(candidate: Candidate) -> Candidate:
    """The implementation for stacks: its own, or the one for single entries on what is taken out."""

    def run(problem: Problem, x: Any, codes: Any, index: Any, scale: Any = None, *rest: Any, **extras: Any) -> Any:
        if candidate.in_stack is not None and candidate.sees(problem) is problem:
            return candidate.in_stack(problem, x, codes, scale, *rest, index=index, **extras)
        taken = None if scale is None else _entry(scale, index)
        extras = {name: _entry(array, index) for name, array in extras.items()}
        problem, taken, extras = candidate.given(problem, taken, extras)
        return candidate.run(problem, x, _entry(codes, index), taken, *rest, **extras)

    def supports(problem: Problem) -> str | None:
        return (candidate.supports_in_stack or candidate.supports)(candidate.sees(problem))

    return dataclasses.replace(candidate, run=run, supports=supports, takes_scales=always)


def in_stack(product: Operation) -> Operation:
    """The operation on entries of stacks that belongs to a product."""

    def batch(again: Any, parameters: Parameters, operands: Any, dims: Any) -> tuple[Any, int]:
        x, codes, *rest = operands
        one_matrix = codes.ndim == parameters.format.core_ndim + 1
        if one_matrix and all(d is None for d in dims[1:]):
            return again(jnp.moveaxis(x, dims[0], 0), codes, *rest), 0

        def taken(x: Any, *stored: Any) -> Any:
            return product.bind(parameters, x, *_taken(parameters, *stored), announced=True)

        return jax.vmap(taken, in_axes=tuple(dims))(*operands), 0

    def arrange(run: Any, problem: Problem, x: Any, codes: Any, index: Any, *rest: Any) -> Any:
        def multiply(problem: Problem, x: Any, codes: Any, *rest: Any) -> Any:
            return run(problem, x, codes, index, *rest)

        return product.arrange(multiply, problem, x, codes, *rest)

    def correction(problem: Problem, x: Any, *stored: Any) -> jax.Array:
        assert product.correction is not None
        return product.correction(problem, x, *_taken(problem, *stored))

    return Operation(
        f"{product.name}_in_stack",
        ("x", "codes", "index", "scale"),
        result=lambda parameters, x, *stored: product.result(parameters, x, *_types(parameters, *stored)),
        problem=lambda parameters, platform, x, *stored: product.problem(
            parameters, platform, x, *_types(parameters, *stored)
        ),
        candidates=tuple(map(_reads_stacks, product.candidates)),
        batch=batch,
        split=lambda operation, problem, x, *stored: product.split(product, problem, x, *_taken(problem, *stored)),
        arrange=arrange,
        correction=correction,
    )
