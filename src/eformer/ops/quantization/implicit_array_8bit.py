"""8-bit integer arrays.

>>> import jax.numpy as jnp
>>> w = Array8B.quantize(jnp.ones((128, 256)), axis=(-1,))
>>> w
Array8B(float32[128,256], int8, 8.12 bits per weight)
>>> (jnp.ones((32, 128), jnp.bfloat16) @ w.astype(jnp.bfloat16)).dtype
dtype(bfloat16)
"""

from __future__ import annotations

from eformer._formats.documented import handlers as _handlers
from eformer._formats.documented import public_names as _public_names
from eformer._formats.int8.array import Array8B as Array8B
from eformer._formats.int8.array import straight_through_8bit as straight_through_8bit
from eformer._formats.int8.codec import matmul_bf16_int8_weight_only as matmul_bf16_int8_weight_only

(
    add_8bit_xy, lt_8bit_xy, max_8bit_xy, mul_8bit_xy, div_8bit_xy, exp_8bit_x, log_8bit_x, sqrt_8bit_x,
    integer_pow_8bit_x, integer_pow_8bit_xy, reduce_8bit_operand_init_value, conv_general_dilated_8bit_lhs_rhs,
    dot_general_8bit_lhs_rhs, concatenate_8bit_operands, convert_element_type_8bit_operand_kw,
    convert_element_type_8bit_operand_pos, broadcast_in_dim_8bit_operand, gather_8bit_operand, reshape_8bit_operand,
    transpose_8bit_operand,
) = _handlers("8bit")  # fmt: skip
globals().update(__all__=_public_names(globals()))
