"""The formats there are, one row each: what it makes, how, and which options it honours."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import jax

from eformer._formats.int8.array import Array8B
from eformer._formats.nf4.array import ArrayNF4, CompressedAbsmax
from eformer._formats.onebit.array import Array1B


class QuantizationType(enum.StrEnum):
    """The formats there are."""

    NF4 = "nf4"
    INT8 = "int8"
    TERNARY = "ternary"
    BINARY = "binary"


@dataclasses.dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        array: the class of its arrays.
        encode: `encode(array, config)` quantizes; `config` has been checked.
        options: the fields of `QuantizationConfig` it honours, beyond those that every format honours.
        options_of: the values of these options that an array was made with.
        scales_many_axes: can one scale serve several axes?
        needs_whole_matrix: do the codes depend on all values of a matrix, and not only on those along one axis?
    """

    array: type
    encode: Callable[[jax.Array, Any], Any]
    options: tuple[str, ...] = ()
    options_of: Callable[[Any], dict[str, Any]] = lambda q: {}
    scales_many_axes: bool = False
    needs_whole_matrix: bool = False


def _nf4(array: jax.Array, config: Any) -> ArrayNF4:
    return ArrayNF4.quantize(array, config.block_size, axis=config.axis, double_quant=config.double_quant)


def _onebit(array: jax.Array, config: Any) -> Array1B:
    scale = "channel" if config.scaled else None
    return Array1B.from_float(array, config.dtype.value, axis=config.axis, scale=scale)


def _nf4_options(q: ArrayNF4) -> dict[str, Any]:
    return {"block_size": q.block_size, "double_quant": isinstance(q.absmax, CompressedAbsmax)}


def _onebit_options(q: Array1B) -> dict[str, Any]:
    return {"scaled": q.scale is not None}


FORMATS: dict[QuantizationType, Format] = {
    QuantizationType.NF4: Format(ArrayNF4, _nf4, ("block_size", "double_quant"), _nf4_options),
    QuantizationType.INT8: Format(
        Array8B, lambda array, config: Array8B.quantize(array, axis=config.axis), scales_many_axes=True
    ),
    QuantizationType.TERNARY: Format(Array1B, _onebit, ("scaled",), _onebit_options, needs_whole_matrix=True),
    QuantizationType.BINARY: Format(Array1B, _onebit, ("scaled",), _onebit_options),
}
