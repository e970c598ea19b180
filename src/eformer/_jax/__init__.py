"""The only module that touches JAX internals. A new JAX release breaks this file or nothing.

Everything here is a thin, named view of one JAX fact; no policy, no logic of ours.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import distributed as _distributed
from jax._src import dtypes as _dtypes
from jax._src import mesh as _mesh
from jax._src import source_info_util as _source_info
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import mlir as _mlir
from jax.extend import core as _ext
from jax.extend import linear_util as _linear_util
from jax.interpreters import ad, batching, mlir

Primitive = _ext.Primitive
TraceTag = _ext.TraceTag
Trace = _core.Trace
Tracer = _core.Tracer
ShapedArray = _core.ShapedArray
set_current_trace = _ext.set_current_trace
take_current_trace = _ext.take_current_trace

__all__ = [
    "Primitive",
    "ShapedArray",
    "Trace",
    "TraceTag",
    "Tracer",
    "ad",
    "batching",
    "mlir",
    "set_current_trace",
    "take_current_trace",
]


# -- traces ------------------------------------------------------------------------------------------------------------


def current_trace() -> Any:
    """The trace primitives bind on; evaluation when none is set (newer releases keep None there inside `bind`)."""
    trace = _core.trace_ctx.trace
    return _core.eval_trace if trace is None else trace


def install_trace(trace: Any) -> None:
    """Make `trace` current on this thread until somebody sets another one."""
    _core.trace_ctx.set_trace(trace)


def is_eval_trace(trace: Any) -> bool:
    return trace is _core.eval_trace


def bind_at(primitive: Any, trace: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
    """Bind on a given trace, bypassing the current one."""
    return primitive.bind_with_trace(trace, tuple(args), tuple(map(jax.typeof, args)), dict(params))


def bind_params(primitive: Any, params: dict[str, Any]) -> dict[str, Any]:
    """Parameters as `bind` wants them (call-like primitives carry functions rather than jaxprs)."""
    return primitive.get_bind_params(params)


def register_value_type(cls: type, aval_of: Callable[[Any], Any], canonicalize: Callable[[Any], Any]) -> None:
    """Let instances of `cls` be operands of any primitive."""
    _core.pytype_aval_mappings[cls] = aval_of
    _dtypes.register_canonicalize_value_handler(cls, canonicalize)


def register_tracer_type(cls: type) -> None:
    _core.pytype_aval_mappings[cls] = lambda tracer: tracer.aval


_result_avals: dict[Any, list[Any] | None] = {}
_RESULT_AVALS_LIMIT = 8192


def result_avals(primitive: Any, args: Sequence[Any], params: dict[str, Any]) -> list[Any] | None:
    """Shapes and dtypes the primitive's own rule promises, or None where it has no such rule. Remembered."""
    if primitive.multiple_results:  # these often carry jaxprs, which a memo would keep alive
        return _evaluated(primitive, args, params)
    key = (
        primitive,
        tuple([(a.shape, a.dtype) for a in args]),
        tuple(params.items()),
        _config.enable_x64.value,
    )
    try:
        return _result_avals[key]
    except TypeError:  # an unhashable parameter
        return _evaluated(primitive, args, params)
    except KeyError:
        if len(_result_avals) >= _RESULT_AVALS_LIMIT:
            _result_avals.clear()
        found = _result_avals[key] = _evaluated(primitive, args, params)
        return found


def _evaluated(primitive: Any, args: Sequence[Any], params: dict[str, Any]) -> list[Any] | None:
    abstract_eval = getattr(primitive, "abstract_eval", None)
    if abstract_eval is None:
        return None
    out = abstract_eval(*map(jax.typeof, args), **params)[0]
    return list(out) if primitive.multiple_results else [out]


def lower_with_devices(primitive: Any) -> None:
    """Have the lowering of `primitive` told which devices the program will run on."""
    _dispatch.prim_requires_devices_during_lowering.add(primitive)


# -- functions and jaxprs inside parameters ----------------------------------------------------------------------------


def wrap_function(fun: Callable[..., Any], like: Any) -> Any:
    """Dress `fun` as the kind of function JAX passes around, with the debug information of another."""
    return _linear_util.wrap_init(fun, debug_info=like.debug_info)


def jaxpr_function(jaxpr: Any) -> Callable[..., list[Any]]:
    """A callable of an open or closed jaxpr (one class since 0.11; remat holds an open one in 0.10)."""
    if not hasattr(jaxpr, "consts"):
        jaxpr = _ext.ClosedJaxpr(jaxpr, ())
    return _ext.jaxpr_as_fun(jaxpr)


