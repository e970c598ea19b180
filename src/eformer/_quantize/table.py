"""The formats there are, a row each: what makes their arrays, and which options they take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from eformer._formats.arguments import check_block_size
from eformer._formats.floating import codec as floats
from eformer._formats.floating.array import ArrayFloat
from eformer._formats.int8.array import Array8B
from eformer._formats.integer import codec as integers
from eformer._formats.integer.array import ArrayInt
from eformer._formats.nf4.array import MAX_BLOCK, ArrayNF4, CompressedAbsmax
from eformer._formats.onebit.array import Array1B

from .names import QuantizationType

Axis = int | tuple[int, ...] | None
BIAS = jnp.bfloat16  # of biases and their scales: two bytes each, with the range of float32


class Default(int):
    """A block size nobody asked for, which is the format's own."""


DEFAULT_BLOCK = Default(64)


@dataclasses.dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        array: the class of its arrays, or several.
        encode: `encode(array, config)` quantizes; `config` has been checked.
        options: the fields of `QuantizationConfig` it honours, beyond those that every format honours.
        options_of: the values of these options that an array was made with.
        scales_many_axes: can one scale serve several axes?
        needs_whole_matrix: do the codes depend on all values of a matrix, and not only on those along one axis?
        check_block: returns a block size that was given, or says what is wrong with it.
        one_block: the block size that holds so many values in one block.
        default_block: the block size unless one is given; None for a format that then has none.
    """

    array: type | tuple[type, ...]
    encode: Callable[[jax.Array, Any], Any]
    options: tuple[str, ...] = ()
    options_of: Callable[[Any], dict[str, Any]] = lambda q: {}
    scales_many_axes: bool = False
    needs_whole_matrix: bool = False
    check_block: Callable[[Any], int | None] = lambda size: check_block_size(size, MAX_BLOCK)
    one_block: Callable[[int], int] = lambda size: size + size % 2
    default_block: int | None = 64


def _nf4(array: jax.Array, config: Any) -> ArrayNF4:
    return ArrayNF4.quantize(array, config.block_size, axis=config.axis, double_quant=config.double_quant)


def _onebit(array: jax.Array, config: Any) -> Array1B:
    scale = "channel" if config.scaled else None
    return Array1B.from_float(array, config.dtype.value, axis=config.axis, scale=scale)


def _nf4_options(q: ArrayNF4) -> dict[str, Any]:
    return {"block_size": q.block_size, "double_quant": isinstance(q.absmax, CompressedAbsmax)}


def _onebit_options(q: Array1B) -> dict[str, Any]:
    return {"scaled": q.scale is not None}


def _integers(array: jax.Array, config: Any) -> ArrayInt:
    bits = int(config.dtype.value.removeprefix("int"))
    offset = {"biased": True, "scale_dtype": BIAS} if config.biased else {"symmetric": config.symmetric}
    return ArrayInt.quantize(array, bits, config.block_size, axis=config.axis, **offset)


def _int8(array: jax.Array, config: Any) -> Array8B | ArrayInt:
    """In blocks if a block size is given."""
    if config.block_size is not None:
        return _integers(array, config)
    if not config.symmetric:
        given = "biased=True" if config.biased else "symmetric=False"
        raise ValueError(f"{given} has a meaning for 'int8' in blocks only; give a block_size, such as 64.")
    return Array8B.quantize(array, axis=config.axis)


def _integer_options(q: Any) -> dict[str, Any]:
    if not isinstance(q, ArrayInt):
        return {}
    return {"block_size": q.block_size, "symmetric": q.symmetric, "biased": q.bias is not None}


_BLOCKS_OF_INTEGERS: dict[str, Any] = {
    "options": ("block_size", "symmetric", "biased"),
    "options_of": _integer_options,
    "check_block": lambda size: None if size is None else integers.check_block_size(size),
    "one_block": integers.whole_rows,
}


def _float(array: jax.Array, config: Any) -> ArrayFloat:
    return ArrayFloat.quantize(array, config.dtype.value, axis=config.axis, block_size=config.block_size)


def _float_options(q: ArrayFloat) -> dict[str, Any]:
    return {"block_size": q.block_size, "axis": q.axis or q.shared_axes or None}


def _small_floats(kind: str) -> Format:
    row = floats.KINDS[kind]
    return Format(
        ArrayFloat, _float, ("block_size",), _float_options, scales_many_axes=row.block is None,
        check_block=lambda size: floats.check_block_size(size, kind), one_block=lambda _: row.block or floats.TILE,
        default_block=row.block,
    )  # fmt: skip


FORMATS: dict[QuantizationType, Format] = {
    QuantizationType.NF4: Format(ArrayNF4, _nf4, ("block_size", "double_quant"), _nf4_options),
    QuantizationType.INT8: Format(
        (Array8B, ArrayInt), _int8, scales_many_axes=True, default_block=None, **_BLOCKS_OF_INTEGERS
    ),
    QuantizationType.TERNARY: Format(Array1B, _onebit, ("scaled",), _onebit_options, needs_whole_matrix=True),
    QuantizationType.BINARY: Format(Array1B, _onebit, ("scaled",), _onebit_options),
    **{
        QuantizationType(f"int{bits}"): Format(ArrayInt, _integers, **_BLOCKS_OF_INTEGERS)
        for bits in integers.BITS
        if bits != 8
    },
    **{QuantizationType(kind): _small_floats(kind) for kind in floats.KINDS},
}
