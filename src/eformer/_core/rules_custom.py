"""Rules of custom_jvp, custom_vjp and shard_map, which JAX hands to a trace as functions rather than jaxprs.

The functions are one-shot (stores inside them may be filled once), so they are never called to try something out. They
run under a trace with the tag of the surrounding one: values they closed over are still ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec

from eformer._jax import jaxprs, traces

from .box import jvp_of_moving
from .fields import is_stored_along
from .materialization import dense_for, during, materialize
from .rules_call import child_specs
from .trace import CALL_RULES, ImplicitTrace, call_handlers, is_implicit, run


def _traced(trace: ImplicitTrace, function: Any) -> Callable[..., list[Any]]:
    return lambda *values: run(functools.partial(jaxprs.called, function), values, trace.tag)


def _dense_results(primitive: Any, f: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    return lambda *values: [dense_for(primitive, out) for out in f(*values)]


def _handled(trace: ImplicitTrace, primitive: Any, values: list[Any], params: dict[str, Any]) -> Any:
    """What a user's handler makes of the call, its functions made callable on implicit and dense values alike."""
    called: list[str] = []

    def callable_one(name: str, function: Any) -> Callable[..., list[Any]]:
        run_it = _traced(trace, function)
        return lambda *args: called.append(name) or run_it(*args)

    functions = {k: callable_one(k, v) for k, v in params.items() if jaxprs.is_function(v)}
    with traces.set_current_trace(trace.parent_trace):
        out = call_handlers(primitive, values, {**params, **functions}, check=False)
        if out is NotImplemented:
            return out
        if not called:  # JAX reads the structure of the result off the function, so it must have run
            jax.eval_shape(functions["fun"], *values)
    return [trace.wrap(o) for o in (out if isinstance(out, (list, tuple)) else [out])]


