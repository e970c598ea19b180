"""The documented module of the configuration: one way to ask for any quantization.

>>> import jax.numpy as jnp
>>> quantize(jnp.ones((64, 32)), QuantizationConfig("int8"))
Array8B(float32[64,32], int8, 9.00 bits per weight)
"""

from __future__ import annotations

from eformer._quantize.config import QuantizationConfig, QuantizationType, quantize, straight_through

__all__ = ["QuantizationConfig", "QuantizationType", "quantize", "straight_through"]
