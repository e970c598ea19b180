"""Quantized arrays: NF4, integers, small floats, ternary, binary, behind one `quantize`; whole models; adapters.

>>> import jax.numpy as jnp
>>> w = quantize(jnp.ones((64, 32)), dtype="nf4")
>>> (jnp.ones((4, 64)) @ w)[0, 0]
Array(64., dtype=float32)
"""

from __future__ import annotations

from eformer._formats.activations.array import ActivationArray as ActivationArray
from eformer._formats.documented import public_names as _public_names
from eformer._formats.floating.array import ArrayFloat as ArrayFloat
from eformer._formats.integer.array import ArrayInt as ArrayInt
from eformer._kernels.backends import is_kernel_available as is_kernel_available
from eformer._kernels.select import nf4_use_kernel as nf4_use_kernel
from eformer._lora import DoraArray as DoraArray
from eformer._lora import LoraArray as LoraArray
from eformer._lora import MergeReport as MergeReport
from eformer._lora import add_lora as add_lora
from eformer._lora import lora_dropout as lora_dropout
from eformer._lora import lora_mask as lora_mask
from eformer._lora import merge as merge
from eformer._lora import merge_lora as merge_lora
from eformer._lora import split_trainable as split_trainable
from eformer._quantize import Report as Report
from eformer._quantize import dequantize_tree as dequantize_tree
from eformer._quantize import fake_quantize_tree as fake_quantize_tree
from eformer._quantize import plan_tree as plan_tree
from eformer._quantize import quant_delay as quant_delay
from eformer._quantize import quantize_tree as quantize_tree
from eformer._quantize import report as report
from eformer._quantize import size as size
from eformer._quantize.config import QuantizationConfig as QuantizationConfig
from eformer._quantize.config import QuantizationType as QuantizationType
from eformer._quantize.config import dequantize as dequantize
from eformer._quantize.config import quantize as quantize
from eformer._quantize.config import straight_through as straight_through
from eformer.errors import ShardingError as ShardingError

from .implicit_array_1bit import Array1B as Array1B
from .implicit_array_1bit import straight_through_1bit as straight_through_1bit
from .implicit_array_8bit import Array8B as Array8B
from .implicit_array_8bit import matmul_bf16_int8_weight_only as matmul_bf16_int8_weight_only
from .implicit_array_8bit import straight_through_8bit as straight_through_8bit
from .implicit_array_nf4 import ArrayNF4 as ArrayNF4
from .implicit_array_nf4 import straight_through_nf4 as straight_through_nf4

globals().update(__all__=_public_names(globals()))
