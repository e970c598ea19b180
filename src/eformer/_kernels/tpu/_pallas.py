"""What the kernels use of Pallas and Mosaic; differences between JAX releases end here. Then: codes to values.

A block of codes comes apart into planes: plane i holds every n-th column starting at i.

4-bit codes in blocks arrive transposed, (bytes, rows of D): that is how XLA keeps them on a TPU. Four bytes of a row of
D make a word of eight values, and the eight rows of words in a register share one scale, so the scale is multiplied
into the table and not into every value. The 16 entries of the table fill two registers, one entry per sublane: three
bits of a code permute sublanes, the fourth selects the register.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..formats import Format

__all__ = ["byte_planes", "can_permute", "compiler_params", "grid_spec", "nibble_planes", "pl", "precision"]
__all__ += ["scratch", "words"]

# Generations before the fifth have no permutation of sublanes by a vector of indices.
_WITHOUT_PERMUTES = ("TPU v2", "TPU v3", "TPU v4")
# Where in a word its eight values begin: bytes from low to high, the first value of each in the high nibble.
SHIFTS = (4, 0, 12, 8, 20, 16, 28, 24)
_SUBLANES = 8


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


def nibble_planes(row: Format, words: jax.Array, scale: jax.Array, *, permute: bool) -> Iterator[jax.Array]:
    """(units, rows) words and (scales, rows) -> eight float32 planes of the shape of the words."""
    units, rows = words.shape
    registers = words.reshape(units // _SUBLANES, _SUBLANES, rows)
    per_scale = registers.shape[0] // scale.shape[0]
    factor = scale[:, None, None, :]
    lookup = _permuted if permute else _selected
    tables = lookup(row.sixteen, factor, (scale.shape[0], per_scale, _SUBLANES, rows))
    for shift in SHIFTS:
        yield tables(registers, shift).reshape(units, rows)


def _permuted(entries: np.ndarray, factor: jax.Array, shape: tuple[int, ...]) -> Callable[[jax.Array, int], jax.Array]:
    row = lax.broadcasted_iota(jnp.int32, (_SUBLANES, shape[-1]), 0)

    def table(half: np.ndarray) -> jax.Array:
        column = jnp.full(row.shape, half[0], jnp.float32)
        for i, entry in enumerate(half[1:], 1):
            column = jnp.where(row == i, jnp.float32(entry), column)
        return jnp.broadcast_to(column * factor, shape).reshape(-1, *shape[2:])

    low, high = table(entries[:8]), table(entries[8:])

    def lookup(registers: jax.Array, shift: int) -> jax.Array:
        index = (registers >> shift) & 7
        return jnp.where(_bit(registers, shift + 3), _permute(high, index), _permute(low, index))

    return lookup


def _permute(table: jax.Array, index: jax.Array) -> jax.Array:
    """table[i, index[i, s, l], l]. Written out: `take_along_axis` would first look for negative indices."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(1,),
        start_index_map=(1,),
        operand_batching_dims=(0, 2),
        start_indices_batching_dims=(0, 2),
    )
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(table, index[..., None], numbers, slice_sizes=(1, 1, 1), mode=mode)


def _selected(entries: np.ndarray, factor: jax.Array, shape: tuple[int, ...]) -> Callable[[jax.Array, int], jax.Array]:
    """Four levels of selects: three times the work, for chips that cannot permute."""
    spread = jnp.broadcast_to(factor, shape).reshape(-1, *shape[2:])

    def lookup(registers: jax.Array, shift: int) -> jax.Array:
        values: list[Any] = [jnp.float32(value) for value in entries]
        for bit in range(4):
            is_set = _bit(registers, shift + bit)
            values = [jnp.where(is_set, high, low) for low, high in zip(values[::2], values[1::2], strict=True)]
        return values[0] * spread

    return lookup


def _bit(words: jax.Array, bit: int) -> jax.Array:
    return (words & np.uint32(1 << bit).astype(np.int32)) != 0


def byte_planes(codes: jax.Array, fmt: str) -> Iterator[jax.Array]:
    """float32 planes of int8, ternary or binary codes, each of the shape of the codes."""
    if fmt == "int8":
        yield codes.astype(jnp.float32)
        return
    wide = codes.astype(jnp.int32)
    if fmt == "ternary":
        for shift in (6, 4, 2, 0):
            yield (((wide >> shift) & 3) - 1).astype(jnp.float32)
        return
    for bit in range(7, -1, -1):
        yield jnp.where((wide & (1 << bit)) != 0, jnp.float32(1), jnp.float32(-1))
