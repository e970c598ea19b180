"""The documented handler functions of all formats, made from one table.

Each is an ordinary function `handler(primitive, operand..., *args, **params)`: behind the operands it takes what the
function of `jax.lax` of that name takes, or all parameters of the primitive, as the registry has them. Where storage
can give the result exactly, it does; else the operands are materialized and JAX is called.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eformer._core import materialize_handler
from eformer._core.materialization import dense_for

from . import dot as _dot
from . import lookup as _lookup
from . import shapes as _shapes
from .base import QuantizedArray

Handler = Callable[..., Any]


class _Call:
    """What all handlers do: `exact(primitive, *operands, **params)` if it can, else `public` on dense operands."""

    def __init__(self, public: Handler, exact: Handler | None = None) -> None:
        self.public, self.exact = public, exact
        self.accepted = inspect.signature(public).parameters.keys()

    def __call__(self, primitive: Any, operands: Sequence[Any], args: Sequence[Any], params: dict[str, Any]) -> Any:
        # `sharding=None` and `weak_type=False` are parameters without effect.
        asked = {k: v for k, v in params.items() if k in self.accepted or not (v is None or v is False)}
        of_primitive = not asked.keys() <= self.accepted
        if self.exact is not None and any(isinstance(o, QuantizedArray) for o in operands):
            if of_primitive:
                out = self.exact(primitive, *operands, **params)
            else:
                out = self._written(self.exact, operands, args, asked)
            if out is not NotImplemented:
                return out
        if of_primitive:
            return materialize_handler(primitive, *operands, *args, params=params)
        return self.public(*(dense_for(primitive, o) for o in operands), *args, **asked)

    def _written(self, exact: Handler, operands: Sequence[Any], args: Sequence[Any], params: dict[str, Any]) -> Any:
        """Let JAX check the call and write the parameters of its primitive, as it does while tracing."""
        program = jax.make_jaxpr(lambda *o: self.public(*o, *args, **params))(*map(jax.typeof, operands))
        if not program.eqns:
            return operands[0]
        equation, *more = program.eqns
        return NotImplemented if more else exact(equation.primitive, *operands, **equation.params)


def _x(public: Handler) -> Handler:
    call = _Call(public)
    return lambda primitive, x, *args, **kwargs: call(primitive, (x,), args, kwargs)


def _operand(public: Handler, shared: Handler) -> Handler:
    call = _Call(public, lambda primitive, q, **params: shared(q, **params))
    return lambda primitive, operand, *args, **params: call(primitive, (operand,), args, params)


def _lhs_rhs(public: Handler, exact: Handler | None = None) -> Handler:
    call = _Call(public, exact)
    return lambda primitive, lhs, rhs, *args, **kwargs: call(primitive, (lhs, rhs), args, kwargs)


def _xy(public: Handler, exact: Handler | None = None) -> Handler:
    """Two arrays, or an array and a Python number, which takes the dtype it would have in `jax.numpy`."""
    call = _Call(public)

    def handler(primitive: Any, x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
        pair, dtype = (x, y), None
        if any(isinstance(v, (bool, int, float)) for v in pair):
            dtype = jnp.result_type(*(v.dtype if isinstance(v, QuantizedArray) else v for v in pair))
            pair = tuple(jnp.asarray(v, dtype) if isinstance(v, (bool, int, float)) else v for v in pair)
        out = NotImplemented if exact is None else exact(*pair)
        if out is not NotImplemented:
            return out
        if dtype is not None:  # an integer array and a float meet in a float dtype
            pair = tuple(dense_for(primitive, v).astype(dtype) for v in pair)
        return call(primitive, pair, args, kwargs)

    return handler


def _folded(divide: bool) -> Handler:
    def exact(x: Any, y: Any) -> Any:
        if isinstance(x, QuantizedArray) and not isinstance(y, QuantizedArray):
            return _shapes.fold(x, jnp.asarray(y), divide)
        if isinstance(y, QuantizedArray) and not isinstance(x, QuantizedArray) and not divide:
            return _shapes.fold(y, jnp.asarray(x))
        return NotImplemented

    return exact


def _integer_pow_xy(primitive: Any, x: Any, y: Any) -> Any:
    """An exponent that is an array or not an integer takes the general power."""
    return jnp.power(dense_for(primitive, x), dense_for(primitive, y))


def _reduce(primitive: Any, operand: Any, init_value: Any, *args: Any, **kwargs: Any) -> Any:
    return _reduction(primitive, (operand, init_value), args, kwargs)


def _dot_exact(primitive: Any, lhs: Any, rhs: Any, **params: Any) -> Any:
    left, right = isinstance(lhs, QuantizedArray), isinstance(rhs, QuantizedArray)
    if left and right:
        return _dot.dot_general_both(primitive, lhs, rhs, **params)
    return _dot.product(primitive, *((rhs, lhs) if left else (lhs, rhs)), left, params)


def _concatenate(primitive: Any, operands: Any, *args: Any, **kwargs: Any) -> Any:
    """Takes the operands as one sequence, or one by one; an integer after them is the dimension."""
    arrays = [*operands, *args] if isinstance(operands, (list, tuple)) else [operands, *args]
    if isinstance(arrays[-1], (int, np.integer)):
        kwargs = {"dimension": arrays.pop(), **kwargs}
    return _concatenation(primitive, arrays, (), kwargs)


def _concatenate_exact(primitive: Any, *operands: Any, dimension: int) -> Any:
    alike = all(isinstance(o, QuantizedArray) for o in operands)
    return _shapes.concatenate(*operands, dimension=dimension) if alike else NotImplemented


def _gather_exact(primitive: Any, q: Any, indices: Any, **params: Any) -> Any:
    return _lookup.gather(q, jnp.asarray(indices), **params) if isinstance(q, QuantizedArray) else NotImplemented


def _gather(primitive: Any, operand: Any, start_indices: Any, *args: Any, **kwargs: Any) -> Any:
    return _gathering(primitive, (operand, start_indices), args, kwargs)


_concatenation = _Call(lambda *operands, dimension: lax.concatenate(operands, dimension), _concatenate_exact)
_conversion = _operand(lax.convert_element_type, _shapes.convert_element_type)
_gathering = _Call(lax.gather, _gather_exact)
_reduction = _Call(lax.reduce)


# documented name with the format's tag in place of {}: the function
_TABLE: dict[str, Handler] = {
    "add_{}_xy": _xy(lax.add),
    "lt_{}_xy": _xy(lax.lt),
    "max_{}_xy": _xy(lax.max),
    "mul_{}_xy": _xy(lax.mul, _folded(divide=False)),
    "div_{}_xy": _xy(lax.div, _folded(divide=True)),
    "exp_{}_x": _x(lax.exp),
    "log_{}_x": _x(lax.log),
    "sqrt_{}_x": _x(lax.sqrt),
    "integer_pow_{}_x": lambda primitive, x, **kwargs: _integer_pow_xy(primitive, x, **{"y": 2, **kwargs}),
    "integer_pow_{}_xy": _integer_pow_xy,
    "reduce_{}_operand_init_value": _reduce,
    "conv_general_dilated_{}_lhs_rhs": _lhs_rhs(lax.conv_general_dilated),
    "dot_general_{}_lhs_rhs": _lhs_rhs(lax.dot_general, _dot_exact),
    "concatenate_{}_operands": _concatenate,
    "convert_element_type_{}_operand_kw": _conversion,
    "convert_element_type_{}_operand_pos": lambda primitive, operand, new_dtype: _conversion(
        primitive, operand, new_dtype
    ),
    "broadcast_in_dim_{}_operand": _operand(lax.broadcast_in_dim, _shapes.broadcast_in_dim),
    "gather_{}_operand": _gather,
    "reshape_{}_operand": _operand(lax.reshape, _shapes.reshape),
    "transpose_{}_operand": _operand(lax.transpose, _shapes.transpose),
}


def handlers(tag: str) -> list[Handler]:
    """The documented handlers of a format, in the order of the table, for its module."""
    return [_documented(name.format(tag), tag, function) for name, function in _TABLE.items()]


def _documented(name: str, tag: str, function: Handler) -> Handler:
    @functools.wraps(function)  # keeps the documented signature
    def documented(primitive: Any, *args: Any, **params: Any) -> Any:
        return function(primitive, *args, **params)

    documented.__name__ = documented.__qualname__ = name
    documented.__module__ = f"eformer.ops.quantization.implicit_array_{tag}"
    operation = name.split(f"_{tag}_")[0]
    documented.__doc__ = f"Handler of {operation} for operands of this format, called as handler(primitive, ...)."
    return documented


def public_names(namespace: dict[str, Any]) -> list[str]:
    """What `import *` takes from a documented module: its own names, and not those it imports from elsewhere."""
    ours = [name for name, value in namespace.items() if getattr(value, "__module__", "").startswith("eformer")]
    return [name for name in ours if not name.startswith("_")]
