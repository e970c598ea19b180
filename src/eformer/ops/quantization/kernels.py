"""Native kernels: their state, and what exported programs need. Otherwise they load at first use.

>>> import jax, jax.numpy as jnp
>>> from jax import export
>>> from eformer.ops.quantization import quantize
>>> w = quantize(jnp.ones((64, 32)), dtype="int8")
>>> x = jnp.ones((4, 64))
>>> exported = export.export(jax.jit(lambda x: x @ w), disabled_checks=export_checks())(x)
>>> exported.call(x)[0, 0]
Array(64., dtype=float32)
"""

from __future__ import annotations

from eformer._kernels.backends import Kernels, export_checks, kernels, load_kernels

__all__ = ["Kernels", "export_checks", "kernels", "load_kernels"]
