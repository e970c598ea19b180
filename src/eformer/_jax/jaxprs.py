"""Jaxprs and functions in the parameters of equations, and the tangents that custom rules see."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core as _ext
from jax.extend import linear_util as _linear_util
from jax.interpreters import ad

from .traces import bind_at, bind_params


def jaxpr_function(jaxpr: Any) -> Callable[..., list[Any]]:
    """A callable of an open or closed jaxpr (one class since 0.11; remat holds an open one in 0.10)."""
    if not hasattr(jaxpr, "consts"):
        jaxpr = _ext.ClosedJaxpr(jaxpr, ())
    return _ext.jaxpr_as_fun(jaxpr)


def _jaxprs_in(params: dict[str, Any]) -> Iterable[Any]:
    """Every jaxpr stored in the parameters of an equation, those inside higher-level primitives included."""
    found = [*_ext.jaxprs_in_params(params)]
    hi_primitive = params.get("_prim")
    if hi_primitive is not None:
        found += [v for v in vars(hi_primitive).values() if hasattr(v, "eqns") or hasattr(v, "jaxpr")]
    return (getattr(jaxpr, "jaxpr", jaxpr) for jaxpr in found)


def equations_of(jaxpr: Any, primitive: Any) -> Iterator[tuple[list[Any], dict[str, Any], Any]]:
    """(types of the operands, parameters, origin) of the equations of a jaxpr, at any depth, that bind `primitive`."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive is primitive:
            yield [var.aval for var in eqn.invars], eqn.params, eqn.source_info
        for inner in _jaxprs_in(eqn.params):
            yield from equations_of(inner, primitive)


_uses: dict[Any, tuple[Any, bool]] = {}
_USES_LIMIT = 8192


def params_use(params: dict[str, Any], primitive: Any) -> bool:
    """Does a jaxpr in these parameters, at any depth, use `primitive`? Remembered per jaxpr."""
    return any(_uses_primitive(jaxpr, primitive) for jaxpr in _jaxprs_in(params))


def _uses_primitive(jaxpr: Any, primitive: Any) -> bool:
    key = id(jaxpr), primitive
    known = _uses.get(key)
    if known is None or known[0] is not jaxpr:
        if len(_uses) >= _USES_LIMIT:
            _uses.clear()
        found = any(eqn.primitive is primitive or params_use(eqn.params, primitive) for eqn in jaxpr.eqns)
        known = _uses[key] = (jaxpr, found)
    return known[1]


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """(constants, carries) of a scan: plain integers up to 0.10, a tree since 0.11."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def inlined_early(inline: Any) -> bool:
    """Does `jit(inline=...)` ask for inlining while tracing? A plain flag up to 0.10, an enum since."""
    return inline is True or getattr(inline, "name", "") == "JAX_EARLY"


def remat_hi_primitive(hi_primitive: Any) -> tuple[Any, bool, Any] | None:
    """(jaxpr, prevent_cse, policy) if this is jax.checkpoint in its newer form."""
    if type(hi_primitive).__name__ != "RematTraced":
        return None
    return hi_primitive.jaxpr, getattr(hi_primitive, "prevent_cse", True), hi_primitive.policy


def is_jnp_hi_primitive(hi_primitive: Any) -> bool:
    """Does this belong to jax.numpy itself (safe to expand), as opposed to carrying a user's derivative rule?"""
    return type(hi_primitive).__module__.startswith("jax._src.numpy.")


def lower_hi_primitive(primitive: Any, *args: Any, **params: Any) -> Any:
    """What a higher-level primitive does, in ordinary ones."""
    return primitive.to_lojax(*args, **params)


# -- functions, as JAX passes them to custom_jvp, custom_vjp and shard_map ---------------------------------------------


def is_function(x: Any) -> bool:
    """Is this parameter a function, as JAX passes them around?"""
    return hasattr(x, "call_wrapped")


def called(function: Any, *args: Any) -> list[Any]:
    """What it returns. JAX may ask again, with other operands differentiated: structures it stored before are void."""
    for store in filter(None, function.stores):
        store.reset()
    return list(function.call_wrapped(*args))


def bind_functions(
    primitive: Any, trace: Any, args: Sequence[Any], params: dict[str, Any], functions: dict[str, Any]
) -> Any:
    """Bind custom_jvp or custom_vjp on `trace`; `functions` stand for the parameters of the same names, in order."""
    pairs = [(f, params[name]) for name, f in functions.items()]
    wrap = _linear_util.wrap_init  # what JAX passes around, with the debug information of what it stands for
    subfuns = tuple(f if f is old else wrap(f, debug_info=old.debug_info) for f, old in pairs)
    rest = {name: value for name, value in params.items() if name not in functions}
    return bind_at(primitive, trace, args, {**rest, "subfuns": subfuns})


def bind_shard_map(
    primitive: Any, trace: Any, args: Sequence[Any], params: dict[str, Any], body: Any, in_specs: Sequence[Any]
) -> Any:
    """Bind shard_map on `trace` for a function whose arguments are no longer those the user named."""
    bound = {**params, "subfuns": (body,), "in_specs": tuple(in_specs)}
    del bound["fun"]
    bound["debug_info"] = bound["debug_info"]._replace(arg_names=None)
    return bind_at(primitive, trace, args, bound)


