"""Rules of custom_jvp, custom_vjp and shard_map, which JAX hands to a trace as functions rather than jaxprs.

The functions are one-shot (stores inside them may be filled once), so they are never called to try something out. They
run under a trace with the tag of the surrounding one: values they closed over are still ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .. import _jax_compat as compat
from ._fallback import dense_for, materialize
from ._placement import child_specs
from ._trace import CALL_RULES, ImplicitTrace, call_handlers, is_implicit, run


def _traced(trace: ImplicitTrace, function: Any) -> Callable[..., list[Any]]:
    return lambda *values: run(lambda *args: list(function.call_wrapped(*args)), values, trace.tag)


def _dense_results(primitive: Any, f: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    return lambda *values: [dense_for(primitive, out) for out in f(*values)]


def _handled(trace: ImplicitTrace, primitive: Any, values: list[Any], params: dict[str, Any]) -> Any:
    """What a user's handler makes of the call, its functions made callable on implicit and dense values alike."""
    called: list[str] = []

    def callable_one(name: str, function: Any) -> Callable[..., list[Any]]:
        run_it = _traced(trace, function)
        return lambda *args: called.append(name) or run_it(*args)

    functions = {k: callable_one(k, v) for k, v in params.items() if hasattr(v, "call_wrapped")}
    with compat.set_current_trace(trace.parent_trace):
        out = call_handlers(primitive, values, {**params, **functions}, check=False)
        if out is NotImplemented:
            return out
        if not called:  # JAX reads the structure of the result off the function, so it must have run
            jax.eval_shape(functions["fun"], *values)
    return [trace.wrap(o) for o in (out if isinstance(out, (list, tuple)) else [out])]


# -- custom_jvp --------------------------------------------------------------------------------------------------------


