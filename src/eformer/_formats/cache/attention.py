"""Attention over caches: codes are read by one kernel where there is one, and in place where layers are stacked."""

from __future__ import annotations

from typing import Any

import jax

from eformer._core import register
from eformer._core.trace import rule, run
from eformer._kernels.attention import ATTENTION, Attention, attend_quantized, in_products

from .. import shapes as _shapes
from .array import QuantizedCache

NAME = ATTENTION.primitive.name


@register(NAME)
def attention(
    q: jax.Array, keys: QuantizedCache, values: QuantizedCache, *rest: jax.Array, parameters: Attention
) -> Any:
    both = (keys, values)
    if not all(_is_plain(part) for part in both):
        return NotImplemented
    codes, scales = ([part.part(which) for part in both] for which in (keys.parts[0], keys.scale_part))
    formats, blocks = zip(*((part.kernel_format, part.kernel_block) for part in both), strict=True)
    return attend_quantized(parameters, (q, *codes, *rest), formats, blocks, scales)


def _is_plain(cache: QuantizedCache) -> bool:
    return _shapes.blocked_axis(cache) == cache.ndim - 1 and not cache.carries_factor and cache.use_kernel


@rule(NAME)
def _in_products(primitive: Any, values: list[Any], params: dict[str, Any]) -> Any:
    """Of any other kind of array: its products."""
    (out,) = run(lambda *operands: [in_products(params["parameters"], *operands)], values)
    return out
