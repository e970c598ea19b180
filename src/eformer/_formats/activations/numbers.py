"""The numbers of an `ActivationArray`, one for each matrix of a stack, follow the weight through operations.

They have one axis for every axis of the weight, of size 1 where one number serves all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..shapes import reshape_groups
from ..wrapped import gathered, taken

FIELDS = ("x_scale", "seed")
Followed = dict[str, Any] | None  # the numbers of a result by field; None: it is not to be wrapped again


def follow(name: str, operands: Sequence[Any], results: Sequence[Any], params: dict[str, Any]) -> list[Followed]:
    """The numbers of every result of a primitive; None where its operands do not agree."""
    arrays = [a for a in operands if hasattr(a, "core_ndim")]
    settings = [(getattr(a, "activations", None), getattr(a, "backward", None)) for a in arrays]
    kept: list[Followed] = [{} for _ in results]
    if len(set(settings)) > 1:
        return [None for _ in results]
    for field in FIELDS:
        numbers = [getattr(a, field) for a in arrays]
        if all(n is None for n in numbers):
            continue
        if any(n is None for n in numbers):
            return [None for _ in results]
        for i, made in enumerate(_moved(name, numbers, arrays, operands, results, params)):
            found = kept[i]
            kept[i] = None if made is None or found is None else {**found, field: made}
    return kept


def _moved(name: str, numbers: Any, arrays: Any, operands: Any, results: Any, params: dict[str, Any]) -> list[Any]:
    n, q = numbers[0], arrays[0]
    if name in _JOINS:
        return [_JOINS[name](numbers, results[0], operands, params)]
    if n.size == 1:
        return [n.reshape((1,) * r.ndim) for r in results]
    if name == "split":
        cuts = itertools.accumulate((0, *params["sizes"]))
        whole = n.shape[params["axis"]] == 1
        return [
            n if whole else lax.slice_in_dim(n, low, high, axis=params["axis"])
            for low, high in itertools.pairwise(cuts)
        ]
    if name in _MOVES:
        return [_MOVES[name](n, q, operands, params)]
    return [n if r.shape == q.shape else None for r in results]


def _join(numbers: Sequence[jax.Array], result: Any, at: int, pieces: Sequence[int]) -> jax.Array:
    """Matrices of a stack keep theirs; what makes up one matrix gets the largest."""
    if at >= result.ndim - 2:
        return (
            jnp.stack(numbers).max(0)
            if len({n.shape for n in numbers}) == 1
            else jnp.stack([n.max() for n in numbers]).max().reshape((1,) * result.ndim)
        )
    wide = [
        jnp.broadcast_to(n, [*n.shape[:at], size, *n.shape[at + 1 :]]) for n, size in zip(numbers, pieces, strict=True)
    ]
    shape = [max(sizes) for sizes in zip(*(n.shape for n in wide), strict=True)]
    return lax.concatenate([jnp.broadcast_to(n, [*shape[:at], n.shape[at], *shape[at + 1 :]]) for n in wide], at)


def _concatenated(numbers: Any, result: Any, operands: Any, params: dict[str, Any]) -> jax.Array:
    at = params["dimension"]
    return _join(numbers, result, at, [a.shape[at] for a in operands])


def _stacked(numbers: Any, result: Any, operands: Any, params: dict[str, Any]) -> jax.Array:
    at = params["axis"]
    return _join([jnp.expand_dims(n, at) for n in numbers], result, at, [1] * len(numbers))


def _selected(numbers: Any, result: Any, operands: Any, params: dict[str, Any]) -> Any:
    return lax.select_n(operands[0], *numbers) if len({n.shape for n in numbers}) == 1 else None


def _broadcast(n: jax.Array, q: Any, operands: Any, params: dict[str, Any]) -> jax.Array:
    dims, shape = params["broadcast_dimensions"], [1] * len(params["shape"])
    for i, at in enumerate(dims):
        shape[at] = n.shape[i]
    return lax.broadcast_in_dim(n, shape, dims)


def _reshaped(n: jax.Array, q: Any, operands: Any, params: dict[str, Any]) -> Any:
    groups, new = reshape_groups(q.shape, params["new_sizes"]), params["new_sizes"]
    if groups is None:
        return None
    sizes = [1] * len(new)
    for old_axes, new_axes in groups:
        held = [n.shape[a] for a in old_axes]
        if held == [q.shape[a] for a in old_axes]:
            for a in new_axes:
                sizes[a] = new[a]
        elif any(size != 1 for size in held):
            return None
    return n.reshape(sizes)


_JOINS: dict[str, Callable[..., Any]] = {"concatenate": _concatenated, "stack": _stacked, "select_n": _selected}
_MOVES: dict[str, Callable[..., Any]] = {
    "transpose": lambda n, q, operands, params: lax.transpose(n, params["permutation"]),
    "squeeze": lambda n, q, operands, params: lax.squeeze(n, params["dimensions"]),
    "rev": lambda n, q, operands, params: lax.rev(n, params["dimensions"]),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
    "dynamic_slice": lambda n, q, operands, params: taken(n, operands[1:], params["slice_sizes"]),
    "gather": lambda n, q, operands, params: gathered(n, q, operands[1], params),
}
