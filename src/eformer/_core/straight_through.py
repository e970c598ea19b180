"""`ste`: the straight-through estimator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .materialization import materialize_on_request
from .trace import is_implicit


def ste(func: Callable[..., Any]) -> Callable[..., Any]:
    """Differentiate `func(x, *args, **kwargs)` as if it returned `x`.

    The forward pass is `func`, its result materialized if it is an implicit array; the backward pass hands the gradient
    of the result to the first argument and nothing to the others. `x` may be a pytree; the result has its structure and
    shapes. Arguments that are not arrays (block sizes, dtypes, flags) stay Python values.

    >>> round_ste = ste(jnp.round)
    >>> float(jax.grad(lambda x: 3.0 * round_ste(x))(0.4))
    3.0
    """

    @functools.wraps(func)
    def straight_through(*args: Any, **kwargs: Any) -> Any:
        x, args, kwargs = _first_argument(func, args, kwargs)
        x = jtu.tree_map(lambda leaf: _dense(leaf) if is_implicit(leaf) else leaf, x, is_leaf=is_implicit)
        leaves, treedef = jtu.tree_flatten((args, kwargs))
        dynamic = [isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves]
        arrays = [leaf for leaf, is_array in zip(leaves, dynamic, strict=True) if is_array]

        @jax.custom_jvp
        def forward(x: Any, arrays: list[Any]) -> Any:
            remaining = iter(arrays)
            filled = [next(remaining) if d else leaf for leaf, d in zip(leaves, dynamic, strict=True)]
            args, kwargs = jtu.tree_unflatten(treedef, filled)
            out = jtu.tree_map(_dense, func(x, *args, **kwargs), is_leaf=is_implicit)
            _require_same_shapes(func, x, out)
            return out

        @forward.defjvp
        def _(primals: Any, tangents: Any) -> tuple[Any, Any]:
            out = forward(*primals)
            return out, jtu.tree_map(_tangent_like, tangents[0], out)

        return forward(x, arrays)

    return straight_through


def _first_argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], Any]:
    """The first argument, also when it is given by its name, and the others."""
    if args:
        return args[0], args[1:], kwargs
    name = next(iter(inspect.signature(func).parameters), None)
    if name not in kwargs:
        called = getattr(func, "__name__", repr(func))
        raise TypeError(f"ste({called}) differentiates with respect to its first argument, {name!r}, which is missing.")
    return kwargs[name], (), {key: value for key, value in kwargs.items() if key != name}


def _dense(x: Any) -> Any:
    return materialize_on_request(x) if is_implicit(x) else jnp.asarray(x)


def _tangent_like(tangent: Any, out: Any) -> Any:
    if not jnp.issubdtype(out.dtype, jnp.inexact):
        return np.zeros(out.shape, jax.dtypes.float0)
    if tangent.dtype == jax.dtypes.float0:
        return jnp.zeros_like(out)
    return tangent.astype(out.dtype)


def _require_same_shapes(func: Any, x: Any, out: Any) -> None:
    same_structure = jtu.tree_structure(x) == jtu.tree_structure(out)
    if not same_structure or any(
        jnp.shape(a) != jnp.shape(b) for a, b in zip(jtu.tree_leaves(x), jtu.tree_leaves(out), strict=True)
    ):
        name = getattr(func, "__name__", repr(func))
        raise ValueError(
            f"ste({name}) must return what it is given: the gradient of its result goes to its first argument "
            f"unchanged. It got {_shapes(x)} and returned {_shapes(out)}."
        )


def _shapes(tree: Any) -> Any:
    return jtu.tree_map(lambda leaf: f"{jnp.result_type(leaf).name}{list(jnp.shape(leaf))}", tree)
