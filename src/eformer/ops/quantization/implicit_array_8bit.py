"""8-bit integer arrays.

>>> import jax.numpy as jnp
>>> w = Array8B.quantize(jnp.ones((128, 256)), axis=(-1,))
>>> w
Array8B(float32[128,256], int8, 8.12 bits per weight)
>>> (jnp.ones((32, 128), jnp.bfloat16) @ w.astype(jnp.bfloat16)).dtype
dtype(bfloat16)
"""

from __future__ import annotations

from eformer._formats.families import documented_handlers
from eformer._formats.int8.array import Array8B as Array8B
from eformer._formats.int8.matmul import matmul_bf16_int8_weight_only as matmul_bf16_int8_weight_only
from eformer._formats.training import straight_through_8bit as straight_through_8bit

_handlers = documented_handlers("8bit", __name__)
globals().update(_handlers, __all__=["Array8B", "matmul_bf16_int8_weight_only", "straight_through_8bit", *_handlers])