def _custom_jvp(trace: ImplicitTrace, primitive: Any, tracers: Any, params: dict[str, Any]) -> Any:
    values = [trace.unwrap(t) for t in tracers]
    fun, jvp, symbolic_zeros = params["fun"], params["jvp"], params["symbolic_zeros"]
    call = _dense_results(primitive, _traced(trace, fun))
    differentiate = _dense_results(primitive, _traced(trace, jvp))
    if not any(map(is_implicit, values)):
        functions = {"fun": call, "jvp": differentiate}
        return jaxprs.bind_functions(primitive, trace.parent_trace, values, params, functions)
    handled = _handled(trace, primitive, values, params)
    if handled is not NotImplemented:
        return handled

    f = jax.custom_jvp(lambda *vals: call(*vals))

    def jvp_rule(primals: Any, tangents: Any) -> Any:
        pairs = [_pair(p, t) for p, t in zip(primals, tangents, strict=True)]
        moves = [t if symbolic_zeros else jaxprs.instantiated(t) for _, t in pairs]
        out = differentiate(*[p for p, _ in pairs], *moves)
        return out[: len(out) // 2], out[len(out) // 2 :]

    # Zeros stay symbolic up to here, so that only operands with a tangent are differentiated.
    f.defjvp(jvp_rule, symbolic_zeros=True)
    with traces.set_current_trace(trace.parent_trace):
        return f(*values)


def _pair(primal: Any, tangent: Any) -> tuple[Any, Any]:
    """A primal and its tangent for a user's rule: dense if it is differentiated, else as it is, with a zero."""
    if not is_implicit(primal):
        return primal, tangent
    leaves, treedef = jtu.tree_flatten(primal)
    tangents = treedef.flatten_up_to(tangent)
    if all(map(jaxprs.is_symbolic_zero, tangents)):
        return primal, jaxprs.symbolic_zero(primal.aval)
    return jvp_of_moving(lambda *ls: materialize(jtu.tree_unflatten(treedef, ls)), leaves, tangents)


def _custom_vjp(trace: ImplicitTrace, primitive: Any, tracers: Any, params: dict[str, Any]) -> Any:
    values = [trace.unwrap(t) for t in tracers]
    fun, fwd, bwd, symbolic_zeros = params["fun"], params["fwd"], params["bwd"], params["symbolic_zeros"]
    call = _dense_results(primitive, _traced(trace, fun))
    if not any(map(is_implicit, values)):
        functions = {"fun": call, "fwd": _dense_results(primitive, _traced(trace, fwd)), "bwd": bwd}
        return jaxprs.bind_functions(primitive, trace.parent_trace, values, params, functions)
    handled = _handled(trace, primitive, values, params)
    if handled is not NotImplemented:
        return handled

    f = jax.custom_vjp(lambda *vals: call(*vals))

    def forward_rule(*args: Any) -> Any:
        # With `symbolic_zeros=True` every leaf is a pair of a value and whether it is differentiated.
        vals = jtu.tree_map(lambda p: p.value, args, is_leaf=_is_pair)
        moving = [any(p.perturbed for p in jtu.tree_leaves(arg, is_leaf=_is_pair)) for arg in args]
        perturbed = moving if symbolic_zeros else [True] * len(vals)
        flat = _traced(trace, fwd)(*[x for pair in zip(vals, perturbed, strict=True) for x in pair])
        residuals, out = jaxprs.split_forward(flat, vals, params)
        wanted = [
            _split_leaves(a) if is_implicit(v) and m else None for a, v, m in zip(args, vals, moving, strict=True)
        ]
        return [dense_for(primitive, o) for o in out], (residuals, wanted)

    def backward_rule(saved: Any, cotangents: Any) -> tuple[Any, ...]:
        residuals, wanted = saved
        cotangents = cotangents if symbolic_zeros else list(map(jaxprs.instantiated, cotangents))
        out = run(functools.partial(jaxprs.called_backward, bwd), [*residuals, *cotangents], trace.tag)
        return tuple(_pull_back(v, leaves, ct) for v, leaves, ct in zip(values, wanted, out, strict=True))

    # Symbolic zeros tell which operands are differentiated: only those are pulled back to their children.
    f.defvjp(forward_rule, backward_rule, symbolic_zeros=True)
    with traces.set_current_trace(trace.parent_trace):
        return f(*values)


def _is_pair(x: Any) -> bool:
    return isinstance(x, jax.custom_derivatives.CustomVJPPrimal)


def _split_leaves(arg: Any) -> tuple[list[Any], list[Any]]:
    """The leaves of one operand that are differentiated, and those that are not; None where it is the other kind."""
    pairs = jtu.tree_leaves(arg, is_leaf=_is_pair)
    return [p.value if p.perturbed else None for p in pairs], [None if p.perturbed else p.value for p in pairs]


def _pull_back(value: Any, leaves: Any, cotangent: Any) -> Any:
    """The cotangent of an operand: for an implicit one, pulled back through `materialize` to the children that move."""
    if not is_implicit(value):
        return None if jaxprs.is_symbolic_zero(cotangent) else cotangent
    if leaves is None:
        return None
    moving, fixed = leaves
    treedef = jtu.tree_structure(value)
    if cotangent is None or jaxprs.is_symbolic_zero(cotangent):
        cotangent = jnp.zeros(value.shape, value.dtype)

    def dense(*operands: Any) -> Any:
        given = iter(operands)
        whole = [f if m is None else next(given) for m, f in zip(moving, fixed, strict=True)]
        return materialize(jtu.tree_unflatten(treedef, whole))

    _, pull = jax.vjp(dense, *[m for m in moving if m is not None])
    found = iter(pull(materialize(cotangent)))
    return jtu.tree_unflatten(treedef, [None if m is None else next(found) for m in moving])


def _shard_map(trace: ImplicitTrace, primitive: Any, tracers: Any, params: dict[str, Any]) -> Any:
    """Split the children as the specs of the logical arrays say; an array that cannot be split so enters dense.

    A result is joined from its children along axes that all of them have; along others it leaves dense.
    """
    values = [trace.unwrap(t) for t in tracers]
    if any(map(is_implicit, values)):
        with traces.set_current_trace(trace.parent_trace):
            handled = call_handlers(primitive, values, params, check=False)
        if handled is not NotImplemented:
            return handled
    fun, args, specs = params["fun"], [], []
    for value, spec in zip(values, params["in_specs"], strict=True):
        per_leaf = [spec]
        if is_implicit(value):
            with traces.set_current_trace(trace.parent_trace):
                value, per_leaf = _split(primitive, value, NamedSharding(params["mesh"], spec))
        args.append(value)
        specs.extend(per_leaf)
    leaves, treedef = jtu.tree_flatten(args)
    places: list[Any] = []

    def body(*leaves: Any) -> Any:
        inner = ImplicitTrace(traces.current_trace(), trace.tag)
        with traces.set_current_trace(inner):
            out = fun(*map(inner.wrap, jtu.tree_unflatten(treedef, leaves)))
        unfolded, found = jaxprs.unfolded_results(lambda t, spec: _joined(primitive, inner.unwrap(t), spec), out)
        places[:] = [found]
        return unfolded

    whole = jaxprs.bind_shard_map(primitive, trace.parent_trace, leaves, params, body, specs)
    return jaxprs.folded_results(trace.wrap, whole, places[0])


def _joined(primitive: Any, value: Any, spec: PartitionSpec) -> tuple[Any, list[PartitionSpec]]:
    """A result of the body and a spec for every leaf; the dense array and its spec where leaves cannot be joined so."""
    if not is_implicit(value) or len(spec) > value.ndim or spec.unreduced:
        return dense_for(primitive, value), [spec]
    split = [axis for axis, entry in enumerate(spec) if entry is not None]
    if not all(is_stored_along(value, axis) for axis in split):
        return dense_for(primitive, value), [spec]
    return value, [PartitionSpec(*spec[: max(split, default=-1) + 1])] * len(jtu.tree_leaves(value))


def _split(primitive: Any, q: Any, sharding: NamedSharding) -> tuple[Any, list[Any]]:
    """The array, stored so that it can be split, and a spec for every leaf; or the dense array and its spec."""
    stored = q.stored_for(sharding)
    specs = child_specs(stored, sharding)
    if specs is not None:
        return stored, specs
    with during(cut=sharding.spec):
        return dense_for(primitive, q), [sharding.spec]


CALL_RULES.update({"custom_jvp_call": _custom_jvp, "custom_vjp_call": _custom_vjp, "shard_map": _shard_map})
