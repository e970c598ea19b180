"""The documented handler functions of a format, all made here from one table.

Each is an ordinary function `handler(primitive, operand..., **params)`. Those of the first table only materialize their
operands; the others are the shared handlers under their documented names, falling back to the same thing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from eformer.jaximus import default_handler, materialize_handler

from . import _handlers, _shapes
from ._base import QuantizedArray

Handler = Callable[..., Any]


def _materializing_xy(primitive: Any, x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
    return materialize_handler(primitive, x, y, *args, params=kwargs)


def _materializing_x(primitive: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    return materialize_handler(primitive, x, *args, params=kwargs)


def _integer_pow_x(primitive: Any, x: Any, **kwargs: Any) -> Any:
    return materialize_handler(primitive, x, params={"y": 2, **kwargs})


def _integer_pow_xy(primitive: Any, x: Any, y: Any) -> Any:
    return materialize_handler(primitive, x, params={"y": int(y)})


def _reduce(primitive: Any, operand: Any, init_value: Any, *args: Any, **kwargs: Any) -> Any:
    return materialize_handler(primitive, operand, init_value, *args, params=kwargs)


def _convolution(primitive: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
    return materialize_handler(primitive, lhs, rhs, *args, params=kwargs)


def _or_dense(shared: Handler) -> Handler:
    """A shared handler that, where it declines, materializes instead."""

    def handler(primitive: Any, operand: Any, *args: Any, **params: Any) -> Any:
        out = shared(operand, *args, **params)
        return materialize_handler(primitive, operand, *args, params=params) if out is NotImplemented else out

    return handler


def _dot_general(primitive: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
    left, right = isinstance(lhs, QuantizedArray), isinstance(rhs, QuantizedArray)
    if not (left or right):
        return default_handler(primitive, lhs, rhs, *args, **kwargs)
    shared = {(True, True): _handlers.dot_general_both, (True, False): _handlers.dot_general_left}
    out = shared.get((left, right), _handlers.dot_general_right)(primitive, lhs, rhs, **kwargs)
    return materialize_handler(primitive, lhs, rhs, params=kwargs) if out is NotImplemented else out


def _scaling(divide: bool) -> Handler:
    def handler(primitive: Any, x: Any, y: Any) -> Any:
        if isinstance(x, QuantizedArray) and not isinstance(y, QuantizedArray):
            out = _handlers.fold(x, jnp.asarray(y), divide)
        elif isinstance(y, QuantizedArray) and not isinstance(x, QuantizedArray) and not divide:
            out = _handlers.fold(y, jnp.asarray(x))
        else:
            out = NotImplemented
        return materialize_handler(primitive, x, y, params={}) if out is NotImplemented else out

    return handler


def _concatenate(primitive: Any, operands: Any, *args: Any, **kwargs: Any) -> Any:
    """Takes the operands as one sequence, or one by one."""
    operands = (*operands, *args) if isinstance(operands, (list, tuple)) else (operands, *args)
    if all(isinstance(o, QuantizedArray) for o in operands):
        out = _shapes.concatenate(operands, kwargs["dimension"])
        if out is not NotImplemented:
            return out
    return materialize_handler(primitive, *operands, params=kwargs)


def _convert_kw(primitive: Any, operand: Any, **kwargs: Any) -> Any:
    return _or_dense(_handlers.convert_element_type)(primitive, operand, **kwargs)


def _convert_pos(primitive: Any, operand: Any, new_dtype: Any) -> Any:
    return _convert_kw(primitive, operand, new_dtype=new_dtype, weak_type=False, sharding=None)


# documented name with the format's tag in place of {}: the function
_TABLE: dict[str, Handler] = {
    **dict.fromkeys(("add_{}_xy", "lt_{}_xy", "max_{}_xy"), _materializing_xy),
    **dict.fromkeys(("exp_{}_x", "log_{}_x", "sqrt_{}_x"), _materializing_x),
    "mul_{}_xy": _scaling(divide=False),
    "div_{}_xy": _scaling(divide=True),
    "integer_pow_{}_x": _integer_pow_x,
    "integer_pow_{}_xy": _integer_pow_xy,
    "reduce_{}_operand_init_value": _reduce,
    "conv_general_dilated_{}_lhs_rhs": _convolution,
    "dot_general_{}_lhs_rhs": _dot_general,
    "concatenate_{}_operands": _concatenate,
    "convert_element_type_{}_operand_kw": _convert_kw,
    "convert_element_type_{}_operand_pos": _convert_pos,
    "broadcast_in_dim_{}_operand": _or_dense(_handlers.broadcast_in_dim),
    "gather_{}_operand": _or_dense(_handlers.gather),
    "reshape_{}_operand": _or_dense(_handlers.reshape),
    "transpose_{}_operand": _or_dense(_handlers.transpose),
}


def documented_handlers(tag: str, module: str) -> dict[str, Handler]:
    """All documented handlers of a format, by their names."""
    made = {}
    for template, function in _TABLE.items():
        name = template.format(tag)
        made[name] = _named(function, name, module)
    return made


def _named(function: Handler, name: str, module: str) -> Handler:
    def handler(primitive: Any, *args: Any, **params: Any) -> Any:
        return function(primitive, *args, **params)

    handler.__name__ = handler.__qualname__ = name
    handler.__module__ = module
    handler.__wrapped__ = function  # pyright: ignore[reportFunctionMemberAccess] - keeps the documented signature
    handler.__doc__ = f"Handler of {name.split('_')[0]} for operands of this format, called as handler(primitive, ...)."
    return handler