def unfolded_results(f: Callable[[Any, Any], tuple[Any, list[Any]]], out: Any) -> tuple[Any, Any]:
    """What the body of a shard_map returned, with `f` of every result and its spec: an array, or a pytree of them, and
    a spec for each of these. Also what `folded_results` needs to put the results of the whole back."""
    results, specs = out.unpack_aux()
    found = [f(result, spec) for result, spec in zip(results, specs, strict=True)]
    nodes = jax.tree_util.tree_unflatten(_structure(results), [value for value, _ in found])
    flatten = getattr(type(out), "flatten", None) or sys.modules[type(out).__module__].flatten  # the first before 0.12
    unfolded = flatten(nodes).with_aux(tuple(spec for _, per_leaf in found for spec in per_leaf))
    return unfolded, results.map(lambda _: None)


def folded_results(f: Callable[[Any], Any], out: Any, places: Any) -> Any:
    """What shard_map made of unfolded results, with `f` of each as one result again."""
    values = iter(_structure(places).flatten_up_to(out.unflatten()))
    return places.map(lambda _: f(next(values)))


def _structure(results: Any) -> Any:
    """That of the user, for messages of JAX; a list if a vmap has put other things beside the results."""
    count = len([*results])
    return results.tree if results.tree.num_leaves == count else jax.tree_util.tree_structure([0] * count)


def split_forward(flat: Sequence[Any], values: Sequence[Any], params: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """(residuals, results) of the forward rule of a custom_vjp; residuals that are operands are left out of `flat`."""
    _, residual_tree, forwarded = params["out_trees"]()
    count = residual_tree.num_leaves - sum(i is not None for i in forwarded)
    pruned = iter(flat[:count])
    return [next(pruned) if i is None else values[i] for i in forwarded], list(flat[count:])


def called_backward(function: Any, *args: Any) -> list[Any]:
    """The cotangents a custom backward pass gives; since 0.11 they may come with logs."""
    out = function.call_wrapped(*args)
    if isinstance(out, tuple) and len(out) == 2 and isinstance(out[0], (list, tuple)):
        return list(out[0])
    return list(out)


def is_symbolic_zero(x: Any) -> bool:
    return type(x) is ad.Zero or isinstance(x, jax.custom_derivatives.SymbolicZero)


def symbolic_zero(aval: Any) -> Any:
    return jax.custom_derivatives.SymbolicZero(aval.to_tangent_aval())


def instantiated(tangent: Any) -> Any:
    """Zeros in full, for rules that did not ask to see symbolic ones."""
    return ad.instantiate_zeros(ad.Zero(tangent.aval)) if is_symbolic_zero(tangent) else tangent


# -- programs, an equation at a time -----------------------------------------------------------------------------------


def constants(jaxpr: Any) -> Sequence[Any]:
    """The arrays that a traced function closed over."""
    return getattr(jaxpr, "consts", ())


def computed(primitive: Any, values: Sequence[Any], params: dict[str, Any]) -> Any:
    """One equation, computed."""
    return primitive.bind(*values, **bind_params(primitive, params))


def evaluate(
    jaxpr: Any,
    values: Sequence[Any],
    visit: Callable[[Any, list[Any], dict[str, Any]], Any],
    consts: Sequence[Any] | None = None,
) -> list[Any]:
    """The results of a jaxpr, open or closed, where `visit(primitive, operands, params)` computes each equation.

    Values may be anything that `visit` understands. `consts` stand for the constants, which come as they are otherwise.
    """

    def results(eqn: Any, operands: list[Any]) -> Any:
        with eqn.ctx.manager:
            out = visit(eqn.primitive, operands, eqn.params)
        return out if eqn.primitive.multiple_results else [out]

    return _walked(jaxpr, values, results, constants(jaxpr) if consts is None else consts)


def followed(
    jaxpr: Any, values: Sequence[Any], visit: Callable[[str, list[Any], dict[str, Any], Any], Sequence[Any] | None]
) -> list[Any]:
    """What is known of the results of a jaxpr, where None is nothing.

    `visit(name of the primitive, operands, params, shape of the first result)` gives what is known of each result.
    """

    def results(eqn: Any, operands: list[Any]) -> Any:
        shape = getattr(eqn.outvars[0].aval, "shape", ()) if eqn.outvars else ()
        out = visit(eqn.primitive.name, operands, eqn.params, shape)
        return [None] * len(eqn.outvars) if out is None else out

    return _walked(jaxpr, values, results, constants(jaxpr))


def _walked(jaxpr: Any, values: Sequence[Any], results: Callable[..., Any], consts: Sequence[Any]) -> list[Any]:
    program = getattr(jaxpr, "jaxpr", jaxpr)
    inputs = getattr(program, "all_invars", None) or [*program.constvars, *program.invars]
    env = dict(zip(inputs, [*consts, *values], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, _ext.Literal) else env[atom]

    for eqn in program.eqns:
        env.update(zip(eqn.outvars, results(eqn, list(map(read, eqn.invars))), strict=True))
    return list(map(read, program.outvars))


def unchanged(jaxpr: Any) -> set[tuple[int, int]]:
    """Which results of a jaxpr are its arguments, as pairs (result, argument)."""
    program = getattr(jaxpr, "jaxpr", jaxpr)
    place = {id(var): at for at, var in enumerate(program.invars)}
    return {(at, place[id(atom)]) for at, atom in enumerate(program.outvars) if id(atom) in place}
