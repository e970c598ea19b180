"""Operators and methods of implicit arrays: each runs the same operation of jax.Array under a dispatching trace."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

# Filled in by `trace`, which stands above this module: runs f(*args) with dispatch.
apply: Callable[..., Any] = NotImplemented

_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_UNARY = ("neg", "pos", "abs", "invert")
# The dense array knows how to become a number, or why it cannot.
_NUMBERS = {"bool": bool, "int": int, "index": operator.index, "float": float, "complex": complex}
# fmt: off
_METHODS = (
    "all", "any", "argmax", "argmin", "argpartition", "argsort", "clip", "compress", "conj", "copy", "cumprod",
    "cumsum", "diagonal", "dot", "flatten", "max", "mean", "min", "nonzero", "prod", "ptp", "ravel", "repeat",
    "reshape", "round", "searchsorted", "sort", "squeeze", "std", "sum", "swapaxes", "take", "tolist", "trace",
    "transpose", "var", "view", "item",
)
# fmt: on
_PROPERTIES = ("T", "mT", "real", "imag")
_FOREIGN = (list, tuple, dict, set, str, bytes, type(None))


class ArrayOperators:
    """Mixin that gives `ImplicitArray` the surface of `jax.Array`."""

    __slots__ = ()

    materialize: Callable[[], Any]
    shape: Any
    dtype: Any

    def astype(self, new_dtype: Any) -> Any:
        """A new array of another dtype; this one does not change."""
        return apply(lambda q: jax.lax.convert_element_type(q, new_dtype), self)

    def __getitem__(self, index: Any) -> Any:
        return apply(operator.getitem, self, index)

    @property
    def at(self) -> Any:
        """Indexed reads and functional updates; the result of an update is dense, unless the type can be written."""
        return _At(self)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without axes")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __round__(self, digits: int = 0) -> Any:
        return apply(lambda q: jnp.round(q, digits), self)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        function = getattr(jnp, ufunc.__name__, None)
        if method == "__call__" and not kwargs and function is not None:
            return apply(function, *inputs)
        # reductions, accumulations, out=: as numpy does them, on the dense arrays
        dense = [i.__array__() if isinstance(i, ArrayOperators) else i for i in inputs]
        return getattr(ufunc, method)(*dense, **kwargs)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any: ...


def materialize(x: Any) -> Any:
    """The dense array behind `x`, however deeply nested; anything else is returned unchanged."""
    while isinstance(x, ArrayOperators):
        x = x.materialize()
    return x


class _At:
    """`q.at[index]`: `.get()` reads, everything else updates: a dense array for types that cannot be written."""

    def __init__(self, array: Any, index: Any = None):
        self._array, self._index = array, index

    def __getitem__(self, index: Any) -> _At:
        return _At(self._array, index)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return apply(lambda q: getattr(q.at[self._index], name)(*args, **kwargs), self._array)

        return call


def _binary(op: Callable[[Any, Any], Any], reflected: bool) -> Any:
    def method(self: Any, other: Any) -> Any:
        if isinstance(other, _FOREIGN):
            return NotImplemented
        return apply(op, other, self) if reflected else apply(op, self, other)

    return method


def _unary(op: Callable[[Any], Any]) -> Any:
    return lambda self: apply(op, self)


def _method(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return apply(lambda q: getattr(q, name)(*args, **kwargs), self)

    method.__name__ = name
    return method


for _name in _BINARY:
    _op = getattr(operator, f"{_name}_" if _name in ("and", "or") else _name)
    setattr(ArrayOperators, f"__{_name}__", _binary(_op, reflected=False))
    setattr(ArrayOperators, f"__r{_name}__", _binary(_op, reflected=True))
for _name in _COMPARISONS:
    setattr(ArrayOperators, f"__{_name}__", _binary(getattr(operator, _name), reflected=False))
for _name in _UNARY:
    setattr(ArrayOperators, f"__{_name}__", _unary(getattr(operator, _name)))
for _name, _type in _NUMBERS.items():
    setattr(ArrayOperators, f"__{_name}__", lambda self, number=_type: number(materialize(self)))
for _name in _METHODS:
    setattr(ArrayOperators, _name, _method(_name))
for _name in _PROPERTIES:
    setattr(ArrayOperators, _name, property(_unary(operator.attrgetter(_name))))