def _custom_jvp(trace: ImplicitTrace, primitive: Any, tracers: Any, params: dict[str, Any]) -> Any:
    values = [trace.unwrap(t) for t in tracers]
    fun, jvp, symbolic_zeros = params["fun"], params["jvp"], params["symbolic_zeros"]
    call = _dense_results(primitive, _traced(trace, fun))
    differentiate = _dense_results(primitive, _traced(trace, jvp))
    if not any(map(is_implicit, values)):
        subfuns = compat.wrap_function(call, fun), compat.wrap_function(differentiate, jvp)
        bound = {"subfuns": subfuns, "symbolic_zeros": symbolic_zeros}
        return compat.bind_at(primitive, trace.parent_trace, values, bound)
    handled = _handled(trace, primitive, values, params)
    if handled is not NotImplemented:
        return handled

    f = jax.custom_jvp(lambda *vals: call(*vals))

    def jvp_rule(primals: Any, tangents: Any) -> Any:
        pairs = [_dense_pair(primitive, p, t) for p, t in zip(primals, tangents, strict=True)]
        out = differentiate(*[p for p, _ in pairs], *[t for _, t in pairs])
        return out[: len(out) // 2], out[len(out) // 2 :]

    f.defjvp(jvp_rule, symbolic_zeros=symbolic_zeros)
    with compat.set_current_trace(trace.parent_trace):
        return f(*values)


def _dense_pair(primitive: Any, primal: Any, tangent: Any) -> tuple[Any, Any]:
    """A dense primal and its tangent, for a user's rule that was written for arrays."""
    if not is_implicit(primal):
        return primal, tangent
    leaves, treedef = jtu.tree_flatten(primal)
    tangents = treedef.flatten_up_to(tangent)
    if all(map(compat.is_symbolic_zero, tangents)):
        return dense_for(primitive, primal), compat.symbolic_zero(primal.aval)
    tangents = [t.instantiate() if compat.is_symbolic_zero(t) else t for t in tangents]
    return jax.jvp(lambda *ls: materialize(jtu.tree_unflatten(treedef, ls)), tuple(leaves), tuple(tangents))


# -- custom_vjp --------------------------------------------------------------------------------------------------------


def _custom_vjp(trace: ImplicitTrace, primitive: Any, tracers: Any, params: dict[str, Any]) -> Any:
    values = [trace.unwrap(t) for t in tracers]
    fun, fwd, bwd, symbolic_zeros = params["fun"], params["fwd"], params["bwd"], params["symbolic_zeros"]
    call = _dense_results(primitive, _traced(trace, fun))
    if not any(map(is_implicit, values)):
        forward = compat.wrap_function(_dense_results(primitive, _traced(trace, fwd)), fwd)
        bound = {**params, "subfuns": (compat.wrap_function(call, fun), forward, bwd)}
        for name in ("fun", "fwd", "bwd"):
            del bound[name]
        return compat.bind_at(primitive, trace.parent_trace, values, bound)
    handled = _handled(trace, primitive, values, params)
    if handled is not NotImplemented:
        return handled

    f = jax.custom_vjp(lambda *vals: call(*vals))

    def forward_rule(*args: Any) -> Any:
        vals, perturbed = _split_perturbed(args) if symbolic_zeros else (args, [True] * len(args))
        flat = _traced(trace, fwd)(*[x for pair in zip(vals, perturbed, strict=True) for x in pair])
        _, residual_tree, forwarded = params["out_trees"]()
        n_residuals = residual_tree.num_leaves - sum(i is not None for i in forwarded)
        pruned = iter(flat[:n_residuals])
        residuals = [next(pruned) if i is None else vals[i] for i in forwarded]
        return [dense_for(primitive, o) for o in flat[n_residuals:]], (residuals, vals)

    def backward_rule(saved: Any, cotangents: Any) -> tuple[Any, ...]:
        residuals, vals = saved
        backward = lambda *args: compat.cotangents_only(bwd.call_wrapped(*args))  # noqa: E731
        out = run(backward, [*residuals, *cotangents], trace.tag)
        return tuple(_pull_back(v, ct) for v, ct in zip(vals, out, strict=True))

    f.defvjp(forward_rule, backward_rule, symbolic_zeros=symbolic_zeros)
    with compat.set_current_trace(trace.parent_trace):
        return f(*values)


def _split_perturbed(args: Any) -> tuple[tuple[Any, ...], list[bool]]:
    """Values and whether they are differentiated, from the pairs `symbolic_zeros=True` gives for every leaf."""
    is_pair = lambda x: isinstance(x, jax.custom_derivatives.CustomVJPPrimal)  # noqa: E731
    vals = jtu.tree_map(lambda p: p.value, args, is_leaf=is_pair)
    perturbed = [any(p.perturbed for p in jtu.tree_leaves(arg, is_leaf=is_pair)) for arg in args]
    return vals, perturbed


def _pull_back(value: Any, cotangent: Any) -> Any:
    """The cotangent of an operand: for an implicit one, pulled back through `materialize` to its children."""
    if not is_implicit(value):
        return None if compat.is_symbolic_zero(cotangent) else cotangent
    if cotangent is None or compat.is_symbolic_zero(cotangent):
        cotangent = jnp.zeros(value.shape, value.dtype)
    leaves, treedef = jtu.tree_flatten(value)
    _, pull = jax.vjp(lambda *ls: materialize(jtu.tree_unflatten(treedef, ls)), *leaves)
    return jtu.tree_unflatten(treedef, pull(materialize(cotangent)))


# -- shard_map -------------------------------------------------------------------------------------------------


def _shard_map(trace: ImplicitTrace, primitive: Any, tracers: Any, params: dict[str, Any]) -> Any:
    """Split the children as the specs of the logical arrays say; an array that cannot be split so enters dense."""
    values = [trace.unwrap(t) for t in tracers]
    if any(map(is_implicit, values)):
        handled = _handled_shard_map(trace, primitive, values, params)
        if handled is not NotImplemented:
            return handled
    fun, args, specs = params["fun"], [], []
    for value, spec in zip(values, params["in_specs"], strict=True):
        per_leaf = child_specs(value, spec) if is_implicit(value) else [spec]
        if per_leaf is None:
            with compat.set_current_trace(trace.parent_trace):
                value, per_leaf = dense_for(primitive, value), [spec]
        args.append(value)
        specs.extend(per_leaf)
    leaves, treedef = jtu.tree_flatten(args)

    def body(*leaves: Any) -> Any:
        inner = ImplicitTrace(compat.current_trace(), trace.tag)
        with compat.set_current_trace(inner):
            out, aux = fun(*map(inner.wrap, jtu.tree_unflatten(treedef, leaves))).unpack_aux()
        return out.map(lambda t: dense_for(primitive, inner.unwrap(t))).with_aux(aux)

    bound = {**params, "subfuns": (body,), "in_specs": tuple(specs)}
    del bound["fun"]
    bound["debug_info"] = compat.without_argument_names(bound["debug_info"])
    return compat.bind_at(primitive, trace.parent_trace, leaves, bound)


def _handled_shard_map(trace: ImplicitTrace, primitive: Any, values: list[Any], params: dict[str, Any]) -> Any:
    with compat.set_current_trace(trace.parent_trace):
        return call_handlers(primitive, values, params, check=False)


CALL_RULES.update({"custom_jvp_call": _custom_jvp, "custom_vjp_call": _custom_vjp, "shard_map": _shard_map})
