"""`implicit`: the decorator, the call and the `with` block that turn dispatch on."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import jax.tree_util as jtu

from .. import _jax_compat as compat
from ._trace import ImplicitTrace, is_implicit

F = TypeVar("F", bound=Callable[..., Any])

# Shared by all blocks: a value made in one is understood in another.
_BLOCK_TAG = compat.TraceTag()


class Implicit:
    """Operations on implicit arrays dispatch to their handlers inside.

    Use it as a decorator or a wrapper (`implicit(f)`), or as a block (`with implicit:`). Blocks nest, end properly on
    exceptions, and are local to a thread. A coroutine or generator function keeps dispatch to its own steps.
    """

    def __init__(self) -> None:
        self._entered = threading.local()

    def __call__(self, fn: F) -> F:
        """`fn` with dispatch on: same signature, name and documentation."""
        if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn):
            return _stepwise(fn)

        @functools.wraps(fn)
        def with_dispatch(*args: Any, **kwargs: Any) -> Any:
            leaves, treedef = jtu.tree_flatten((args, kwargs), is_leaf=is_implicit)
            trace = ImplicitTrace(compat.current_trace(), compat.TraceTag())
            # Unflatten under the new trace: Flax NNX variables check the current trace when they are rebuilt.
            with compat.set_current_trace(trace):
                args, kwargs = jtu.tree_unflatten(treedef, [trace.wrap(leaf) for leaf in leaves])
                out = fn(*args, **kwargs)
            trace.closed = True
            return jtu.tree_map(trace.unwrap, out, is_leaf=is_implicit)

        return with_dispatch  # pyright: ignore[reportReturnType]

    def __enter__(self) -> Implicit:
        trace = ImplicitTrace(compat.current_trace(), _BLOCK_TAG)
        compat.install_trace(trace)
        self._entered.__dict__.setdefault("traces", []).append(trace)
        return self

    def __exit__(self, *exc: object) -> None:
        # Coroutines and generators on one thread may leave in another order than they entered. A closed trace passes
        # everything on, so it is enough to close ours and to uncover the innermost open one.
        self._entered.traces.pop().closed = True
        current = compat.current_trace()
        while isinstance(current, ImplicitTrace) and current.closed:
            current = current.parent_trace
        compat.install_trace(current)

    def __repr__(self) -> str:
        return "implicit"


implicit = use_implicit = Implicit()


def _stepwise(fn: Any) -> Any:
    """A coroutine or generator function whose steps, and only they, run with dispatch."""

    def steps(inner: Any) -> Generator[Any, Any, Any]:
        trace, send, value = ImplicitTrace(compat.current_trace(), _BLOCK_TAG), inner.send, None
        while True:
            trace.parent_trace = compat.current_trace()
            try:
                with compat.set_current_trace(trace):
                    yielded = send(value)
            except StopIteration as stop:
                trace.closed = True
                return jtu.tree_map(trace.unwrap, stop.value, is_leaf=is_implicit)
            try:
                value, send = (yield jtu.tree_map(trace.unwrap, yielded, is_leaf=is_implicit)), inner.send
            except GeneratorExit:
                inner.close()
                raise
            except BaseException as err:  # noqa: BLE001 - whatever was thrown in is for the inner generator
                value, send = err, inner.throw

    if inspect.iscoroutinefunction(fn):

        class Steps:
            def __init__(self, inner: Any):
                self.inner = inner

            def __await__(self) -> Any:
                return (yield from steps(self.inner))

        @functools.wraps(fn)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return await Steps(fn(*args, **kwargs))

        return coroutine

    @functools.wraps(fn)
    def generator(*args: Any, **kwargs: Any) -> Any:
        return (yield from steps(fn(*args, **kwargs)))

    return generator
