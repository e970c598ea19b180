"""Writing into a cache: new rows are quantized, the storage of all others is left as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eformer._core import ImplicitArray, register
from eformer._core.materialization import dense_for

from .. import shapes as _shapes
from ..base import Part
from ..integer import codec
from .array import QuantizedCache

PARTIAL = """\
{what} writes part of a row: rows of this {name} are the {size} values along axis {axis}, which share scales, and a
row is quantized as a whole when it is written. Write whole rows ({fix}), or change `cache.materialize()`."""
FOREIGN = """\
{update!r} is written into {cache!r}, which stores rows differently. Rows are never silently quantized twice: give both
the same format and block size, or write `x.materialize()`."""


@register("dynamic_update_slice")
def dynamic_update_slice(primitive: Any, q: QuantizedCache, update: Any, *starts: jax.Array, **params: Any) -> Any:
    row, axes = _shapes.blocked_axis(q), _shapes.free(q)
    if row is None or update.shape[row] != q.shape[row]:
        raise ValueError(_partial(q, f"an update of shape {tuple(update.shape)}"))
    places = [starts[axis] for axis in axes]
    zero = jnp.zeros((), starts[0].dtype)

    def write(part: Part, array: jax.Array, new: jax.Array) -> jax.Array:
        # What is negative here lies in front of the first row; whoever called has counted from the end already.
        return lax.dynamic_update_slice(array, new, [*places, *[zero] * part.tail], allow_negative_indices=False)

    return _written(q, _stored(primitive, q, update, row), write)


@register("scatter")
def scatter(primitive: Any, q: QuantizedCache, indices: jax.Array, updates: Any, **params: Any) -> Any:
    """As on a dense array, with windows of whole rows. Where one row is written twice, the result is neither's."""
    if params.get("update_jaxpr") is not None:  # not a plain write: `at[...].apply`
        return NotImplemented
    row, axes, numbers = _shapes.blocked_axis(q), _shapes.free(q), params["dimension_numbers"]
    apart = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    if row is None or row in apart:
        raise ValueError(_partial(q, "an index of single values"))
    windows = sorted(numbers.update_window_dims)
    place = windows[[axis for axis in range(q.ndim) if axis not in apart].index(row)]
    if updates.shape[place] != q.shape[row]:
        raise ValueError(_partial(q, f"an update of shape {tuple(updates.shape)}"))
    mapped = list(numbers.scatter_dims_to_operand_dims)
    if row in mapped:
        # A window as long as its axis begins at 0, whatever its index; unless one that does not is to be dropped.
        if lax.GatherScatterMode.from_any(params["mode"]) == lax.GatherScatterMode.FILL_OR_DROP:
            raise ValueError(_partial(q, "an index that says where in a row to begin"))
        kept = [i for i, axis in enumerate(mapped) if axis != row]
        indices, mapped = indices[..., jnp.asarray(kept, int)], [mapped[i] for i in kept]
    # What is written has its rows last, as the storage has.
    ndim = updates.ndim - 1
    windows = [d - (d > place) for d in windows if d != place]
    how = {name: params[name] for name in ("indices_are_sorted", "unique_indices", "mode")}

    def write(part: Part, array: jax.Array, new: jax.Array) -> jax.Array:
        moved = lax.ScatterDimensionNumbers(
            update_window_dims=(*windows, *range(ndim, ndim + part.tail)),
            inserted_window_dims=tuple(axes.index(a) for a in numbers.inserted_window_dims),
            scatter_dims_to_operand_dims=tuple(axes.index(a) for a in mapped),
            operand_batching_dims=tuple(axes.index(a) for a in numbers.operand_batching_dims),
            scatter_indices_batching_dims=tuple(numbers.scatter_indices_batching_dims),
        )
        return lax.scatter(array, indices, new, moved, **how)

    return _written(q, _stored(primitive, q, updates, place), write)


def _stored(primitive: Any, q: QuantizedCache, update: Any, row: int) -> dict[str, jax.Array]:
    """The parts of the rows that are written, which lie along axis `row` of the update."""
    if isinstance(update, QuantizedCache):
        if _shapes.blocked_axis(update) != row or not _same_storage(q, update):
            raise ValueError(FOREIGN.format(update=update, cache=q))
        return {part.field: update.part(part) for part in update.parts}
    if isinstance(update, ImplicitArray):
        update = dense_for(primitive, update)
    packed, scale, _ = codec.encode(
        update, axis=row - update.ndim, bits=q.bits, block_size=q.block_size, scale_dtype=q.part(q.scale_part).dtype
    )
    return {"packed": packed, "scale": scale}


def _same_storage(q: QuantizedCache, update: QuantizedCache) -> bool:
    same = all(getattr(q, name) == getattr(update, name) for name in ("bits", "block_size", "pad"))
    return same and q.part(q.scale_part).dtype == update.part(update.scale_part).dtype


def _written(q: QuantizedCache, stored: dict[str, jax.Array], write: Callable[..., jax.Array]) -> Any:
    return _shapes.rebuilt(
        q, lambda part, array: write(part, array, stored[part.field]), _shapes.blocked_axis(q), q.ndim
    )


def _partial(q: QuantizedCache, what: str) -> str:
    axis = _shapes.blocked_axis(q) or 0
    fix = f"give axis {axis} in full, for example cache.at[{'0, ' * axis}:].set(x)"
    return PARTIAL.format(what=what, name=type(q).__name__, size=q.shape[axis], axis=axis, fix=fix)
