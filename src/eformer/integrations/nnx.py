"""Flax NNX: quantized modules in unchanged code.

>>> import jax.numpy as jnp
>>> from flax import nnx
>>> import eformer as ef
>>> model = Dispatching(ef.quantize_tree(nnx.Linear(64, 64, rngs=nnx.Rngs(0))))
>>> model(jnp.ones((2, 64))).shape
(2, 64)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from eformer._core import ImplicitArray, implicit
from eformer._formats.arguments import is_storage
from eformer._lora import LoraArray
from eformer._lora.parts import ADAPTERS, Adapter, low_rank, with_trained


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
    """A filter for what has gradients: dense parameters, and the factors of adapters but not what they adapt.

    Use it as `nnx.DiffState(0, trainable)` with `nnx.grad`, and as `nnx.Optimizer(model, optimizer, wrt=trainable)`. To
    train the factors alone, give `nnx.LoRAParam` instead.
    """
    del path
    if not (isinstance(value, nnx.Variable) and issubclass(value.type, nnx.Param)):
        return False
    if value.get_metadata().get("adapted"):
        return False
    return not isinstance(value.get_raw_value(), ImplicitArray)


# -- adapters ----------------------------------------------------------------------------------------------------------


class AdaptedParam(nnx.Module):
    """Stands where a parameter with an adapter stood, so that filters see its factors; who reads it gets that adapter.

    `w` is the parameter without the adapter, `a` and `b` are `nnx.LoRAParam`s; so is the `magnitude` of a `DoraArray`.
    """

    w: Any

    def __init__(self, param: nnx.Variable[Any], array: Adapter):
        rest: list[Any] = []
        opened = with_trained(array, lambda name, x: setattr(self, name, nnx.LoRAParam(x)), rest.append)
        for name, part in zip(("w", "squares"), rest, strict=False):
            held = param.replace(part)
            held.set_metadata("adapted", jax.tree.structure(opened, is_leaf=lambda x: x is None))
            setattr(self, name, held)

    def get_value(self) -> Adapter:
        names = ("w", "a", "b", "magnitude", "squares")
        parts = [getattr(self, name).get_raw_value() for name in names if hasattr(self, name)]
        return jax.tree.unflatten(self.w.get_metadata("adapted"), parts)

    get_raw_value = __jax_array__ = get_value

    value = property(get_value)
    shape = property(lambda self: self.w.get_raw_value().shape)
    dtype = property(lambda self: self.w.get_raw_value().dtype)
    ndim = property(lambda self: self.w.get_raw_value().ndim)

    def __getitem__(self, index: Any) -> Any:
        return self.get_value() if index is Ellipsis else self.get_value()[index]


def joined(model: nnx.Module) -> nnx.Module:
    """The model with one parameter in place of every `AdaptedParam`; a copy if there are any."""
    if not any(isinstance(node, AdaptedParam) for _, node in nnx.iter_graph(model)):
        return model

    def join(x: Any) -> Any:
        if not isinstance(x, AdaptedParam):
            return x
        param = x.w.replace(x.get_value())
        param.del_metadata("adapted")
        return param

    return _exchanged(nnx.merge(*nnx.split(model)), join)


def taken_apart(model: nnx.Module) -> nnx.Module:
    """The same model with an `AdaptedParam` in place of every parameter that holds an adapter with factors."""

    def apart(x: Any) -> Any:
        array = x.get_raw_value() if isinstance(x, nnx.Variable) else None
        if not isinstance(array, ADAPTERS) or type(low_rank(array)) is not LoraArray:  # that drops: inside of a step
            return x
        return AdaptedParam(x, array) if is_storage(low_rank(array).a, low_rank(array).b) else x

    return _exchanged(model, apart)


def _exchanged(model: nnx.Module, new: Callable[[Any], Any]) -> nnx.Module:
    made: dict[int, Any] = {}  # what is shared stays shared
    for node in [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Module)]:
        for name, value in list(vars(node).items()):
            if made.setdefault(id(value), new(value)) is not value:
                setattr(node, name, made[id(value)])
    return model
