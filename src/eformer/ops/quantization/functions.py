"""`quantize`, `dequantize` and `quantized_matmul` as MLX has them: functions of plain arrays, in MLX's layout.

>>> import jax, jax.numpy as jnp
>>> w, x = jax.random.normal(jax.random.key(0), (32, 128)), jnp.ones((4, 128))
>>> stored = quantize(w, group_size=64, bits=4)
>>> y = quantized_matmul(x, *stored, group_size=64, bits=4)
>>> bool(jnp.allclose(y, x @ dequantize(*stored).T, atol=1e-4))
True
"""

from __future__ import annotations

from eformer._quantize.functions import as_array, dequantize, quantize, quantized_matmul

__all__ = ["as_array", "dequantize", "quantize", "quantized_matmul"]
