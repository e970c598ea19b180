"""One way to ask for any quantization: a type, a configuration, `quantize` and `straight_through`."""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Any, Literal

import jax

from eformer._formats.input import checked_block
from eformer._formats.int8.array import Array8B
from eformer._formats.nf4.array import MAX_BLOCK, ArrayNF4
from eformer._formats.onebit.array import Array1B
from eformer._formats.training import straight_through_1bit, straight_through_8bit, straight_through_nf4

__all__ = ["QuantizationConfig", "QuantizationType", "quantization_type", "quantize", "straight_through"]


class QuantizationType(enum.StrEnum):
    """The formats there are."""

    NF4 = "nf4"
    INT8 = "int8"
    TERNARY = "ternary"
    BINARY = "binary"


def quantization_type(name: QuantizationType | str) -> QuantizationType:
    """The type of that name, or an error that lists the names."""
    try:
        return QuantizationType(name)
    except ValueError as err:
        supported = ", ".join(t.value for t in QuantizationType)
        raise ValueError(f"Unsupported quantization type: {name!r}. Supported types: {supported}.") from err


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """How to quantize an array. Immutable, checked, and equal to itself after a trip through JSON.

    Attributes:
        dtype: the format.
        block_size: values that share one absmax (NF4 only).
        simulate: give a dense array with quantized values and straight-through gradients, for training.
        use_kernel: let products use native kernels where there are any.

    >>> QuantizationConfig.from_json(QuantizationConfig("int8").to_json())
    QuantizationConfig(dtype=<QuantizationType.INT8: 'int8'>, block_size=64, simulate=False, use_kernel=True)
    """

    dtype: QuantizationType | str = QuantizationType.NF4
    block_size: int = 64
    simulate: bool = False
    use_kernel: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", quantization_type(self.dtype))
        object.__setattr__(self, "block_size", checked_block(self.block_size, MAX_BLOCK))
        for name in ("simulate", "use_kernel"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}.")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> QuantizationConfig:
        """The configuration `to_json` wrote."""
        fields, allowed = json.loads(text), [f.name for f in dataclasses.fields(cls)]
        if not isinstance(fields, dict) or not set(fields) <= set(allowed):
            raise TypeError(f"a configuration is a JSON object with some of the fields {allowed}, got {text}.")
        return cls(**fields)


def quantize(
    array: jax.Array,
    config: QuantizationConfig | None = None,
    dtype: QuantizationType | str | None = None,
    block_size: int = 64,
    simulate: bool = False,
    *,
    axis: int | tuple[int, ...] | None = None,
    scaled: bool = True,
    double_quant: bool = False,
) -> Any:
    """Quantize a floating array to any format.

    Args:
        array: what to quantize; its sharding is kept.
        config: overrides `dtype`, `block_size` and `simulate`.
        dtype: the format, by default NF4.
        block_size: values that share one absmax (NF4).
        simulate: give a dense array with quantized values and straight-through gradients instead.
        axis: the axis values are packed or scaled along; each format has its default.
        scaled: ternary and binary carry a least-squares scale per output channel; False gives the bare codes.
        double_quant: store the absmax of NF4 at 8 bits too.
    """
    config = _chosen(config, dtype, block_size, simulate)
    _check_options(config, scaled, double_quant)
    if config.simulate:
        return straight_through(array, config, axis=axis, scaled=scaled, double_quant=double_quant)
    if config.dtype is QuantizationType.NF4:
        made: Any = ArrayNF4.quantize(array, config.block_size, axis=axis, double_quant=double_quant)  # pyright: ignore[reportArgumentType]
    elif config.dtype is QuantizationType.INT8:
        made = Array8B.quantize(array, axis=axis)
    else:
        made = Array1B.from_float(array, config.dtype.value, axis=axis, scale=_scale_kind(scaled))  # pyright: ignore[reportArgumentType,reportAttributeAccessIssue]
    return made if config.use_kernel else made.replaced(use_kernel=False)


def straight_through(
    array: jax.Array,
    config: QuantizationConfig | None = None,
    dtype: QuantizationType | str | None = None,
    block_size: int = 64,
    *,
    axis: int | tuple[int, ...] | None = None,
    scaled: bool = True,
    double_quant: bool = False,
) -> jax.Array:
    """`quantize(...).materialize()` whose gradient is that of `array` itself, for training with quantized weights."""
    config = _chosen(config, dtype, block_size, simulate=True)
    _check_options(config, scaled, double_quant)
    if config.dtype is QuantizationType.NF4:
        return straight_through_nf4(array, config.block_size, axis=axis, double_quant=double_quant)
    if config.dtype is QuantizationType.INT8:
        return straight_through_8bit(array, axis=axis)
    return straight_through_1bit(array, config.dtype.value, axis=axis, scale=_scale_kind(scaled))  # pyright: ignore[reportAttributeAccessIssue]


def _chosen(config: Any, dtype: Any, block_size: Any, simulate: Any) -> QuantizationConfig:
    """The configuration given, or one made of the other arguments."""
    if config is None:
        return QuantizationConfig(QuantizationType.NF4 if dtype is None else dtype, block_size, simulate)
    if not isinstance(config, QuantizationConfig):
        raise TypeError(
            f"config={config!r} is of type {type(config).__name__}, but must be a QuantizationConfig or None. "
            'Name a format with dtype=, as in quantize(w, dtype="nf4"); make a configuration with '
            "QuantizationConfig(**options)."
        )
    return config


def _check_options(config: QuantizationConfig, scaled: Any, double_quant: Any) -> None:
    """Refuse options that are no booleans, or that the format would ignore."""
    for name, value in (("scaled", scaled), ("double_quant", double_quant)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}.")
    kind = str(config.dtype)
    if double_quant and kind != "nf4":
        raise ValueError(f'double_quant=True has no meaning for {kind!r}: only "nf4" has an absmax to compress.')
    if not scaled and kind not in ("ternary", "binary"):
        raise ValueError(f'scaled=False has no meaning for {kind!r}: only "ternary" and "binary" have bare codes.')


def _scale_kind(scaled: bool) -> Literal["channel"] | None:
    return "channel" if scaled else None
