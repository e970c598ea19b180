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

from eformer._formats.documented import handler as _handler
from eformer._formats.documented import public_names as _public_names
from eformer._formats.onebit.array import Array1B as Array1B
from eformer._formats.onebit.array import straight_through_1bit as straight_through_1bit

add_1bit_xy = _handler("add_1bit_xy")
lt_1bit_xy = _handler("lt_1bit_xy")
max_1bit_xy = _handler("max_1bit_xy")
mul_1bit_xy = _handler("mul_1bit_xy")
div_1bit_xy = _handler("div_1bit_xy")
exp_1bit_x = _handler("exp_1bit_x")
log_1bit_x = _handler("log_1bit_x")
sqrt_1bit_x = _handler("sqrt_1bit_x")
integer_pow_1bit_x = _handler("integer_pow_1bit_x")
integer_pow_1bit_xy = _handler("integer_pow_1bit_xy")
reduce_1bit_operand_init_value = _handler("reduce_1bit_operand_init_value")
conv_general_dilated_1bit_lhs_rhs = _handler("conv_general_dilated_1bit_lhs_rhs")
dot_general_1bit_lhs_rhs = _handler("dot_general_1bit_lhs_rhs")
concatenate_1bit_operands = _handler("concatenate_1bit_operands")
convert_element_type_1bit_operand_kw = _handler("convert_element_type_1bit_operand_kw")
convert_element_type_1bit_operand_pos = _handler("convert_element_type_1bit_operand_pos")
broadcast_in_dim_1bit_operand = _handler("broadcast_in_dim_1bit_operand")
gather_1bit_operand = _handler("gather_1bit_operand")
reshape_1bit_operand = _handler("reshape_1bit_operand")
transpose_1bit_operand = _handler("transpose_1bit_operand")
div_1bit_xy_fallback = div_1bit_xy
globals().update(__all__=_public_names(globals()))
