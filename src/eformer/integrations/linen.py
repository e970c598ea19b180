"""Flax Linen: quantized variables in an unchanged model.

>>> import flax.linen as nn, jax, jax.numpy as jnp
>>> model, x = nn.Dense(64), jnp.ones((2, 64))
>>> variables = quantize(model.init(jax.random.key(0), x))
>>> variables["params"]["kernel"]
ArrayNF4(float32[64,64], nf4, 4.50 bits per weight)
>>> apply_fn(model)(variables, x).shape
(2, 64)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
from flax.core import FrozenDict

from eformer._core import implicit
from eformer.ops.quantization import quantize_tree


def quantize(variables: Mapping[str, Any], rules: Any = None, **options: Any) -> Any:
    """Apply `quantize_tree` to the "params" collection; the others (batch statistics, caches) stay as they are.

    Args:
        variables: what `model.init` returns.
        rules: as for `quantize_tree`; paths start below "params".
        **options: those of `quantize_tree`.
    """
    if not isinstance(variables, Mapping) or "params" not in variables:
        found = list(variables) if isinstance(variables, Mapping) else type(variables).__name__
        raise ValueError(f'variables need a "params" collection, got {found}. For bare parameters use quantize_tree.')
    params = quantize_tree(variables["params"], rules, **options)
    if isinstance(variables, FrozenDict):
        return variables.copy({"params": params})
    return {**variables, "params": params}


def apply_fn(model: nn.Module) -> Callable[..., Any]:
    """`model.apply` with dispatch on: give it to a `TrainState`, jit it, differentiate it.

    Flax compares the shapes of stored arrays, so `model.apply` itself raises `ForgottenImplicitError` for quantized
    variables unless they are arguments of an `implicit` function.
    """
    return implicit(model.apply)
