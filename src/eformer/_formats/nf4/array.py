"""`ArrayNF4`: blocks of 4-bit codes from the normal-float table, one absmax per block."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from eformer._core import ImplicitArray, aux_field, ste

from .. import arguments as _arguments
from .. import blocks as _blocks
from ..base import Part, QuantizedArray
from . import codec

MAX_BLOCK = 1 << 16


@dataclasses.dataclass
class CompressedAbsmax(ImplicitArray, frozen=True, warn_on_materialize=False):
    """The absmax of NF4 blocks at 8 bits: `DYNAMIC_MAP[codes] * scale + offset`, one scale per 256 values."""

    codes: jax.Array
    scale: jax.Array
    offset: jax.Array
    core: int = aux_field(default=2)

    @property
    def core_ndim(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.core

    def compute_shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    def compute_dtype(self) -> Any:
        return jnp.dtype(jnp.float32)

    def expanded(self) -> jax.Array:
        """The absmax in f32: small, and needed whole by every product, so this does not count as a materialization."""
        return codec.expand_absmax(self.codes, self.scale, self.offset, core_ndim=self.core)

    def materialize(self) -> jax.Array:
        return self.expanded()


@dataclasses.dataclass
class ArrayNF4(QuantizedArray):
    """4-bit NormalFloat: `w[..., k, ...] = CODEBOOK[code[..., k]] * absmax[..., k // block_size]`.

    Invariants: `packed` is uint8 `(free axes..., blocks, block_size / 2)`, two codes a byte, the first one high;
    `absmax` is floating `(free axes..., blocks)` or compressed; `axis` is the blocked logical axis counted from the
    end; `pad` values at the end of the last block exist in storage only.

    Given a dense floating array instead of storage, the constructor quantizes it.
    """

    packed: jax.Array
    absmax: Any = None
    block_size: int = aux_field(default=64)
    sharding: Any = aux_field(default=None)
    axis: int | None = aux_field(default=None, kw_only=True)  # pyright: ignore[reportGeneralTypeIssues]
    pad: int = aux_field(default=0, kw_only=True)
    use_kernel: bool = aux_field(default=True, kw_only=True)

    format: ClassVar[str] = "nf4"
    blocks_carry_scales: ClassVar[bool] = True
    block_step: ClassVar[int] = 2  # what a block size is a multiple of

    def __post_init__(self) -> None:
        _arguments.check_fields(self, "packed")
        _arguments.check_logical_dtype(self, "NF4")
        if _arguments.is_dense_float(self.packed) and self.absmax is None:
            dtype = self.__dict__.get("_dtype")
            self._become(type(self).quantize(self.packed, self.block_size, axis=self.axis, dtype=dtype))
        elif _arguments.is_storage(self.packed) and self.absmax is None:
            raise TypeError(
                f"ArrayNF4 takes a floating array to quantize, or packed storage together with absmax; got "
                f"{self.packed.dtype}{list(self.packed.shape)} alone."
            )
        elif _arguments.is_storage(self.packed, self.absmax):
            self.block_size = _arguments.check_block_size(self.block_size)
            _check_storage(self)
            self.axis, self.pad = _arguments.axis_and_pad(
                self, self.packed.ndim - 1, self.packed.shape[-2], self.block_size
            )
            self._default_dtype(self.absmax.dtype)
        else:
            _arguments.check_fields(self, "absmax")
        super().__post_init__()

    @property
    def parts(self) -> tuple[Part, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Part("packed", 2, self.block_size), Part("absmax", 1, self.block_size, is_scale=True)

    @property
    def core_ndim(self) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        core = -self.blocked
        return max(core, self.absmax.core) if isinstance(self.absmax, CompressedAbsmax) else core

    def stored_for(self, sharding: Any) -> ArrayNF4:
        """Groups of a compressed absmax run across rows: where those are split it is expanded."""
        split = any(entry is not None for entry in sharding.spec[self.ndim - self.core_ndim :])
        return self.replaced(absmax=self.absmax.expanded()) if split and hasattr(self.absmax, "expanded") else self

    def materialize(self) -> jax.Array:
        """The dense array, in the logical dtype, with the sharding it carries."""
        size = self.shape[self.blocked]
        dense = codec.decode(self.packed, self.frozen_scale(), axis=self.blocked, size=size, dtype=self.dtype)
        return self.constrained(dense)

    def decoded_entries(self, index: jax.Array) -> jax.Array:
        """The values at these positions of the blocked axis, (free axes..., index axes...)."""
        codes = _blocks.codes_at(self.part(self.parts[0]).reshape(*self.packed.shape[:-2], -1), index, 4)
        absmax = jnp.take(self.frozen_scale(), index // self.block_size, axis=-1)
        return codec.values(codes) * absmax

    @property
    def kernel_block(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.block_size

    @classmethod
    def quantize(
        cls,
        array: jax.Array,
        block_size: int = 64,
        *,
        axis: int | None = None,
        dtype: Any = None,
        double_quant: bool = False,
        verbose: bool = False,
    ) -> ArrayNF4:
        """Quantize a floating array.

        Args:
            array: values of rank 1 or more; a sharding it has is kept.
            block_size: values that share one absmax, even.
            axis: the axis blocks run along; by default the contracted one of `x @ w`.
            dtype: the logical dtype, by default that of `array`.
            double_quant: store absmax at 8 bits too (about 0.37 bits per weight less with blocks of 64).
            verbose: print what was stored.
        """
        array = _arguments.as_float(array, "NF4")
        block_size = _arguments.check_block_size(block_size, MAX_BLOCK)
        axis = _arguments.checked_axis(axis, array.ndim)
        packed, absmax = codec.encode(array, axis=axis, block_size=block_size)
        if double_quant:
            core = min(2, absmax.ndim)
            absmax = CompressedAbsmax(*codec.compress_absmax(absmax, core_ndim=core), core=core)
        pad = packed.shape[-2] * block_size - array.shape[axis]
        made = cls(
            packed, absmax, block_size, axis=axis, pad=pad, dtype=_arguments.checked_dtype(dtype, array.dtype, "NF4")
        )
        made = _arguments.keep_sharding(made, array)
        if verbose:
            print(f"quantized {array.dtype.name}{list(array.shape)} to {made!r}")
        return made


@ste
def straight_through_nf4(
    weights: jax.Array, block_size: int = 64, *, axis: int | None = None, double_quant: bool = False
) -> Any:
    """`ArrayNF4.quantize(weights, block_size)`, materialized; differentiated as the identity."""
    return ArrayNF4.quantize(weights, block_size, axis=axis, double_quant=double_quant)


def _check_storage(q: ArrayNF4) -> None:
    packed, absmax = q.packed, q.absmax
    if packed.dtype != jnp.uint8:
        raise TypeError(f"packed must be uint8 storage, got {packed.dtype}; use ArrayNF4.quantize for dense values.")
    if not jnp.issubdtype(absmax.dtype, jnp.floating):
        raise TypeError(f"absmax must be floating, got {absmax.dtype}.")
    if packed.ndim < 2 or packed.shape[-1] * 2 != q.block_size or packed.shape[:-1] != absmax.shape:
        raise ValueError(
            f"storage does not fit together: packed {list(packed.shape)} must be (..., blocks, {q.block_size // 2}) "
            f"for block_size={q.block_size}, and absmax {list(absmax.shape)} must be {list(packed.shape[:-1])}."
        )
