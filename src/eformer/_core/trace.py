"""The trace: where a primitive with an implicit operand is met, and what is done with it.

Dense values are never wrapped. A primitive without an implicit operand binds on the parent trace untouched. Otherwise
the order is: registered handlers, the structural rule of a higher-order primitive, then materialization.
"""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from eformer import _messages, errors
from eformer._jax import avals, callers, jaxprs, traces

from . import materialization as _materialization
from . import operators as _operators
from .array import ImplicitArray
from .box import box_p, unbox
from .registry import registry

registry.any_operand = jax.Array | ImplicitArray

# Structural rules by primitive name: rule(primitive, values, params) -> result. `rules_*` fill it in.
STRUCTURAL: dict[str, Callable[..., Any]] = {}
# Rules of the three primitives JAX hands to traces with functions instead of jaxprs.
CALL_RULES: dict[str, Callable[..., Any]] = {}

# The `with implicit:` blocks entered in this context, outermost first.
open_blocks: ContextVar[tuple[Any, ...]] = ContextVar("eformer_open_blocks", default=())

# What compiled products depend on, beside the settings of JAX; other rooms add theirs.
switches: list[Callable[[], Any]] = []

_COMMUTATIVE = frozenset({"add", "mul", "max", "min", "and", "or", "xor", "eq", "ne", "add_any"})


def is_implicit(x: Any) -> bool:
    return isinstance(x, ImplicitArray)


