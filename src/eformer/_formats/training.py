"""Straight-through estimators: quantize in the forward pass, hand the gradient to the dense weights."""

from __future__ import annotations

from typing import Any, Literal

import jax

from eformer._core import ste

from .int8.array import Array8B
from .nf4.array import ArrayNF4
from .onebit.array import Array1B


@ste
def straight_through_nf4(
    weights: jax.Array, block_size: int = 64, *, axis: int | None = None, double_quant: bool = False
) -> Any:
    """`ArrayNF4.quantize(weights, block_size)`, materialized; differentiated as the identity."""
    return ArrayNF4.quantize(weights, block_size, axis=axis, double_quant=double_quant)


@ste
def straight_through_8bit(weights: jax.Array, axis: int | tuple[int, ...] | None = None) -> Any:
    """`Array8B.quantize(weights)`, materialized; differentiated as the identity."""
    return Array8B.quantize(weights, axis=axis)


@ste
def straight_through_1bit(
    weights: jax.Array,
    kind: Literal["ternary", "binary"] = "ternary",
    *,
    axis: int | None = None,
    scale: Literal["channel", "tensor"] | None = "channel",
) -> Any:
    """Scaled ternary or binary values of `weights`; differentiated as the identity."""
    return Array1B.from_float(weights, kind, axis=axis, scale=scale)
