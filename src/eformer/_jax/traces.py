"""Traces and tracers: which one is current, binding on a given one, and the protocol JAX expects of one."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src.interpreters import batching as _batching
from jax.extend.core import TraceTag as TraceTag
from jax.extend.core import set_current_trace as set_current_trace

Trace = _core.Trace
Tracer = _core.Tracer
eval_trace = _core.eval_trace


def current_trace() -> Any:
    """The trace primitives bind on; evaluation when none is set (newer releases keep None there inside `bind`)."""
    trace = _core.trace_ctx.trace
    return eval_trace if trace is None else trace


def is_current(trace: Any) -> bool:
    """Is `trace` set as the current one? Not so inside `bind` of newer releases, which keep none there."""
    return _core.trace_ctx.trace is trace


def install_trace(trace: Any) -> None:
    """Make `trace` current on this thread until another one is set."""
    _core.trace_ctx.set_trace(trace)


def has_named_axes() -> bool:
    """Is the body of a shard_map, or of a vmap that names its axis, running?"""
    return _core.trace_ctx.axis_env is not _core.top_axis_env


def is_staging() -> bool:
    """Is a program being traced, as by jit? Transformations of values that are computed at once do not count."""
    return isinstance(jax.numpy.zeros(()), Tracer)


def bind_at(primitive: Any, trace: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
    """Bind on a given trace, bypassing the current one."""
    return primitive.bind_with_trace(trace, tuple(args), tuple(map(jax.typeof, args)), dict(params))


def bind_params(primitive: Any, params: dict[str, Any]) -> dict[str, Any]:
    """Parameters as `bind` wants them (call-like primitives carry functions rather than jaxprs)."""
    return primitive.get_bind_params(params)


def is_concrete(value: Any) -> bool:
    """Is this an array that has been computed, or is being computed?"""
    return isinstance(value, jax.Array) and not isinstance(value, Tracer)


def register_value_type(cls: type, aval_of: Callable[[Any], Any], canonicalize: Callable[[Any], Any]) -> None:
    """Let instances of `cls` be operands of any primitive."""
    _core.pytype_aval_mappings[cls] = aval_of
    _dtypes.register_canonicalize_value_handler(cls, canonicalize)


def register_tracer_type(cls: type) -> None:
    _core.pytype_aval_mappings[cls] = operator.attrgetter("aval")


def axis_mapped(tracer: Any, array: Any) -> int | None:
    """The axis of `array` along which a vmap maps it, if `tracer` is what that vmap made of this very array."""
    return tracer.batch_dim if isinstance(tracer, _batching.BatchTracer) and tracer.val is array else None


class LayeredTracer(Tracer):
    """A value of ours while a `LayeredTrace` with this tag is at work."""

    __slots__ = ["tag", "value"]

    def __init__(self, trace: LayeredTrace, value: Any):
        self._trace = trace
        self.value, self.tag = value, trace.tag

    def __getattr__(self, name: str) -> Any:
        if name != "aval":
            return super().__getattr__(name)  # pyright: ignore[reportAttributeAccessIssue]
        self.aval = self.value.aval  # at first use: it takes time, and placeholders have none
        return self.aval

    @property
    def layer(self) -> Any:
        """The trace it belongs to."""
        return self._trace


class LayeredTrace(Trace):
    """A trace above another one, which gets whatever this one does not take.

    A subclass implements `process_primitive(primitive, tracers, params)` and `call_functions`, which is given the
    primitives that JAX hands to a trace with functions instead of jaxprs: custom_jvp, custom_vjp and shard_map.
    """

    __slots__ = ("_own_ref", "parent_trace", "tag")

    def __init__(self, parent_trace: Any, tag: Any):
        super().__init__()
        self.parent_trace, self.tag = parent_trace, tag
        self.requires_low = False

    @property
    def _weakref(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What JAX keys its caches with. Flax NNX guards its mutable objects with it: to NNX, the trace around us.

        Should that function of JAX be renamed, assigning to an NNX variable inside `implicit` is refused.
        """
        asked_by = sys._getframe(1).f_code.co_name
        return self.parent_trace._weakref if asked_by == "get_opaque_trace_state" else self._own_ref

    @_weakref.setter
    def _weakref(self, ref: Any) -> None:
        self._own_ref = ref

    def call_functions(self, primitive: Any, tracers: Sequence[Any], params: dict[str, Any]) -> Any:
        raise NotImplementedError

    def stage_value(self, val: Any) -> Any:
        return val if isinstance(val, LayeredTracer) else self.parent_trace.stage_value(val)

    def cur_qdd(self, x: Any) -> Any:
        return self.parent_trace.cur_qdd(x)

    def process_call(self, primitive: Any, f: Any, tracers: Any, params: Any, /) -> Any:  # JAX 0.10 only
        with set_current_trace(self):
            return f.call_wrapped(*tracers)

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **params: Any) -> Any:
        return self.call_functions(primitive, tracers, {"fun": fun, "jvp": jvp, **params})

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **params: Any
    ) -> Any:
        return self.call_functions(primitive, tracers, {"fun": fun, "fwd": fwd, "bwd": bwd, **params})

    def process_shard_map(self, primitive: Any, fun: Any, tracers: Any, /, **params: Any) -> Any:
        return self.call_functions(primitive, tracers, {"fun": fun, **params})


def _computes_at_once() -> bool:
    """Is there nothing but layers of ours between the current trace and evaluation?"""
    trace = current_trace()
    while isinstance(trace, LayeredTrace):
        trace = trace.parent_trace
    return trace is eval_trace and not has_named_axes()


# What JAX does only where no program is traced: setting a mesh, a seed of the system's, the devices that pmap names.
_NOT_WHILE_TRACED = frozenset({"jax._src.sharding_impls", "jax._src.random.stateful_rng", "jax._src.pmap"})


def _answer_what_is_traced() -> None:
    """Under layers of ours alone no program is traced: what JAX does only then works there.

    JAX compares the current trace with its own one of evaluation, and there is no way to tell it of another. Every
    other question whether nothing is traced is still answered with no, so that jit does not run past our layer.
    Should JAX move those functions, they do inside `implicit` what they do inside jit: most refuse.
    """
    context = type(_core.trace_ctx)
    nothing_traced = context.is_top_level

    def is_top_level(self: Any) -> bool:
        if nothing_traced(self):
            return True
        frames = sys._getframe(1), sys._getframe(2)  # one of them may be `trace_state_clean`
        return any(f.f_globals.get("__name__") in _NOT_WHILE_TRACED for f in frames) and _computes_at_once()

    context.is_top_level = is_top_level


_answer_what_is_traced()