def rule(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a structural rule for primitives of these names."""

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        STRUCTURAL.update(dict.fromkeys(names, fn))
        return fn

    return decorate


class ImplicitTracer(traces.LayeredTracer):
    """An implicit array while a function runs under `implicit`."""

    __slots__ = ()

    def full_lower(self) -> Any:
        """A tracer that outlived its `with` block, or left its task, is an ordinary array from then on."""
        return self if self.layer.is_open() else _materialization.dense_for("a value used after its scope", self.value)

    def to_concrete_value(self) -> Any:
        """`bool(x)`, `x.item()`, boolean masks: as on a plain array, unless a surrounding jit hides the numbers.

        JAX mostly asks only whether there is such a value, so it is the array itself: nothing is computed yet.
        """
        hidden = any(isinstance(leaf, traces.Tracer) for leaf in jtu.tree_leaves(self.value))
        return None if hidden else self.value

    def materialize(self) -> Any:
        with traces.set_current_trace(self.layer.parent_trace):
            return _materialization.materialize_on_request(self.value)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        if self.to_concrete_value() is None:
            return super().__array__(*args, **kwargs)
        return self.value.__array__(*args, **kwargs)

    def item(self, *args: Any) -> Any:
        concrete = self.to_concrete_value()
        return super().item(*args) if concrete is None else self.materialize().item(*args)  # pyright: ignore[reportAttributeAccessIssue]

    def tolist(self) -> Any:
        concrete = self.to_concrete_value()
        return super().tolist() if concrete is None else self.materialize().tolist()

    @property
    def nbytes(self) -> int:
        return self.value.nbytes


class ImplicitTrace(traces.LayeredTrace):
    """Intercepts primitives on ImplicitTracers of its own tag; everything else goes to `parent_trace`."""

    __slots__ = ("closed", "entered", "is_block")

    def __init__(self, parent_trace: Any, tag: Any, is_block: bool = False):
        super().__init__(parent_trace, tag)
        self.closed, self.is_block = False, is_block
        self.entered = 0  # how often a block was entered and not left yet

    def is_open(self) -> bool:
        """A `with` block is open for the asyncio task that entered it, although its trace is current on the thread."""
        return self in open_blocks.get() if self.is_block else not self.closed

    def unwrap(self, x: Any) -> Any:
        return x.value if type(x) is ImplicitTracer and x.tag is self.tag else x

    def wrap(self, x: Any) -> Any:
        return ImplicitTracer(self, x) if isinstance(x, ImplicitArray) else x

    def process_primitive(self, primitive: Any, tracers: Sequence[Any], params: dict[str, Any], /) -> Any:
        if self.is_block and not self.is_open():
            return traces.bind_at(primitive, self.parent_trace, tracers, params)
        tag, found, values = self.tag, False, []
        for t in tracers:
            if type(t) is ImplicitTracer and t.tag is tag:
                t, found = t.value, True
            elif not found and isinstance(t, ImplicitArray):
                found = True
            values.append(t)
        if primitive is box_p:
            return ImplicitTracer(self, unbox(values, params["treedef"]))
        if not found and not (
            params and (primitive.multiple_results or primitive.name in STRUCTURAL) and jaxprs.params_use(params, box_p)
        ):
            return traces.bind_at(primitive, self.parent_trace, values, params)
        if traces.is_current(self.parent_trace):
            out = dispatch(primitive, values, params)
        else:
            with traces.set_current_trace(self.parent_trace):
                out = dispatch(primitive, values, params)
        return [self.wrap(v) for v in out] if primitive.multiple_results else self.wrap(out)

    def call_functions(self, primitive: Any, tracers: Sequence[Any], params: dict[str, Any]) -> Any:
        return CALL_RULES[primitive.name](self, primitive, tracers, params)


traces.register_tracer_type(ImplicitTracer)


def run(f: Callable[..., Sequence[Any]], values: Sequence[Any], tag: Any = None) -> list[Any]:
    """Call `f` on values under a new trace above the current one. `tag` lets closed-over tracers of a trace be seen."""
    trace = ImplicitTrace(traces.current_trace(), tag or traces.TraceTag())
    with traces.set_current_trace(trace):
        out = f(*[trace.wrap(v) for v in values])
    return [trace.unwrap(v) for v in out]


# One trace for all operators on values that are computed at once: JAX remembers more of a trace it has seen before.
_EAGER = ImplicitTrace(traces.eval_trace, traces.TraceTag())


def apply(f: Callable[..., Any], *args: Any) -> Any:
    """`f(*args)` with dispatch, for functions whose arguments are values and whose result is one array or a few."""
    return _compiled(args, _applied, f) if f is operator.matmul else _applied(f, *args)


def _compiled(values: Sequence[Any], f: Callable[..., Any], *static: Any) -> Any:
    """`f(*static, *values)`; as one compiled call, where all values have been computed.

    JAX knows it again by the structure and the types of the values and by its own settings, the policy among them.
    Types that were materialized go the long way from then on, where every caller is warned.
    """
    if traces.current_trace() is traces.eval_trace:
        state = (registry.version, *[switch() for switch in switches])
        jitted, slow = _jitted(state, f, *static)
        if all((is_implicit(v) or traces.is_concrete(v)) and type(v) not in slow for v in values):
            return jitted(*values)
    return f(*static, *values)


@functools.lru_cache(maxsize=1024)
def _jitted(state: tuple[Any, ...], f: Callable[..., Any], *static: Any) -> tuple[Callable[..., Any], set[type]]:
    """The compiled call, for one state of the handlers and the switches; and the types that it is not for."""
    slow: set[type] = set()

    @jax.jit
    def product(*values: Any) -> Any:
        notices: list[Any] = []
        with _materialization.during(notices=notices):
            out = f(*static, *values)
        slow.update(kind for kind, *_ in notices)
        return out

    return product, slow


def _applied(f: Callable[..., Any], *args: Any) -> Any:
    parent = traces.current_trace()
    trace = _EAGER if parent is traces.eval_trace else ImplicitTrace(parent, traces.TraceTag())
    with traces.set_current_trace(trace):
        out = f(*map(trace.wrap, args))
    if isinstance(out, (tuple, list)):
        return jtu.tree_map(trace.unwrap, out)
    return trace.unwrap(out)


_operators.apply = apply


def call_jaxpr(jaxpr: Any, values: Sequence[Any]) -> list[Any]:
    """Replay a jaxpr with dispatch."""
    with callers.replaying():
        return run(jaxprs.jaxpr_function(jaxpr), values)


def dispatch(primitive: Any, values: list[Any], params: dict[str, Any]) -> Any:
    """The result of a primitive on values of which some are implicit. Runs under the parent trace."""
    if primitive.name == "dot_general":
        params = avals.without_manual_sharding(params)
    if primitive.name == "dot_general" and all(v.compiles_products for v in values if is_implicit(v)):
        return _compiled(values, _dispatched, primitive, tuple(params.items()))
    return _dispatched(primitive, params, *values)


def _dispatched(primitive: Any, parameters: Any, *operands: Any) -> Any:
    values, params = list(operands), dict(parameters)
    out = call_handlers(primitive, values, params)
    if out is not NotImplemented:
        return out
    structural = STRUCTURAL.get(primitive.name)
    if structural is not None:
        return structural(primitive, values, params)
    first = next(v for v in values if isinstance(v, ImplicitArray))
    return type(first).default_handler(primitive, *values, params=params)


def call_handlers(primitive: Any, values: list[Any], params: dict[str, Any], check: bool = True) -> Any:
    """Ask the handlers for these operands, best first; NotImplemented if none of them wants to."""
    name = registry.filed_under(primitive)
    if name is None:
        return NotImplemented
    operands = [_as_array(value) for value in values]
    types = tuple([type(value) if isinstance(value, ImplicitArray) else jax.Array for value in values])
    out = _ask(primitive, name, types, operands, params, check)
    if out is not NotImplemented or name not in _COMMUTATIVE or types[0] is types[1]:
        return out
    if all(v.commute_ops for v in values if isinstance(v, ImplicitArray)):  # a handler for (Q, dense): (dense, Q) too
        return _ask(primitive, name, types[::-1], operands[::-1], params, check)
    return NotImplemented


def _ask(primitive: Any, name: str, types: Any, operands: list[Any], params: dict[str, Any], check: bool) -> Any:
    skip, _materialization.state.declined = 0, None
    while (handler := registry.lookup(name, types, skip)) is not None:
        # Before the handler runs: what the operation cannot mean for arrays is refused in JAX's own words.
        expected = avals.result_avals(primitive, operands, params) if check else None
        outer = _materialization.state.primitive, _materialization.state.requested
        # A handler of someone else that says materialize() means it.
        ours = (handler.fn.__module__ or "").startswith("eformer.")  # None for what `exec` made
        _materialization.state.primitive = primitive if ours else None
        _materialization.state.requested = False
        try:
            out = handler(primitive, operands, params)
        finally:
            _materialization.state.primitive, _materialization.state.requested = outer
        if out is not NotImplemented:
            return _checked(handler, primitive, out, operands, expected) if check else out
        _materialization.state.declined = primitive, handler.name, params
        skip += 1
    return NotImplemented


def _as_array(value: Any) -> Any:
    """Handlers see arrays, and give arrays: numbers and numpy values become jax.Arrays."""
    # `isinstance(value, jax.Array)` goes through a metaclass. Those have an aval; so have literals, without a shape.
    is_array = isinstance(value, ImplicitArray) or (hasattr(value, "aval") and hasattr(value, "shape"))
    return value if is_array else jnp.asarray(value)


def _checked(handler: Any, primitive: Any, out: Any, operands: list[Any], expected: list[Any] | None) -> Any:
    """The result of a handler, if it can be the result of this primitive."""
    if expected is not None and not primitive.multiple_results:
        # An implicit array knows its shape before its aval, which nobody may ask for.
        found, aval = out if isinstance(out, ImplicitArray) else getattr(out, "aval", None), expected[0]
        if found is not None and found.shape == aval.shape and found.dtype == aval.dtype:  # the usual case
            return out
    results = out if primitive.multiple_results and isinstance(out, (list, tuple)) else [out]
    if expected is not None:
        if len(results) != len(expected):
            _wrong_result(handler, primitive, f"{len(results)} results", f"{len(expected)}", operands)
        for result, aval in zip(results, expected, strict=True):
            _check_one(handler, primitive, result, aval, operands)
    results = [_as_array(r) for r in results]
    return results if primitive.multiple_results else results[0]


def _check_one(handler: Any, primitive: Any, result: Any, aval: Any, operands: list[Any]) -> None:
    if not hasattr(result, "shape") and not isinstance(result, (bool, int, float, complex)):
        _wrong_result(handler, primitive, f"{result!r} ({type(result).__name__})", _shown(aval), operands)
    shape, dtype = jnp.shape(result), jnp.result_type(result)
    if shape == aval.shape and (dtype == aval.dtype or not hasattr(result, "dtype")):
        return
    found = _shown(jax.ShapeDtypeStruct(shape, dtype))
    if shape == ():  # broadcasts like any scalar; the odd handler uses that on purpose
        message = f"handler {handler.name} for {primitive} returned a scalar {found}, expected {_shown(aval)}"
        warnings.warn(message, errors.HandlerResultWarning, stacklevel=2)
        return
    _wrong_result(handler, primitive, found, _shown(aval), operands)


def _wrong_result(handler: Any, primitive: Any, found: str, expected: str, operands: list[Any]) -> None:
    shown = ", ".join(f"{type(v).__name__ if is_implicit(v) else 'Array'}{list(v.shape)}" for v in operands)
    raise errors.HandlerResultError(
        _messages.WRONG_RESULT.format(
            handler=handler.name, primitive=primitive, found=found, expected=expected, operands=shown
        )
    )


def _shown(aval: Any) -> str:
    return f"{aval.dtype.name}[{','.join(map(str, aval.shape))}]"
