"""`implicit`: the decorator, the call and the `with` block that turn dispatch on."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import jax.tree_util as jtu

from eformer._jax import traces

from .trace import ImplicitTrace, is_implicit, open_blocks

F = TypeVar("F", bound=Callable[..., Any])

# Shared by all blocks: a value made in one is understood in another.
_BLOCK_TAG = traces.TraceTag()


class Implicit:
    """Operations on implicit arrays dispatch to their handlers inside.

    Use it as a decorator or a wrapper (`implicit(f)`), or as a block (`with implicit:`). Blocks nest, end properly on
    exceptions, and belong to the thread and the asyncio task that entered them. A coroutine or generator function keeps
    dispatch to its own steps.
    """

    def __call__(self, fn: F) -> F:
        """`fn` with dispatch on: same signature, name and documentation."""
        if inspect.iscoroutinefunction(fn):
            return _coroutine(fn)
        if inspect.isasyncgenfunction(fn):
            return _async_generator(fn)
        if inspect.isgeneratorfunction(fn):
            return _generator(fn)

        @functools.wraps(fn)
        def with_dispatch(*args: Any, **kwargs: Any) -> Any:
            leaves, treedef = jtu.tree_flatten((args, kwargs), is_leaf=_is_whole)
            trace = ImplicitTrace(traces.current_trace(), traces.TraceTag())
            with traces.set_current_trace(trace):
                args, kwargs = jtu.tree_unflatten(treedef, [trace.wrap(leaf) for leaf in leaves])
                out = fn(*args, **kwargs)
            trace.closed = True
            return jtu.tree_map(trace.unwrap, out, is_leaf=_is_whole)

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
    return is_implicit(x) or isinstance(x, _nnx_references())


def _nnx_references() -> tuple[type, ...]:
    nnx = sys.modules.get("flax.nnx")
    return () if nnx is None else (nnx.Module, nnx.Variable)


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


def _step_trace() -> ImplicitTrace:
    return ImplicitTrace(traces.current_trace(), traces.TraceTag())


def _generator(fn: Any) -> Any:
    @functools.wraps(fn)
    def generator(*args: Any, **kwargs: Any) -> Any:
        return (yield from _steps(_step_trace(), fn(*args, **kwargs)))

    return generator


def _coroutine(fn: Any) -> Any:
    @functools.wraps(fn)
    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        return await _Awaitable(_step_trace(), fn(*args, **kwargs))

    return coroutine


def _async_generator(fn: Any) -> Any:
    @functools.wraps(fn)
    async def generator(*args: Any, **kwargs: Any) -> Any:
        trace, inner, sent = _step_trace(), fn(*args, **kwargs), None
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