def open_jaxpr(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def jaxprs_in(params: dict[str, Any]) -> Iterable[Any]:
    """Every jaxpr stored in the parameters of an equation, those inside higher-level primitives included."""
    yield from _ext.jaxprs_in_params(params)
    hi_primitive = params.get("_prim")
    if hi_primitive is not None:
        inner = {k: v for k, v in vars(hi_primitive).items() if hasattr(v, "eqns") or hasattr(v, "jaxpr")}
        yield from (open_jaxpr(j) for j in inner.values())


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """(constants, carries) of a scan: plain integers up to 0.10, a tree since 0.11."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def inlined_early(inline: Any) -> bool:
    """Does `jit(inline=...)` ask for inlining while tracing? A plain flag up to 0.10, an enum since."""
    return inline is True or getattr(inline, "name", "") == "JAX_EARLY"


def without_argument_names(debug_info: Any) -> Any:
    """Debug information for a function whose arguments are no longer those the user named."""
    return debug_info._replace(arg_names=None)


def cotangents_only(out: Any) -> list[Any]:
    """What a custom backward pass returned; since 0.11 it may come as (cotangents, logs)."""
    if isinstance(out, tuple) and len(out) == 2 and isinstance(out[0], (list, tuple)):
        return list(out[0])
    return list(out)


def is_symbolic_zero(x: Any) -> bool:
    return type(x) is ad.Zero or isinstance(x, jax.custom_derivatives.SymbolicZero)


def symbolic_zero(aval: Any) -> Any:
    return jax.custom_derivatives.SymbolicZero(aval.to_tangent_aval())


def remat_hi_primitive(hi_primitive: Any) -> tuple[Any, bool, Any] | None:
    """(jaxpr, prevent_cse, policy) if this is jax.checkpoint in its newer form."""
    if type(hi_primitive).__name__ != "RematTraced":
        return None
    return hi_primitive.jaxpr, getattr(hi_primitive, "prevent_cse", True), hi_primitive.policy


def is_jnp_hi_primitive(hi_primitive: Any) -> bool:
    """Does this belong to jax.numpy itself (safe to expand), as opposed to carrying a user's derivative rule?"""
    return type(hi_primitive).__module__.startswith("jax._src.numpy.")


# -- abstract values ---------------------------------------------------------------------------------------------------


def derived_aval(shape: tuple[int, ...], dtype: Any, leaves: Sequence[Any]) -> Any:
    """Aval of an array computed from `leaves`: inside shard_map it varies over the axes its parts vary over."""
    varying: list[Any] = [leaf.aval for leaf in leaves if isinstance(leaf, Tracer)]
    varying = [a for a in varying if getattr(a, "mat", None) is not None and a.mat.varying]
    if not varying:
        return ShapedArray(shape, dtype)
    first = varying[0]
    axes = frozenset().union(*(a.mat.varying for a in varying))
    sharding = first.sharding.update(spec=jax.P(*[None] * len(shape)))
    mat = first.mat.update(varying=axes)
    return first.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding, manual_axis_type=mat)


def explicit_sharding_of(leaf: Any) -> Any:
    """The sharding that is part of a leaf's type (explicit meshes), or None."""
    try:
        sharding = jax.typeof(leaf).sharding
    except (TypeError, AttributeError):
        return None
    mesh = sharding.mesh
    return sharding if not mesh.empty and mesh._any_axis_explicit else None


def with_sharding_type(aval: Any, sharding: Any) -> Any:
    return aval.update(sharding=sharding)


def is_staging() -> bool:
    """Is a program being traced, as by jit? Transformations of values that are computed at once do not count."""
    return isinstance(jax.numpy.zeros(()), Tracer)


def active_mesh() -> Any:
    """The mesh a bare PartitionSpec refers to here: that of `jax.set_mesh`, else that of `with mesh:`; else None.

    In a program being traced it is the abstract one, since JAX uses a trace again on meshes with other devices.
    """
    abstract = jax.sharding.get_abstract_mesh()
    manual = any(t == jax.sharding.AxisType.Manual for t in abstract.axis_types)
    current = abstract if manual or is_staging() else _mesh.get_concrete_mesh()
    found = (current, _mesh.thread_resources.env.physical_mesh)
    return next((mesh for mesh in found if not mesh.empty), None)


# -- processes ---------------------------------------------------------------------------------------------------------


def distributed_client() -> Any:
    """The client of the service that joins the processes of one program, or None before `jax.distributed.initialize`.

    Unlike a collective, what it does has a time limit.
    """
    return _distributed.global_state.client


# -- who is calling ----------------------------------------------------------------------------------------------------

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_source_info.register_exclusion(_PACKAGE + os.sep)


class _Replays(threading.local):
    def __init__(self) -> None:
        self.tracebacks: list[Any] = []


_replays = _Replays()


class replaying:
    """A block in which a jaxpr is replayed: its equations may have lost their origin, the call around it has not."""

    __slots__ = ()

    def __enter__(self) -> None:
        _replays.tracebacks.append(_source_info._source_info_context.context.traceback)

    def __exit__(self, *exc: object) -> None:
        _replays.tracebacks.pop()


