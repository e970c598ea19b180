"""Codes to float32 values, inside a kernel. What is packed comes apart into planes: plane i holds every n-th column.

Codes in blocks arrive transposed, (bytes, rows of D): that is how XLA keeps them on a TPU. Four bytes of a row of D
make a word, and eight rows of words a register. Where these share a scale and codes stand for entries of a table, the
scale is multiplied into the table and not into every value. The 16 entries of a table fill two registers, one entry per
sublane: three bits of a code permute sublanes, the fourth selects the register.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import Format

SUBLANES = 8
_INFINITY = 0x7F800000


def byte_planes(row: Format, codes: jax.Array) -> Iterator[jax.Array]:
    """Planes of codes without blocks, given as signed numbers (int32). Each has their shape."""
    if row.bits_of is not None:
        yield _small_float(row.bits_of, codes, shift=0, sign=0)
        return
    for shift in range(8 - row.bits, -1, -row.bits):
        if row.zero is None:
            yield jnp.where((codes & (1 << shift)) != 0, jnp.float32(1), jnp.float32(-1))
        elif row.per_code == 1:
            yield codes.astype(jnp.float32)
        else:
            yield (((codes >> shift) & (2**row.bits - 1)) - row.zero).astype(jnp.float32)


def word_planes(
    row: Format, words: jax.Array, scale: Any, zero: Any = None, bias: Any = None, *, permute: bool
) -> Iterator[jax.Array]:
    """Planes of words (units, rows), of their shape. Scales, zero points, biases are (scales, rows), for blocks."""
    units, lanes = words.shape
    registers = words.reshape(units // SUBLANES, SUBLANES, lanes)
    count, scales = registers.shape[0], scale.shape[0]
    if row.table is not None and count >= scales:
        read = _table(row.table, registers, scale, permute=permute)
        scale = None
    else:
        read = _reader(row, registers, coded=zero is not None or bias is not None, permute=permute)
    factor, less, more = (None if number is None else _spread(number, count) for number in (scale, zero, bias))
    for shift in shifts(row.bits):
        values = read(shift)
        values = values if less is None else values - less
        values = values if factor is None else values * factor
        values = values if more is None else values + more
        yield values.reshape(units, lanes)


def shifts(bits: int) -> list[int]:
    """Where in a word its values begin: bytes from low to high, the first value of each in its high bits."""
    return [byte + shift for byte in range(0, 32, 8) for shift in range(8 - bits, -1, -bits)]


def _reader(row: Format, registers: jax.Array, *, coded: bool, permute: bool) -> Callable[[int], jax.Array]:
    """What the codes of the registers that begin at a bit stand for; of integers the code itself, if `coded`."""
    if row.table is not None:
        return _table(row.table, registers, jnp.ones((1, registers.shape[-1]), jnp.float32), permute=permute)
    if row.bits_of is not None:
        return lambda shift: _small_float(row.bits_of, registers, shift, 24 - shift)
    above, mask = 32 - row.bits, 2**row.bits - 1
    if coded == (row.zero == 0):  # int8_block stores values, the others codes: they differ in the highest bit
        half = sum(1 << (shift + row.bits - 1) for shift in shifts(row.bits))
        registers = registers ^ np.uint32(half).astype(np.int32)
    if coded:
        return lambda shift: ((registers >> shift) & mask).astype(jnp.float32)
    return lambda shift: (_moved(registers, above - shift) >> above).astype(jnp.float32)


def _moved(words: jax.Array, left: int) -> jax.Array:
    return words << left if left > 0 else words >> -left if left else words


def _small_float(kind: Any, words: jax.Array, shift: int, sign: int) -> jax.Array:
    """The float of 8 bits in the byte above `shift`, by integers: not all chips convert such floats. Its sign is `sign`
    bits below the top.

    All bits but the sign are moved to where a float32 has them, and the exponent is raised. Below the least normal
    number that gives least/2 * (1 + m) instead of least * m, which is twice as much less `least`, so the smaller of
    both is meant everywhere. Nothing is subnormal on the way: a TPU would make it zero.
    """
    info = jnp.finfo(kind)
    mantissa = 23 - int(info.nmant)
    special = (int(np.asarray(info.max).view(np.uint8)) + 1) << mantissa
    size = _moved(words, mantissa - shift) & (127 << mantissa)
    normal = lax.bitcast_convert_type(size + ((126 + int(info.minexp)) << 23), jnp.float32)
    finite = jnp.minimum(normal, normal + normal - np.float32(info.smallest_normal))
    bits = jnp.where(size < special, lax.bitcast_convert_type(finite, jnp.int32), size | _INFINITY)
    return lax.bitcast_convert_type(bits | (_moved(words, sign) & np.int32(-(2**31))), jnp.float32)


def _spread(numbers: jax.Array, count: int) -> jax.Array:
    """Numbers of blocks (scales, rows), for every word of `count` registers. These hold part of a block, or several."""
    scales, lanes = numbers.shape
    if count >= scales:
        shape = (scales, count // scales, SUBLANES, lanes)
        return jnp.broadcast_to(numbers[:, None, None, :], shape).reshape(count, SUBLANES, lanes)
    parts = scales // count
    if parts == SUBLANES:
        return numbers.reshape(count, SUBLANES, lanes)
    each = jnp.broadcast_to(numbers[:, None, :], (scales, SUBLANES, lanes)).reshape(count, parts, SUBLANES, lanes)
    sublane = lax.broadcasted_iota(jnp.int32, (count, SUBLANES, lanes), 1)
    found = each[:, 0]
    for part in range(1, parts):
        found = jnp.where(sublane < part * (SUBLANES // parts), found, each[:, part])
    return found


def _table(entries: np.ndarray, registers: jax.Array, scale: jax.Array, *, permute: bool) -> Callable[[int], jax.Array]:
    """Entries for four bits of the registers, times one scale (scales, rows) for each or several of them."""
    count, _, lanes = registers.shape
    shape = (scale.shape[0], count // scale.shape[0], SUBLANES, lanes)
    factor = scale[:, None, None, :]
    return (_permuted if permute else _selected)(entries, registers, factor, shape)


def _permuted(entries: np.ndarray, registers: jax.Array, factor: jax.Array, shape: tuple[int, ...]) -> Any:
    row = lax.broadcasted_iota(jnp.int32, (SUBLANES, shape[-1]), 0)

    def table(half: np.ndarray) -> jax.Array:
        column = jnp.full(row.shape, half[0], jnp.float32)
        for i, entry in enumerate(half[1:], 1):
            column = jnp.where(row == i, jnp.float32(entry), column)
        return jnp.broadcast_to(column * factor, shape).reshape(-1, *shape[2:])

    low, high = table(entries[:8]), table(entries[8:])

    def lookup(shift: int) -> jax.Array:
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


def _selected(entries: np.ndarray, registers: jax.Array, factor: jax.Array, shape: tuple[int, ...]) -> Any:
    """Four levels of selects: three times the work, for chips that cannot permute."""
    spread = jnp.broadcast_to(factor, shape).reshape(-1, *shape[2:])

    def lookup(shift: int) -> jax.Array:
        values: list[Any] = [jnp.float32(value) for value in entries]
        for bit in range(4):
            is_set = _bit(registers, shift + bit)
            values = [jnp.where(is_set, high, low) for low, high in zip(values[::2], values[1::2], strict=True)]
        return values[0] * spread

    return lookup


def _bit(words: jax.Array, bit: int) -> jax.Array:
    return (words & np.uint32(1 << bit).astype(np.int32)) != 0
