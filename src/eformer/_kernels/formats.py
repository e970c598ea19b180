"""The formats of stored matrices, one row each in a table, and the checks that storage fits its row.

D is the decoded matrix of R rows and C columns, stored row by row with the packed axis last. Any number of batch axes
may stand in front of every array:

    nf4       codes uint8 (R, ceil(C/block), block/2), first element in the high nibble; scale (R, ceil(C/block))
    int8      codes int8  (R, C);                       scale (R or 1, C or 1)
    ternary   codes uint8 (R, ceil(C/4)), two bits each, value = code - 1, first element in the high bits; scale or None
    binary    codes uint8 (R, ceil(C/8)), one bit each, 1 is +1, 0 is -1, first element in the high bit; scale or None

A row is all that decoding in plain JAX, lookups, sharding and the checks need to know of a format. What makes it fast
is written per format: `xla.panel`, `tpu._pallas`, and the decoders in csrc.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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


_BYTE = np.dtype(np.uint8)


@dataclasses.dataclass(frozen=True)
class Format:
    """How a matrix is stored.

    `number` is its place in the enumerations of csrc. `values` turns unpacked codes into numbers of a dtype, scales
    aside. A blocked format has one scale per block of columns, and an axis of blocks in its codes.
    """

    name: str
    number: int
    values: Callable[[jax.Array, Any], jax.Array]
    per_code: int = 1  # values in one stored element
    code_dtype: np.dtype = _BYTE
    blocked: bool = False
    needs_scale: bool = True
    scale_dtype: Any = jnp.floating  # a dtype, or a kind of dtypes

    @functools.cached_property
    def core_ndim(self) -> int:
        """Axes of the codes that are not batch axes."""
        return 3 if self.blocked else 2

    @property
    def bits(self) -> int:
        return 8 * self.code_dtype.itemsize // self.per_code

    def batch_of(self, codes: Any) -> tuple[int, ...]:
        return tuple(codes.shape[: codes.ndim - self.core_ndim])

    def stored_shape(self, rows: int, cols: int, block: int | None) -> tuple[int, ...]:
        """The shape of the codes of one matrix."""
        if not self.blocked:
            return rows, math.ceil(cols / self.per_code)
        assert block is not None
        return rows, math.ceil(cols / block), block // self.per_code

    def columns_held(self, codes: Any) -> int:
        """Columns the storage holds, padding included."""
        return codes.shape[-1] * self.per_code * (codes.shape[-2] if self.blocked else 1)

    def group(self, block: int | None) -> int:
        """Neighbouring columns that are stored together: a block, or one stored element."""
        return int(block or self.per_code)


def nf4_values(codes: jax.Array, dtype: Any) -> jax.Array:
    # Built from scalars: custom partitioning takes no array constants.
    table = jnp.stack([jnp.full((), value, dtype) for value in NF4_CODEBOOK.tolist()])
    return table.at[codes.astype(jnp.int32)].get(mode="promise_in_bounds")


_ROWS = {
    row.name: row
    for row in (
        Format("nf4", 0, nf4_values, per_code=2, blocked=True),
        Format("int8", 1, lambda codes, dtype: codes.astype(dtype), code_dtype=np.dtype(np.int8)),
        Format("ternary", 2, lambda codes, dtype: codes.astype(dtype) - 1, per_code=4, needs_scale=False),
        Format("binary", 3, lambda codes, dtype: codes.astype(dtype) * 2 - 1, per_code=8, needs_scale=False),
    )
}
FORMATS: Mapping[str, Format] = MappingProxyType(_ROWS)


def one_of(what: str, value: Any, allowed: Any) -> None:
    if value not in allowed:
        raise ValueError(f"{what}={value!r} is unknown; allowed values are {', '.join(map(repr, allowed))}.")


def check_storage(fmt: str, codes: Any, scale: Any, cols: int, block: int | None) -> int | None:
    """Check codes and scale against the layout of the format; return the block size."""
    row = FORMATS[fmt]
    if codes.dtype != row.code_dtype or codes.ndim < row.core_ndim:
        raise ValueError(
            f"{fmt} codes must be {row.code_dtype} of rank {row.core_ndim} or more, got "
            f"{codes.dtype}{list(codes.shape)}; use the encoder of the format."
        )
    if not (isinstance(cols, int) and cols >= 0):
        raise ValueError(f"cols must be a non-negative integer (the true number of columns), got {cols=!r}.")
    if row.blocked:
        return _check_blocks(row, codes, scale, cols, block)
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
    found = row.per_code * codes.shape[-1]
    if found == 0 or (block is not None and block != found):
        raise ValueError(f"{row.name} codes {list(codes.shape)} hold blocks of {found} values, but {block=}.")
    blocks = math.ceil(cols / found)
    if codes.shape[-2] != blocks:
        raise ValueError(
            f"{row.name} codes of {cols} columns in blocks of {found} need {blocks} blocks, got {codes.shape[-2]}."
        )
    if scale is None or tuple(scale.shape[-2:]) != tuple(codes.shape[-3:-1]) or scale.ndim < 2:
        got = None if scale is None else list(scale.shape)
        raise ValueError(f"{row.name} needs one absmax per block, shape {list(codes.shape[:-1])}, got {got}.")
    _check_scale(row, scale, codes.shape[:-3], codes.shape[-3:-1])
    return found


def _check_scale(row: Format, scale: Any, batch: tuple[int, ...], full: tuple[int, ...]) -> None:
    if not jnp.issubdtype(scale.dtype, row.scale_dtype):
        kind = getattr(row.scale_dtype, "__name__", row.scale_dtype)
        raise TypeError(f"the scale of {row.name} must be {kind}, got {scale.dtype}; convert it with astype.")
    core, lead = tuple(scale.shape[-2:]), tuple(scale.shape[:-2])
    fits = len(core) == 2 and all(s in (1, f) for s, f in zip(core, full, strict=True))
    if lead and (len(lead) != len(batch) or any(s not in (1, b) for s, b in zip(lead, batch, strict=True))):
        fits = False
    if not fits:
        raise ValueError(
            f"the scale of {row.name} has shape {list(scale.shape)}; allowed are (rows or 1, cols or 1) with "
            f"rows, cols = {full}, behind the batch axes {tuple(batch)} of the codes (each may be 1) or none."
        )


def with_batch_of(codes: jax.Array, scale: jax.Array | None, fmt: str) -> jax.Array | None:
    """The scale with the batch axes of the codes."""
    if scale is None or scale.shape[:-2] == (batch := codes.shape[: -FORMATS[fmt].core_ndim]):
        return scale
    return jnp.broadcast_to(scale, (*batch, *scale.shape[-2:]))


def unpack(codes: jax.Array, fmt: str) -> jax.Array:
    """Separate packed codes along the last axis, which grows by the number of values per stored element."""
    row = FORMATS[fmt]
    if row.per_code == 1:
        return codes
    shifts = jnp.arange(row.per_code - 1, -1, -1, dtype=jnp.uint8) * row.bits
    parts = (codes[..., None] >> shifts.reshape((1,) * codes.ndim + (-1,))) & jnp.uint8(2**row.bits - 1)
    return parts.reshape(*codes.shape[:-1], codes.shape[-1] * row.per_code)


def decode(codes: jax.Array, scale: jax.Array | None, *, fmt: str, cols: int, dtype: Any = jnp.float32) -> jax.Array:
    """The dense matrix D (..., R, cols) that codes and scale stand for."""
    row = FORMATS[fmt]
    values = row.values(unpack(codes, fmt), dtype)
    if row.blocked:
        assert scale is not None  # checked with the storage
        values = values * scale[..., None].astype(dtype)
        return values.reshape(*codes.shape[:-2], values.shape[-2] * values.shape[-1])[..., :cols]
    values = values if values.shape[-1] == cols else values[..., :cols]
    return values if scale is None else values * scale.astype(dtype)
