"""Equinox: quantized modules, and gradients that leave quantized arrays alone.

>>> import equinox as eqx, jax, jax.numpy as jnp
>>> import eformer as ef
>>> model = Dispatching(ef.quantize_tree(eqx.nn.Linear(64, 64, key=jax.random.key(0))))
>>> model(jnp.ones(64)).shape
(64,)
>>> filter_grad(lambda model, x: model(x).sum())(model, jnp.ones(64)).module.bias.shape
(64,)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from eformer._core import ImplicitArray, implicit
from eformer._lora.parts import ADAPTERS, with_trained


class Dispatching(eqx.Module):
    """Runs a module with dispatch on, for code that calls the model and cannot be wrapped in `implicit`."""

    module: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _call(self.module, *args, **kwargs)


@implicit
def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def partition(model: Any) -> tuple[Any, Any]:
    """Split a model into what can be trained (dense floating-point arrays, factors of adapters) and the rest.

    Each part has None where the other has a value, so optax and `eqx.apply_updates` take the first one directly.
    `combine` joins the two again.
    """
    spec = jax.tree.map(_trained, model, is_leaf=lambda x: isinstance(x, ImplicitArray))
    return eqx.partition(model, spec, is_leaf=_is_whole)


def combine(*parts: Any) -> Any:
    """Join the parts of `partition` into one model."""
    return eqx.combine(*parts, is_leaf=_is_whole)


def filter_value_and_grad(fun: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., Any]:
    """Like `eqx.filter_value_and_grad`, for models with quantized arrays; `fun` runs with dispatch on."""

    def value_and_grad(model: Any, /, *args: Any, **kwargs: Any) -> Any:
        trained, rest = partition(model)

        def loss(trained: Any) -> Any:
            return implicit(fun)(combine(trained, rest), *args, **kwargs)

        return eqx.filter_value_and_grad(loss, has_aux=has_aux)(trained)

    return value_and_grad


def filter_grad(fun: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., Any]:
    """Like `eqx.filter_grad`, for models with quantized arrays; `fun` runs with dispatch on."""

    def grad(model: Any, /, *args: Any, **kwargs: Any) -> Any:
        value, gradient = filter_value_and_grad(fun, has_aux=has_aux)(model, *args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return grad


def _trained(leaf: Any) -> Any:
    """Whether a leaf is trained. In an adapter only the factors are, and nothing below `w`, even another adapter."""
    if isinstance(leaf, ADAPTERS):
        return with_trained(leaf, lambda _, part: _trained(part), lambda _: False)
    return not isinstance(leaf, ImplicitArray) and eqx.is_inexact_array(leaf)


def _is_whole(x: Any) -> bool:
    """Is `x` an implicit array that is trained as a whole or not at all? Only adapters have parts that are trained."""
    return isinstance(x, ImplicitArray) and not isinstance(x, ADAPTERS)
