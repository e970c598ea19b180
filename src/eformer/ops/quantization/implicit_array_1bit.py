"""Ternary and binary arrays.

>>> import jax.numpy as jnp
>>> codes = jnp.array([[-1, 0, 1, 1], [1, -1, 0, 0]], jnp.int8)
>>> q = Array1B.quantize(codes)
>>> q
Array1B(int8[2,4], ternary, 4.00 bits per weight)
>>> bool((q.materialize() == codes).all())
True
"""

from __future__ import annotations

from eformer._formats.families import documented_handlers
from eformer._formats.onebit.array import Array1B as Array1B
from eformer._formats.training import straight_through_1bit as straight_through_1bit

_handlers = documented_handlers("1bit", __name__)
_handlers["div_1bit_xy_fallback"] = _handlers["div_1bit_xy"]
globals().update(_handlers, __all__=["Array1B", "straight_through_1bit", *_handlers])