def replayed_location() -> tuple[str, int] | None:
    """(file, line) the jaxpr being replayed remembers for the operation being processed, or None."""
    here = _source_info._source_info_context.context.traceback
    for traceback in (here, *reversed(_replays.tracebacks)):
        frame = _source_info.user_frame(traceback) if traceback is not None else None
        if frame is not None:
            return frame.file_name, frame.start_line
    return None


def calling_location() -> tuple[str, int]:
    """(file, line) of the user's code that is running."""
    running = sys._getframe(1)  # JAX cuts its own tracebacks at the function being traced
    while running is not None:
        if _source_info.is_user_filename(running.f_code.co_filename):
            return running.f_code.co_filename, running.f_lineno
        running = running.f_back
    return "<unknown>", 0


_OPERATOR_MODULE = "jax._src.numpy.array_methods"
_CONSTRUCTOR_MODULE = "jax._src.numpy.array_constructors"
_CALLED_FOR_OTHERS = ("jax.", "flax.", "haiku.", "equinox.", "optax.")


def read_by_array_operator(depth: int = 2) -> bool:
    """Is an attribute being read by an operator of jax.Array?

    Those ask for `__jax_array__` before they let the other operand have its say. Should JAX move that code, the answer
    becomes False: `x @ q` outside a scope then materializes instead of dispatching, and stays right.
    """
    return sys._getframe(depth).f_globals.get("__name__") == _OPERATOR_MODULE


def read_by_array_constructor(depth: int = 2) -> bool:
    """Is an attribute being read by jnp.asarray or jnp.array, that is, was a dense array asked for by name?

    Not where JAX or a framework calls these on arrays it is given: nobody asked for that.
    """
    frame: FrameType | None = sys._getframe(depth)
    asked = False
    while frame is not None and (name := frame.f_globals.get("__name__", "")).startswith(_CALLED_FOR_OTHERS):
        if name != _CONSTRUCTOR_MODULE:
            return False
        asked, frame = True, frame.f_back
    return asked


_VMAP_FUNCTIONS = {"flatten_fun_for_vmap": "in_axes", "vmap_f": "out_axes"}


def _caller_of_unflatten(depth: int) -> FrameType | None:
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and frame.f_code.co_name in ("tree_unflatten", "check"):
        frame = frame.f_back
    return frame


def vmap_in_charge(depth: int = 2) -> str | None:
    """While a tree is put together: is vmap doing that, for its arguments ("in_axes") or its results ("out_axes")?

    Should JAX rename these functions, the answer becomes None, and axes that cannot be mapped are no longer refused.
    """
    frame = _caller_of_unflatten(depth)
    return None if frame is None else _VMAP_FUNCTIONS.get(frame.f_code.co_name)


def vmap_out_axes(depth: int = 2) -> int | None:
    """The axis results are stacked along, where vmap is told one axis for all of them."""
    frame = _caller_of_unflatten(depth)
    axes = None if frame is None else frame.f_locals.get("out_axes")
    return axes if isinstance(axes, int) else None


def vmapped_axis(leaf: Any) -> int | None:
    """The axis along which the innermost vmap maps `leaf`, if it does."""
    mapped = isinstance(leaf, _batching.BatchTracer) and leaf._trace is current_trace()
    return leaf.batch_dim if mapped else None


def read_as_opaque_state(depth: int = 2) -> bool:
    """Is the identity of a trace being read by a library that guards its mutable objects with it (Flax NNX)?"""
    return sys._getframe(depth).f_code.co_name == "get_opaque_trace_state"


# -- names of primitives -----------------------------------------------------------------------------------------------

# Primitives of modules JAX loads on first use.
_LAZY_NAMES = frozenset(
    {"pallas_call", "ffi_call", "pure_callback", "io_callback", "debug_callback", "custom_vmap_call"}
)


def primitive_names() -> frozenset[str]:
    """The name of every primitive JAX knows now: anything with a lowering, a batching or a differentiation rule."""
    tables: tuple[Any, ...] = (
        _mlir._lowerings,
        *_mlir._platform_specific_lowerings.values(),
        _batching.fancy_primitive_batchers,
        ad.primitive_jvps,
    )
    names = {primitive.name for table in tables for primitive in table}
    names.update(p.name for p in vars(_ext.primitives).values() if isinstance(p, Primitive))
    names.update(("custom_jvp_call", "custom_vjp_call", "shard_map", "call_hi_primitive"))
    return frozenset(names) | _LAZY_NAMES


def lax_primitive(name: str) -> Any:
    """`jax.lax.<name>_p`, if there is one."""
    return getattr(jax.lax, f"{name}_p", None)
