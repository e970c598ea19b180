"""Flax NNX: quantized modules in unchanged code.

>>> import jax.numpy as jnp
>>> from flax import nnx
>>> import eformer as ef
>>> model = Dispatching(ef.quantize_tree(nnx.Linear(64, 64, rngs=nnx.Rngs(0))))
>>> model(jnp.ones((2, 64))).shape
(2, 64)
"""

from __future__ import annotations

from typing import Any

from flax import nnx

from eformer._core import ImplicitArray, implicit


class Dispatching(nnx.Module):
    """Runs a module with dispatch on, for code that calls the model and cannot be wrapped in `implicit`."""

    def __init__(self, module: nnx.Module):
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _call(self.module, *args, **kwargs)


@implicit
def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def trainable(path: tuple[Any, ...], value: Any) -> bool:
    """A filter for dense parameters, which have gradients. Quantized ones have none.

    Use it as `nnx.DiffState(0, trainable)` with `nnx.grad`, and as `nnx.Optimizer(model, optimizer, wrt=trainable)`.
    For adapters, whose factors are parts of a parameter, see `split_trainable`.
    """
    del path
    if not (isinstance(value, nnx.Variable) and issubclass(value.type, nnx.Param)):
        return False
    return not isinstance(value.get_raw_value(), ImplicitArray)
