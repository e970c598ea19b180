"""`ArrayInt`: integers of 2 to 8 bits in blocks, symmetric, with a zero point, or with a bias."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from eformer._core import aux_field
from eformer._jax import traces

from .. import arguments as _arguments
from ..base import Part, QuantizedArray, times
from ..blocks import wide
from ..gradients import frozen
from . import codec


@dataclasses.dataclass
class ArrayInt(QuantizedArray):
    """Integers in blocks: `w[..., k, ...] = (code[..., k] - zero) * scale`, or `code * scale + bias`, of its block.

    Codes go from 0 to `2**bits - 1`. Without `zero` and `bias` the array is symmetric: zero is `2**(bits - 1)`.

    Invariants: `packed` holds `(free axes..., blocks, block_size * bits / 8)` bytes, codes one after the other, high
    bits first; of 8 bits it is int8, `code - 128`, else uint8. `scale` is float32, bfloat16 or float16,
    `(free axes..., blocks)`; `zero` (uint8 or floating) or `bias` (floating) has the same shape. `axis` is the blocked
    logical axis counted from the end; `pad` values at the end of the last block exist in storage only.
    """

    packed: jax.Array
    scale: jax.Array
    zero: Any = None
    bias: Any = None
    bits: int = aux_field(default=4, kw_only=True)
    block_size: int = aux_field(default=64, kw_only=True)
    axis: int | None = aux_field(default=None, kw_only=True)  # pyright: ignore[reportGeneralTypeIssues]
    pad: int = aux_field(default=0, kw_only=True)
    sharding: Any = aux_field(default=None, kw_only=True)
    use_kernel: bool = aux_field(default=True, kw_only=True)

    blocks_carry_scales: ClassVar[bool] = True
    block_step: ClassVar[int] = codec.STEP

    def __post_init__(self) -> None:
        _arguments.check_fields(self, "packed", "scale")
        _arguments.check_logical_dtype(self, "an integer format")
        if _arguments.is_storage(*(a for a in (self.packed, self.scale, self.zero, self.bias) if a is not None)):
            self.bits, self.block_size = codec.check_bits(self.bits), codec.check_block_size(self.block_size)
            _check_storage(self)
            self.axis, self.pad = _arguments.axis_and_pad(
                self, self.packed.ndim - 1, self.packed.shape[-2], self.block_size
            )
            self._default_dtype(self.scale.dtype)
        super().__post_init__()

    @property
    def format(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"int{self.bits}"

    @property
    def symmetric(self) -> bool:
        return self.zero is None and self.bias is None

    @property
    def parts(self) -> tuple[Part, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        packed, scale = Part("packed", 2, self.block_size), Part("scale", 1, self.block_size, is_scale=True)
        return packed, scale, Part("zero", 1, self.block_size), Part("bias", 1, self.block_size)

    @property
    def kernel_format(self) -> str:
        return codec.kernel_format(self.bits)

    @property
    def kernel_block(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.block_size

    @property
    def kernel_offset_is_exact(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.zero is None or self.zero.dtype == jnp.uint8

    @property
    def kernel_offset(self) -> jax.Array | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Zero points and biases as they are; floating zero points as biases."""
        if self.kernel_offset_is_exact:
            return self.bias if self.zero is None else self.zero
        large = wide(self.dtype)
        return -self.zero.astype(large) * self.part(self.scale_part).astype(large)

    def _frozen_bias(self) -> Any:
        return self.bias if self.carries_factor else frozen(self.bias, self.format)

    def materialize(self) -> jax.Array:
        """The dense array, decoded in f32 or wider, rounded once to the logical dtype, with the sharding it carries."""
        size = self.shape[self.blocked]
        stored = self.packed, self.frozen_scale(), self.zero, self._frozen_bias()
        how = {"axis": self.blocked, "size": size, "dtype": self.dtype, "linear": self.carries_factor}
        return self.constrained(codec.decode(*stored, bits=self.bits, **how))

    def decoded_entries(self, index: jax.Array) -> jax.Array:
        """The values at these positions of the blocked axis, (free axes..., index axes...)."""
        stored = self.packed.reshape(*self.packed.shape[:-2], -1)
        if self.bits == 8:
            codes = jnp.take(stored, index, axis=-1).astype(jnp.int16) + 128
        else:
            byte, first = index * self.bits // 8, index * self.bits % 8
            after = jnp.minimum(byte + 1, stored.shape[-1] - 1)  # bits that go on are never those of the last byte
            pair = (jnp.take(stored, at, axis=-1).astype(jnp.int32) for at in (byte, after))
            word = next(pair) * 256 + next(pair)
            codes = word >> jnp.broadcast_to(16 - self.bits - first, word.shape) & (2**self.bits - 1)
        block = index // self.block_size
        stored = (self.frozen_scale(), self.zero, self._frozen_bias())
        numbers = (None if a is None else jnp.take(a, block, axis=-1) for a in stored)
        return codec.values_of(self.bits, codes, *numbers, dtype=self.dtype, linear=self.carries_factor)

    def codes(self) -> jax.Array:
        """The codes, 0 to `2**bits - 1`, unpacked to uint8 in the logical shape: what `from_codes` takes."""
        codes = codec.unpacked_codes(self.packed, self.bits).astype(jnp.uint8)
        flat = codes.reshape(*codes.shape[:-2], codes.shape[-2] * codes.shape[-1])
        return jnp.moveaxis(flat[..., : self.shape[self.blocked]], -1, self.blocked)

    def with_plain_scale(self) -> ArrayInt:
        made = super().with_plain_scale()
        return (
            made if made is self or self.bias is None else made.replaced(bias=self.bias.astype(wide(self.bias.dtype)))
        )

    def scaled(self, factor: jax.Array, dtype: Any, *, traced: bool = False) -> ArrayInt:
        made = super().scaled(factor, dtype, traced=traced)
        return made if self.bias is None else made.replaced(bias=times(self._frozen_bias(), factor))

    @classmethod
    def quantize(
        cls,
        array: jax.Array,
        bits: int = 4,
        block_size: int | None = 64,
        *,
        symmetric: bool = True,
        axis: int | None = None,
        dtype: Any = None,
        scale_dtype: Any = jnp.float32,
        biased: bool = False,
    ) -> ArrayInt:
        """Quantize a floating array.

        Args:
            array: values of rank 1 or more; a sharding it has is kept.
            bits: 2, 3, 4, 5, 6 or 8.
            block_size: values that share one scale, a multiple of 8 from 16 on; None for one scale per row.
            symmetric: False stores a zero point per block (8 bits), for blocks that are not centred around 0.
            axis: the axis blocks run along; by default the contracted one of `x @ w`.
            dtype: the logical dtype, by default that of `array`.
            scale_dtype: how scales are stored: float32, bfloat16 or float16.
            biased: a bias per block, stored as the scale is, instead of a zero point.
        """
        array = _arguments.as_float(array, "an integer format")
        axis = _arguments.checked_axis(axis, array.ndim)
        size = array.shape[axis]
        block_size = codec.whole_rows(size) if block_size is None else codec.check_block_size(block_size)
        for name, given in (("symmetric", symmetric), ("biased", biased)):
            if not isinstance(given, bool):
                raise TypeError(f"{name} must be True or False, got {given!r}.")
        options: dict[str, Any] = {"bits": codec.check_bits(bits), "block_size": block_size}
        how = {"symmetric": symmetric, "biased": biased, "scale_dtype": codec.check_scale_dtype(scale_dtype)}
        packed, scale, offset = codec.encode(array, axis=axis, **how, **options)
        parts = {"scale": scale, "bias" if biased else "zero": offset}
        dtype = _arguments.checked_dtype(dtype, array.dtype, "an integer format")
        pad = packed.shape[-2] * block_size - size
        return _arguments.keep_sharding(cls(packed, **parts, axis=axis, pad=pad, dtype=dtype, **options), array)

    @classmethod
    def from_codes(
        cls,
        codes: Any,
        scale: Any,
        *,
        zero: Any = None,
        bias: Any = None,
        bits: int,
        block_size: int | None,
        axis: int | None = None,
        dtype: Any = None,
    ) -> ArrayInt:
        """An array of codes that exist already. Nothing is rounded.

        Args:
            codes: integers from 0 to `2**bits - 1`, of the logical shape.
            scale: floating, of the shape of the codes with `axis` divided by `block_size` (rounded up).
            zero: zero points of the shape of the scale, integers from 0 to `2**bits` (255 at most), or floating; or
            bias: what is added to `code * scale`, floating, of the shape of the scale.
            bits: 2, 3, 4, 5, 6 or 8.
            block_size: values that share one scale; None for one scale per row.
            axis: the axis blocks run along; by default the contracted one of `x @ w`.
            dtype: the logical dtype, by default that of the scale.
        """
        bits = codec.check_bits(bits)
        codes = _checked_codes(codes, "codes", 2**bits - 1)
        if codes.ndim == 0:
            raise ValueError("codes are arrays of rank 1 or more, got a scalar.")
        axis = _arguments.checked_axis(axis, codes.ndim)
        size = codes.shape[axis]
        block_size = codec.whole_rows(size) if block_size is None else codec.check_block_size(block_size)
        if zero is not None and not jnp.issubdtype(jnp.asarray(zero).dtype, jnp.floating):
            zero = _checked_codes(zero, "zero", min(2**bits, 255))
        blocks = -(-size // block_size)
        wanted = list(codes.shape)
        wanted[axis] = blocks
        numbers = {"scale": scale, "zero": zero, "bias": bias}
        for name, given in numbers.items():
            if given is not None and list(np.shape(given)) != wanted:
                raise ValueError(
                    f"{name} has shape {list(np.shape(given))}; codes of shape {list(codes.shape)} in blocks of "
                    f"{block_size} along axis {axis} need {wanted}."
                )
        parts: dict[str, Any] = {
            k: None if v is None else jnp.moveaxis(jnp.asarray(v), axis, -1) for k, v in numbers.items()
        }
        moved, pad = jnp.moveaxis(codes, axis, -1), blocks * block_size - size
        if pad:
            nothing = _code_of_zero(bits, parts["zero"], bias)
            filler = jnp.broadcast_to(nothing, (*moved.shape[:-1], pad)).astype(moved.dtype)
            moved = jnp.concatenate([moved, filler], axis=-1)
        packed = codec.packed_codes(moved.reshape(*moved.shape[:-1], blocks, block_size), bits)
        return cls(packed, **parts, bits=bits, block_size=block_size, axis=axis, pad=pad, dtype=dtype)


def _code_of_zero(bits: int, zero: Any, bias: Any) -> Any:
    """What storage is padded with: the code of 0 in the last block, where it has one."""
    if zero is None:
        return 2 ** (bits - 1) if bias is None else 0
    if jnp.issubdtype(zero.dtype, jnp.floating):
        return 0
    return jnp.minimum(zero[..., -1:], 2**bits - 1)


def _checked_codes(codes: Any, name: str, largest: int) -> jax.Array:
    """Integers as uint8, or an error that names what is out of range (where values are known)."""
    codes = _arguments.as_array(codes, name)
    if not jnp.issubdtype(codes.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {codes.dtype}{list(codes.shape)}.")
    if codes.size and not isinstance(codes, traces.Tracer):
        low, high = int(codes.min()), int(codes.max())
        if low < 0 or high > largest:
            raise ValueError(f"{name} from {low} to {high} are out of range: allowed are 0 to {largest}.")
    return codes.astype(jnp.uint8)


def _check_storage(q: ArrayInt) -> None:
    packed, wanted = q.packed, jnp.int8 if q.bits == 8 else jnp.uint8
    if packed.dtype != wanted:
        what = "use ArrayInt.quantize for dense values, ArrayInt.from_codes for codes"
        raise TypeError(
            f"packed must be {jnp.dtype(wanted).name} storage for bits={q.bits}, got {packed.dtype}; {what}."
        )
    last = q.block_size * q.bits // 8
    if packed.ndim < 2 or packed.shape[-1] != last:
        raise ValueError(
            f"packed {list(packed.shape)} must be (..., blocks, {last}) for bits={q.bits}, block_size={q.block_size}."
        )
    if q.zero is not None and q.bias is not None:
        raise ValueError("an array has a zero point or a bias, not both; add -zero * scale to the bias.")
    if q.scale.dtype.name not in (*codec.SCALES, "float64"):  # the last where a factor of it was multiplied in
        raise TypeError(f"a scale of dtype {q.scale.dtype.name} is not allowed: use {', '.join(codec.SCALES)}.")
    for name in ("scale", "zero", "bias"):
        array = getattr(q, name)
        if array is not None and tuple(array.shape) != tuple(packed.shape[:-1]):
            raise ValueError(
                f"{name} has shape {list(array.shape)}; packed {list(packed.shape)} needs one number per block, "
                f"{list(packed.shape[:-1])}."
            )
    if q.zero is not None and not jnp.issubdtype(q.zero.dtype, jnp.floating) and q.zero.dtype != jnp.uint8:
        raise TypeError(f"zero must be uint8 or floating, got {q.zero.dtype}.")
    if q.bias is not None and not jnp.issubdtype(q.bias.dtype, jnp.floating):
        raise TypeError(f"bias must be floating, got {q.bias.dtype}.")
