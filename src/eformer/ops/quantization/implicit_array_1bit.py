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

from eformer._formats.documented import handlers as _handlers
from eformer._formats.documented import public_names as _public_names
from eformer._formats.onebit.array import Array1B as Array1B
from eformer._formats.onebit.array import straight_through_1bit as straight_through_1bit

(
    add_1bit_xy, lt_1bit_xy, max_1bit_xy, mul_1bit_xy, div_1bit_xy, exp_1bit_x, log_1bit_x, sqrt_1bit_x,
    integer_pow_1bit_x, integer_pow_1bit_xy, reduce_1bit_operand_init_value, conv_general_dilated_1bit_lhs_rhs,
    dot_general_1bit_lhs_rhs, concatenate_1bit_operands, convert_element_type_1bit_operand_kw,
    convert_element_type_1bit_operand_pos, broadcast_in_dim_1bit_operand, gather_1bit_operand, reshape_1bit_operand,
    transpose_1bit_operand,
) = _handlers("1bit")  # fmt: skip
div_1bit_xy_fallback = div_1bit_xy
globals().update(__all__=_public_names(globals()))
