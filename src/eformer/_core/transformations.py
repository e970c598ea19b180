"""What users wrap around their functions: `implicit`, which turns dispatch on, and `ste`."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from eformer._jax import traces
from eformer._messages import shown

from .materialization import materialize_on_request
from .trace import ImplicitTrace, is_implicit, open_blocks

F = TypeVar("F", bound=Callable[..., Any])

# Shared by all blocks: a value made in one is understood in another.
_BLOCK_TAG = traces.TraceTag()


def _documented_as(signature: Callable[..., Any]) -> Callable[[F], F]:
    """What is taken beyond that is there to be refused with a message."""

    def shown_so(fn: F) -> F:
        fn.__signature__ = inspect.signature(signature)  # pyright: ignore[reportFunctionMemberAccess]
        return fn

    return shown_so


class Implicit:
    """Turns on dispatch: operations on implicit arrays use their handlers.

    Use it as a decorator or a wrapper (`implicit(f)`), or as a block (`with implicit:`). Blocks nest, end properly on
    exceptions, and belong to the thread and the asyncio task that entered them. A coroutine or generator function keeps
    dispatch to its own steps.
    """

    @_documented_as(lambda self, fn: None)
    def __call__(self, fn: F = None, *args: Any, **kwargs: Any) -> F:  # pyright: ignore[reportArgumentType]
        """`fn` with dispatch on: same signature, name and documentation."""
        if not callable(fn) or args or kwargs:
            got = ", ".join([*map(shown, () if fn is None else (fn, *args)), *(f"{name}=" for name in kwargs)])
            raise TypeError(
                f"implicit wraps a function, got implicit({got}). Write implicit(f)(x, q), decorate with @implicit, "
                "or use a block, `with implicit:`."
            )
        if inspect.iscoroutinefunction(fn):
            return _coroutine(fn)
        if inspect.isasyncgenfunction(fn):
            return _async_generator(fn)
        if inspect.isgeneratorfunction(fn):
            return _generator(fn)

        @functools.wraps(fn)
        def with_dispatch(*args: Any, **kwargs: Any) -> Any:
            leaves, treedef = jtu.tree_flatten((args, kwargs), is_leaf=_is_whole)
            trace = _trace_above()
            with traces.set_current_trace(trace):
                args, kwargs = jtu.tree_unflatten(treedef, [trace.wrap(leaf) for leaf in leaves])
                out = fn(*args, **kwargs)
            trace.closed = True
            return _unwrapped(trace, out)

        return with_dispatch  # pyright: ignore[reportReturnType]

    def __enter__(self) -> Implicit:
        mine = open_blocks.get()
        trace = _outside_blocks(lambda block: block not in mine)
        if not (isinstance(trace, ImplicitTrace) and trace.is_block):
            trace = _block_above(trace)
        trace.entered += 1
        open_blocks.set((*mine, trace))
        traces.install_trace(trace)
        return self

    def __exit__(self, *exc: object) -> None:
        # Tasks and generators on one thread may leave in another order than they entered. A block that is not open
        # passes everything on, so it is enough to close ours and to uncover the innermost one somebody is in.
        *others, trace = open_blocks.get()
        open_blocks.set(tuple(others))
        trace.entered -= 1
        traces.install_trace(_outside_blocks(lambda block: not block.entered))

    def __repr__(self) -> str:
        return "implicit"


implicit = use_implicit = Implicit()


def _outside_blocks(of: Callable[[ImplicitTrace], bool]) -> Any:
    """The current trace, without the blocks on top of it that are such ones."""
    trace = traces.current_trace()
    while isinstance(trace, ImplicitTrace) and trace.is_block and of(trace):
        trace = trace.parent_trace
    return trace


class _Blocks(threading.local):
    outermost: ImplicitTrace | None = None


_blocks = _Blocks()


def _block_above(parent: Any) -> ImplicitTrace:
    """A block's trace. JAX caches programs per trace, so every outermost block of a thread has the same one."""
    if parent is not traces.eval_trace:
        return ImplicitTrace(parent, _BLOCK_TAG, is_block=True)
    if _blocks.outermost is None:
        _blocks.outermost = ImplicitTrace(parent, _BLOCK_TAG, is_block=True)
    return _blocks.outermost


def _is_whole(x: Any) -> bool:
    """Is this handed over as it is? Implicit arrays are; so are the mutable modules and variables of Flax NNX, of which
    a copy would swallow every update. The arrays inside those enter when an operation meets them."""
    nnx = sys.modules.get("flax.nnx")
    return is_implicit(x) or (nnx is not None and isinstance(x, (nnx.Module, nnx.Variable)))


# -- functions that run in steps: dispatch is on during each step, and off while they are suspended --------------------


def _unwrapped(trace: ImplicitTrace, tree: Any) -> Any:
    return jtu.tree_map(trace.unwrap, tree, is_leaf=_is_whole)


def _steps(trace: ImplicitTrace, inner: Any) -> Generator[Any, Any, Any]:
    """Drive a generator or coroutine, every step of it under `trace`."""
    resume, value = inner.send, None
    while True:
        trace.parent_trace = traces.current_trace()
        try:
            with traces.set_current_trace(trace):
                yielded = resume(value)
        except StopIteration as stop:
            return _unwrapped(trace, stop.value)
        try:
            value, resume = (yield _unwrapped(trace, yielded)), inner.send
        except GeneratorExit:
            with traces.set_current_trace(trace):
                inner.close()
            raise
        except BaseException as err:  # noqa: BLE001 - whatever was thrown in is for the inner generator
            value, resume = err, inner.throw


class _Awaitable:
    def __init__(self, trace: ImplicitTrace, inner: Any):
        self.trace, self.inner = trace, inner

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield from _steps(self.trace, self.inner))


def _trace_above() -> ImplicitTrace:
    return ImplicitTrace(traces.current_trace(), traces.TraceTag())


def _generator(fn: Any) -> Any:
    @functools.wraps(fn)
    def generator(*args: Any, **kwargs: Any) -> Any:
        return (yield from _steps(_trace_above(), fn(*args, **kwargs)))

    return generator


def _coroutine(fn: Any) -> Any:
    @functools.wraps(fn)
    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        return await _Awaitable(_trace_above(), fn(*args, **kwargs))

    return coroutine


def _async_generator(fn: Any) -> Any:
    @functools.wraps(fn)
    async def generator(*args: Any, **kwargs: Any) -> Any:
        trace, inner, sent = _trace_above(), fn(*args, **kwargs), None
        try:
            while True:
                try:
                    item = await _Awaitable(trace, inner.asend(sent))
                except StopAsyncIteration:
                    return
                sent = yield item
        finally:
            await _Awaitable(trace, inner.aclose())

    return generator


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
