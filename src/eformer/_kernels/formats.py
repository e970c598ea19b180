"""The formats of stored matrices, one row each in a table, and the checks that storage fits its row.

D is the decoded matrix of R rows and C columns, stored row by row with the packed axis last. Any number of batch axes
may stand in front of every array. A value of D is what its code stands for, times its scale:

    nf4 int4 iq4_nl fp4     codes uint8 (R, blocks, block/2), first element in the high nibble; a table of 16 values
    int2 int3 int5 int6     codes uint8 (R, blocks, block * bits/8), a row of bits, first element first, high bit first
    int8_block              codes int8  (R, blocks, block)
    fp8_e4m3_block          codes uint8 (R, blocks, block), the bits of float8_e4m3fn; fp8_e5m2_block likewise
                            all of these: blocks = ceil(C/block), scale (R, blocks); intN has value = code - 2^(N-1),
                            int8_block stores that value. Of these two kinds a matrix may have an offset like its scale:
                            uint8, a zero point, D = (code - zero) * scale; floating, a bias, D = code * scale + bias
                            a scale may be of bytes: uint8 is e8m0, 2^(byte - 127), 255 is NaN; float8_e4m3fn. All
                            scales of a matrix may have one factor, float32 (1, 1). Neither goes with an offset

    int8                    codes int8  (R, C);         scale (R or 1, C or 1)
    fp8_e4m3 fp8_e5m2       codes uint8 (R, C);         scale (R or 1, C or 1)
    ternary                 codes uint8 (R, ceil(C/4)), two bits each, value = code - 1, first in the high bits; scale
                            as above, or None
    binary                  codes uint8 (R, ceil(C/8)), one bit each, 1 is +1, 0 is -1, first in the high bit; likewise

A row is all that decoding and multiplying in plain JAX, lookups, sharding and the checks need to know of a format.
Native backends name the rows they have decoders for.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# The 16 values of NormalFloat-4 (Dettmers et al. 2023, appendix E), in code order. Code 7 is exactly zero.
NF4_CODEBOOK = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip


# e2m1: sign, two bits of exponent, one of mantissa (OCP Microscaling Formats 1.0, table 5).
FP4_CODEBOOK = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# The table of ggml's IQ4_NL.
IQ4_NL_CODEBOOK = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)

_BYTE, _INT8 = np.dtype(np.uint8), np.dtype(np.int8)
BYTE_SCALES = (_BYTE, np.dtype(jnp.float8_e4m3fn))


@dataclasses.dataclass(frozen=True, eq=False)
class Format:
    """How a matrix is stored.

    `number` is its place in the enumerations of csrc. What a code stands for, scales aside, is `code - zero`, an entry
    of `table`, the bits of a float of type `bits_of`, or 1 and -1 (binary). A blocked format has one scale per block of
    columns, and an axis of blocks in its codes.
    """

    name: str
    number: int
    zero: int | None = None
    table: np.ndarray | None = None
    bits_of: Any = None
    per_code: int = 1  # values in one unit
    unit: int = 1  # stored elements that come apart together
    code_dtype: np.dtype = _BYTE
    blocked: bool = False
    needs_scale: bool = True

    @functools.cached_property
    def core_ndim(self) -> int:
        """Axes of the codes that are not batch axes."""
        return 3 if self.blocked else 2

    @property
    def bits(self) -> int:
        return 8 * self.code_dtype.itemsize * self.unit // self.per_code

    @property
    def takes_offsets(self) -> bool:
        """Are these integers in blocks, which may have a zero point or a bias?"""
        return self.blocked and self.zero is not None

    @property
    def in_nibbles(self) -> bool:
        """Is it one of the formats in the layout of nf4, which differ in `sixteen`?"""
        return self.blocked and self.bits == 4

    @property
    def sixteen(self) -> np.ndarray:
        """What the codes of a 4-bit format stand for."""
        return np.arange(16, dtype=np.float32) - np.float32(self.zero) if self.table is None else self.table

    def batch_of(self, codes: Any) -> tuple[int, ...]:
        return tuple(codes.shape[: codes.ndim - self.core_ndim])

    def stored_shape(self, rows: int, cols: int, block: int | None) -> tuple[int, ...]:
        """The shape of the codes of one matrix."""
        if not self.blocked:
            return rows, math.ceil(cols / self.per_code)
        assert block is not None
        return rows, math.ceil(cols / block), block // self.per_code * self.unit

    def units_held(self, codes: Any) -> int:
        """Units of one row of the storage."""
        return codes.shape[-1] // self.unit * (codes.shape[-2] if self.blocked else 1)

    def columns_held(self, codes: Any) -> int:
        """Columns the storage holds, padding included."""
        return self.units_held(codes) * self.per_code

    def group(self, block: int | None) -> int:
        """Neighbouring columns that are stored together: a block, or one stored element."""
        return int(block or self.per_code)

    def fields(self, codes: jax.Array, bits: int = 8) -> list[jax.Array]:
        """The codes of packed bytes, apart: one array for each value of a unit. Of single bytes, the lowest `bits`."""
        if self.per_code == 1:
            return [codes]
        size, mask = self.bits, np.uint8(2**self.bits - 1)
        if self.unit == 1:
            return [(codes >> np.uint8(shift)) & mask for shift in range(bits - size, -1, -size)]
        return self.apart([codes[..., i :: self.unit] for i in range(self.unit)])

    def apart(self, parts: Sequence[jax.Array]) -> list[jax.Array]:
        """The codes of a unit, given its bytes one by one."""
        size, mask, found = self.bits, np.uint8(2**self.bits - 1), []
        for value in range(self.per_code):
            byte, first = divmod(value * size, 8)
            over = first + size - 8  # bits that are in the next byte
            field = parts[byte] >> np.uint8(-over) if over <= 0 else parts[byte] << np.uint8(over)
            found.append((field if over <= 0 else field | parts[byte + 1] >> np.uint8(8 - over)) & mask)
        return found

    def joined(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """The bytes of a unit, given its codes one by one."""
        packed = []
        for byte in range(self.unit):
            total = jnp.zeros_like(values[0])
            for i, value in enumerate(values):
                shift = 8 * (byte + 1) - self.bits * (i + 1)  # left, from the low end of this byte
                if -self.bits < shift < 8:
                    total = total | (value << np.uint8(shift) if shift >= 0 else value >> np.uint8(-shift))
            packed.append(total)
        return packed

    def values(self, codes: jax.Array, dtype: Any) -> jax.Array:
        """What separate codes stand for."""
        if self.bits_of is not None:
            return lax.bitcast_convert_type(codes, self.bits_of).astype(dtype)
        if self.table is not None:
            # Built from scalars: custom partitioning takes no array constants.
            table = jnp.stack([jnp.full((), value, dtype) for value in self.table.tolist()])
            return table.at[codes.astype(jnp.int32)].get(mode="promise_in_bounds")
        if self.zero is None:
            return codes.astype(dtype) * 2 - 1
        # By way of int8: the conversion of unsigned bytes is slower than that of signed ones.
        return codes.astype(jnp.int8).astype(dtype) - self.zero if self.zero else codes.astype(dtype)


def _blocks(name: str, number: int, **how: Any) -> Format:
    return Format(name, number, blocked=True, **how)


_E4M3, _E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
_ROWS = {
    row.name: row
    for row in (
        _blocks("nf4", 0, table=NF4_CODEBOOK, per_code=2),
        Format("int8", 1, zero=0, code_dtype=_INT8),
        Format("ternary", 2, zero=1, per_code=4, needs_scale=False),
        Format("binary", 3, per_code=8, needs_scale=False),
        _blocks("int4", 4, zero=8, per_code=2),
        _blocks("iq4_nl", 5, table=IQ4_NL_CODEBOOK, per_code=2),
        _blocks("fp4", 6, table=FP4_CODEBOOK, per_code=2),
        _blocks("int8_block", 7, zero=0, code_dtype=_INT8),
        Format("fp8_e4m3", 8, bits_of=_E4M3),
        Format("fp8_e5m2", 9, bits_of=_E5M2),
        _blocks("fp8_e4m3_block", 10, bits_of=_E4M3),
        _blocks("fp8_e5m2_block", 11, bits_of=_E5M2),
        _blocks("int2", 12, zero=2, per_code=4),
        _blocks("int3", 13, zero=4, per_code=8, unit=3),
        _blocks("int5", 14, zero=16, per_code=8, unit=5),
        _blocks("int6", 15, zero=32, per_code=4, unit=3),
    )
}
FORMATS: Mapping[str, Format] = MappingProxyType(_ROWS)


def one_of(what: str, value: Any, allowed: Any) -> None:
    if value in list(allowed):
        return
    near = difflib.get_close_matches(str(value).lower(), [name for name in allowed if isinstance(name, str)], 1, 0.7)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{what}={value!r} is unknown; allowed values are {', '.join(map(repr, allowed))}.{hint}")


def broadcasts(given: Sequence[int], full: Sequence[int]) -> bool:
    """Has every axis of a shape the size of that of another shape, or 1?"""
    return len(given) == len(full) and all(n in (1, size) for n, size in zip(given, full, strict=True))


def check_storage(
    fmt: str, codes: Any, scale: Any, cols: int, block: int | None, offset: Any = None, factor: Any = None
) -> int | None:
    """Check codes, scale, offset and factor against the layout of the format; return the block size."""
    row = FORMATS[fmt]
    _check_factor(row, scale, offset, factor)
    if codes.dtype != row.code_dtype or codes.ndim < row.core_ndim:
        raise ValueError(
            f"{fmt} codes must be {row.code_dtype} of rank {row.core_ndim} or more, got "
            f"{codes.dtype}{list(codes.shape)}; use the encoder of the format."
        )
    if not (isinstance(cols, int) and cols >= 0):
        raise ValueError(f"cols must be a non-negative integer (the true number of columns), got {cols=!r}.")
    if row.blocked:
        block = _check_blocks(row, codes, scale, cols, block)
        _check_offset(row, scale, offset)
        return block
    _check_offset(row, scale, offset)
    if block is not None:
        raise ValueError(f"block={block} was given for {fmt}, which has no blocks; leave block out.")
    stored = math.ceil(cols / row.per_code)
    if codes.shape[-1] != stored:
        raise ValueError(f"{fmt} codes of {cols} columns end in an axis of {stored}, got {list(codes.shape)}.")
    if scale is None and row.needs_scale:
        raise ValueError(f"{fmt} needs a scale of shape (rows or 1, cols or 1), got None.")
    if scale is not None:
        _check_scale(row, scale, codes.shape[:-2], (codes.shape[-2], cols))
    return None


def _check_blocks(row: Format, codes: Any, scale: Any, cols: int, block: int | None) -> int:
    found = row.per_code * (codes.shape[-1] // row.unit)
    if found == 0 or codes.shape[-1] % row.unit or (block is not None and block != found):
        raise ValueError(f"{row.name} codes {list(codes.shape)} hold blocks of {found} values, but {block=}.")
    blocks = math.ceil(cols / found)
    if codes.shape[-2] != blocks:
        raise ValueError(
            f"{row.name} codes of {cols} columns in blocks of {found} need {blocks} blocks, got {codes.shape[-2]}."
        )
    if scale is None or tuple(scale.shape[-2:]) != tuple(codes.shape[-3:-1]) or scale.ndim < 2:
        got = None if scale is None else list(scale.shape)
        raise ValueError(f"{row.name} needs one scale per block, shape {list(codes.shape[:-1])}, got {got}.")
    _check_scale(row, scale, codes.shape[:-3], codes.shape[-3:-1])
    return found


def _check_offset(row: Format, scale: Any, offset: Any) -> None:
    if offset is None:
        return
    if not row.takes_offsets:
        allowed = ", ".join(name for name, other in FORMATS.items() if other.takes_offsets)
        raise ValueError(f"an offset was given for {row.name}; formats with zero points or biases are {allowed}.")
    if offset.dtype != jnp.uint8 and not jnp.issubdtype(offset.dtype, jnp.floating):
        raise TypeError(f"an offset must be uint8 (zero points) or floating (biases), got {offset.dtype}.")
    if tuple(offset.shape) != tuple(scale.shape):
        raise ValueError(f"the offset has shape {list(offset.shape)}; it needs that of the scale, {list(scale.shape)}.")


def _check_factor(row: Format, scale: Any, offset: Any, factor: Any) -> None:
    if offset is not None and (factor is not None or scale.dtype.itemsize == 1):
        raise TypeError("a matrix with an offset has floating scales of 16 bits or more, and no factor.")
    if factor is None:
        return
    if not row.blocked or factor.dtype != jnp.float32 or tuple(factor.shape[-2:]) != (1, 1):
        raise ValueError(
            f"a factor of the scales must be float32 (1, 1), for a format in blocks; got {factor.dtype}"
            f"{list(factor.shape)} for {row.name}."
        )


def _check_scale(row: Format, scale: Any, batch: tuple[int, ...], full: tuple[int, ...]) -> None:
    if not jnp.issubdtype(scale.dtype, jnp.floating) and not (row.blocked and scale.dtype == jnp.uint8):
        raise TypeError(f"the scale of {row.name} must be floating, got {scale.dtype}; convert it with astype.")
    core, lead = tuple(scale.shape[-2:]), tuple(scale.shape[:-2])
    if not broadcasts(core, full) or (lead and not broadcasts(lead, batch)):
        raise ValueError(
            f"the scale of {row.name} has shape {list(scale.shape)}; allowed are (rows or 1, cols or 1) with "
            f"rows, cols = {full}, behind the batch axes {tuple(batch)} of the codes (each may be 1) or none."
        )


def with_batch_of(codes: jax.Array, scale: jax.Array | None, fmt: str) -> jax.Array | None:
    """The scale with the batch axes of the codes."""
    if scale is None or scale.shape[:-2] == (batch := codes.shape[: -FORMATS[fmt].core_ndim]):
        return scale
    return jnp.broadcast_to(scale, (*batch, *scale.shape[-2:]))


def scale_values(scale: jax.Array) -> jax.Array:
    """A stored scale as numbers: bytes are e8m0, floats of 8 bits are widened, others are what they are.

    >>> scale_values(jnp.array([0, 127, 130, 255], jnp.uint8)).tolist()[1:]
    [1.0, 8.0, nan]
    """
    if scale.dtype == jnp.uint8:
        return lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu).astype(jnp.float32)
    return scale.astype(jnp.float32) if scale.dtype.itemsize == 1 else scale


def float_scale(scale: jax.Array, factor: jax.Array | None = None) -> jax.Array:
    """The scale, times the factor of its matrix, as one array of floats."""
    return scale_values(scale) if factor is None else scale_values(scale) * factor


def entries(table: np.ndarray, codes: jax.Array, dtype: Any, shift: int = 0) -> jax.Array:
    """Entries of a table of 16 for the four bits of the codes above `shift`.

    Four levels of selects: XLA vectorizes them on the CPU, while an indexed load per value becomes scalar code.
    """
    values: list[Any] = list(table.astype(dtype))
    for bit in range(4):
        is_set = (codes & np.uint8(1 << (bit + shift))) != 0
        values = [jnp.where(is_set, high, low) for low, high in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def unpack(codes: jax.Array, fmt: str) -> jax.Array:
    """Separate packed codes along the last axis."""
    row = FORMATS[fmt]
    if row.per_code == 1:
        return codes
    if row.unit == 1:
        shifts = jnp.arange(row.per_code - 1, -1, -1, dtype=jnp.uint8) * row.bits
        parts = (codes[..., None] >> shifts.reshape((1,) * codes.ndim + (-1,))) & jnp.uint8(2**row.bits - 1)
    else:
        parts = jnp.stack(row.fields(codes), axis=-1)
    return parts.reshape(*parts.shape[:-2], parts.shape[-2] * row.per_code)


def pack(codes: jax.Array, fmt: str) -> jax.Array:
    """Inverse of `unpack`, of codes in bytes; the last axis holds whole units."""
    row = FORMATS[fmt]
    if row.per_code == 1:
        return codes
    codes = codes.astype(jnp.uint8)
    packed = row.joined([codes[..., i :: row.per_code] for i in range(row.per_code)])
    return jnp.stack(packed, axis=-1).reshape(*codes.shape[:-1], packed[0].shape[-1] * row.unit)


def decode(
    codes: jax.Array, scale: jax.Array | None, offset: Any = None, *, fmt: str, cols: int, dtype: Any = jnp.float32
) -> jax.Array:
    """The dense matrix D (..., R, cols) that codes, scale and offset stand for."""
    row = FORMATS[fmt]
    values = row.values(unpack(codes, fmt), dtype)
    if row.blocked:
        assert scale is not None  # checked with the storage
        values = _scaled(row, values, scale[..., None].astype(dtype), None if offset is None else offset[..., None])
        return values.reshape(*codes.shape[:-2], values.shape[-2] * values.shape[-1])[..., :cols]
    values = values if values.shape[-1] == cols else values[..., :cols]
    return values if scale is None else values * scale.astype(dtype)


def _scaled(row: Format, values: jax.Array, scale: jax.Array, offset: Any) -> jax.Array:
    """What values of blocks stand for, in their dtype."""
    if offset is None:
        return values * scale
    half, dtype = 2 ** (row.bits - 1), values.dtype
    if offset.dtype == jnp.uint8:
        return (values - (offset.astype(dtype) - half)) * scale
    # The maximum changes nothing but keeps compilers from a fused multiply-add, which would round once only.
    return jnp.maximum((values + half) * scale, jnp.finfo(dtype).min) + offset.astype(dtype)
