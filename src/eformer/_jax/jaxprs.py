"""Jaxprs and the parameters of equations that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jax.extend import core as _ext


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
