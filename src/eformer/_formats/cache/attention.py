"""Attention over caches: codes are read by one kernel where there is one, and in place where layers are stacked."""

from __future__ import annotations

import functools
from typing import Any

import jax

from eformer._core import register
from eformer._core.trace import rule, run
from eformer._kernels.attention import ATTENTION, Attention, attend_quantized, in_products

from .. import shapes as _shapes
from ..integer import codec
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
    encode = (_encoder(part.bits, part.block_size, scale.dtype) for part, scale in zip(both, scales, strict=True))
    y, *written = attend_quantized(parameters, (q, *codes, *rest), formats, blocks, scales, encode)
    pairs = zip(both, written[:2], written[2:], strict=True) if written else ()
    return [y, *(part.replaced(packed=packed, scale=scale) for part, packed, scale in pairs)]


@functools.cache  # so that equal caches have equal parameters
def _encoder(bits: int, block_size: int, scale_dtype: Any) -> Any:
    return lambda rows: codec.encode(rows, axis=-1, bits=bits, block_size=block_size, scale_dtype=scale_dtype)[:2]


def _is_plain(cache: QuantizedCache) -> bool:
    return _shapes.blocked_axis(cache) == cache.ndim - 1 and not cache.carries_factor and cache.use_kernel


@rule(NAME)
def _in_products(primitive: Any, values: list[Any], params: dict[str, Any]) -> Any:
    """Of any other kind of array: its products."""
    return run(lambda *operands: in_products(params["parameters"], *operands), values)
