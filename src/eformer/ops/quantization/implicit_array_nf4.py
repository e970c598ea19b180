"""4-bit NormalFloat arrays.

>>> import jax.numpy as jnp
>>> w = ArrayNF4.quantize(jnp.ones((128, 256)), block_size=64)
>>> w
ArrayNF4(float32[128,256], nf4, 4.50 bits per weight)
>>> (jnp.ones((32, 128)) @ w).shape
(32, 256)
"""

from __future__ import annotations

from typing import Any

import jax

from eformer._formats.documented import handlers as _handlers
from eformer._formats.documented import public_names as _public_names
from eformer._formats.nf4.array import ArrayNF4 as ArrayNF4
from eformer._formats.nf4.array import straight_through_nf4 as straight_through_nf4


def safe_materialize(arr: Any) -> tuple[Any, bool]:
    """(dense array, True) for an `ArrayNF4`; anything else unchanged, and False."""
    return (arr.materialize(), True) if isinstance(arr, ArrayNF4) else (arr, False)


def safe_delete(arr: jax.Array | ArrayNF4 | Any, materialized: bool) -> None:
    """Does nothing: JAX frees arrays that are no longer referenced."""
    del arr, materialized


(
    add_nf4_xy, lt_nf4_xy, max_nf4_xy, mul_nf4_xy, div_nf4_xy, exp_nf4_x, log_nf4_x, sqrt_nf4_x, integer_pow_nf4_x,
    integer_pow_nf4_xy, reduce_nf4_operand_init_value, conv_general_dilated_nf4_lhs_rhs, dot_general_nf4_lhs_rhs,
    concatenate_nf4_operands, convert_element_type_nf4_operand_kw, convert_element_type_nf4_operand_pos,
    broadcast_in_dim_nf4_operand, gather_nf4_operand, reshape_nf4_operand, transpose_nf4_operand,
) = _handlers("nf4")  # fmt: skip
globals().update(__all__=_public_names(globals()))
