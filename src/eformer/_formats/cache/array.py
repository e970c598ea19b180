"""`QuantizedCache`: keys and values of attention in 8 or 4 bits, written row by row and read as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from eformer._messages import called_otherwise

from .. import arguments as _arguments
from ..base import Sharding
from ..integer import codec
from ..integer.array import ArrayInt

# What a cache is called -> bits, values that share a scale (None: a whole row), the dtype of scales.
FORMATS: dict[str, tuple[int, int | None, Any]] = {
    "int8": (8, None, jnp.float32),
    "int4": (4, 64, jnp.bfloat16),
}
_NAMES = {"bits": 'the format is format="int{value}"', "group_size": "values that share a scale are block_size={value}"}


@dataclasses.dataclass
class QuantizedCache(ArrayInt):
    """A symmetric `ArrayInt` that can be written to: rows along the last axis, each quantized when it is written.

    `cache.at[...].set(x)`, `lax.dynamic_update_slice` and `lax.scatter` quantize the rows they write and leave all
    others as they are, bit for bit. Rows are always written as a whole. Reading is as for any quantized array: products
    use the codes, and a static index returns a cache. Rows that arrays of indices pick one by one are dense.

    INT8 has one scale per row (per token and head), INT4 one for each group of `block_size` values of a row. NaN or an
    infinity in a row makes what shares its scale NaN.

    >>> cache = QuantizedCache.zeros((2, 16, 4, 64), dtype=jnp.bfloat16)
    >>> cache = cache.at[:, 3].set(jnp.ones((2, 4, 64), jnp.bfloat16))
    >>> cache
    QuantizedCache(bfloat16[2,16,4,64], int8, 8.50 bits per weight)
    >>> cache[1, 3].materialize().mean()
    Array(1, dtype=bfloat16)
    """

    packed: Any = None
    scale: Any = None

    def __post_init__(self) -> None:
        if self.scale is None or isinstance(self.packed, (int, tuple, list)):
            raise TypeError(
                "QuantizedCache(packed, scale) takes what a cache stores. An empty one is QuantizedCache.zeros(shape, "
                "dtype), one of rows that exist QuantizedCache.quantize(array)."
            )
        if self.zero is not None or self.bias is not None:
            raise ValueError("a QuantizedCache is symmetric: it has no zero points and no bias. Leave both out.")
        if self.axis is None:
            self.axis = -1
        super().__post_init__()

    @property
    def _whole_rows(self) -> bool:
        """Is there one scale per row, and no padding? Then the storage is that of INT8 without blocks too."""
        return self.bits == 8 and not self.pad and self.packed.shape[-2] == 1

    @property
    def kernel_format(self) -> str:
        return "int8" if self._whole_rows else super().kernel_format

    @property
    def kernel_block(self) -> int | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None if self._whole_rows else self.block_size

    def kernel_operands(self) -> tuple[jax.Array, Any]:
        codes, scale = super().kernel_operands()
        return (codes[..., 0, :] if self._whole_rows else codes), scale

    @classmethod
    @called_otherwise(**_NAMES)
    def zeros(
        cls,
        shape: Sequence[int],
        dtype: Any = jnp.float32,
        format: str = "int8",
        *,
        block_size: int | None = None,
        scale_dtype: Any = None,
        sharding: Sharding = None,
    ) -> QuantizedCache:
        """An empty cache.

        Args:
            shape: the last axis is a row: (batch, positions, heads, size), say, or (batch, heads, positions, size).
            dtype: what values are read as.
            format: "int8" or "int4".
            block_size: values of a row that share a scale; by default all of them (INT8) or 64 (INT4).
            scale_dtype: how scales are stored; by default float32 (INT8) or bfloat16 (INT4).
            sharding: how the cache is split over devices. A row stays on one device.
        """
        if not isinstance(shape, Sequence):
            raise TypeError(f"{shape=} is not a shape; give a tuple of sizes, such as (batch, heads, positions, size).")
        shape = tuple(_arguments.as_index(n, "a size of shape") for n in shape)
        if not shape or min(shape) < 0:
            raise ValueError(f"shape={shape} is not allowed: a cache has rows, so one axis at least, of sizes from 0.")
        bits, block, scale_dtype = _layout(format, shape[-1], block_size, scale_dtype)
        blocks = -(-shape[-1] // block)
        nothing = 0 if bits == 8 else 0x88  # the code of 0 in both halves of a byte
        packed = jnp.full((*shape[:-1], blocks, block * bits // 8), nothing, jnp.int8 if bits == 8 else jnp.uint8)
        scale, pad = jnp.zeros((*shape[:-1], blocks), scale_dtype), blocks * block - shape[-1]
        dtype = _read_as(dtype, jnp.float32)
        made = cls(packed, scale, bits=bits, block_size=block, axis=-1, pad=pad, dtype=dtype)
        return made if sharding is None else made.with_sharding(sharding)

    @classmethod
    @called_otherwise(**_NAMES)
    def quantize(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        array: jax.Array,
        format: str = "int8",
        *,
        block_size: int | None = None,
        scale_dtype: Any = None,
        dtype: Any = None,
    ) -> QuantizedCache:
        """A cache of the rows of a dense array; arguments as for `zeros`, the dtype by default that of the array."""
        array = _arguments.as_float(array, "a cache")
        bits, block, scale_dtype = _layout(format, array.shape[-1], block_size, scale_dtype)
        options: dict[str, Any] = {"bits": bits, "block_size": block}
        packed, scale, _ = codec.encode(array, axis=-1, scale_dtype=scale_dtype, **options)
        dtype = _read_as(dtype, array.dtype)
        pad = packed.shape[-2] * block - array.shape[-1]
        return _arguments.keep_sharding(cls(packed, scale, axis=-1, pad=pad, dtype=dtype, **options), array)


def _layout(format: str, size: int, block_size: Any, scale_dtype: Any) -> tuple[int, int, Any]:
    """Bits, values per block, dtype of scales."""
    if format not in FORMATS:
        raise ValueError(f"{format=} is not a format of caches; allowed are {', '.join(map(repr, FORMATS))}.")
    bits, block, dtype = FORMATS[format]
    block = block if block_size is None else codec.check_block_size(block_size)
    whole = codec.whole_rows(size)
    block = whole if block is None or block > whole else block
    return bits, block, codec.check_scale_dtype(dtype if scale_dtype is None else scale_dtype)


def _read_as(dtype: Any, default: Any) -> Any:
    for name in (dtype, getattr(dtype, "__name__", None)):
        if str(name) in FORMATS:
            what = f"dtype={name} is not allowed: it is what values are read as, a floating type."
            raise TypeError(f"{what} How they are stored is format={str(name)!r}.")
    return _arguments.checked_dtype(dtype, default, "a cache")
