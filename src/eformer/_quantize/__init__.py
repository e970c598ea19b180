"""Whole models: `quantize_tree`, `dequantize_tree`, `fake_quantize_tree` and `report`.

>>> import jax.numpy as jnp
>>> quantize_tree({"mlp": {"kernel": jnp.ones((128, 64))}}, {"*mlp*": "int8"})["mlp"]["kernel"]
Array8B(float32[128,64], int8, 8.25 bits per weight)
"""

from __future__ import annotations

from .report import Report as Report
from .report import report as report
from .report import size as size
from .tree import dequantize_tree as dequantize_tree
from .tree import fake_quantize_tree as fake_quantize_tree
from .tree import plan_tree as plan_tree
from .tree import quant_delay as quant_delay
from .tree import quantize_tree as quantize_tree
