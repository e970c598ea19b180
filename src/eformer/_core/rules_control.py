"""Structural rules of control flow: scan, while and cond are built again with implicit arrays as pytrees.

Only counts and jaxprs are read from the parameters; JAX's public functions do the rest. A carry whose type the body
does not preserve is made dense, and the check repeats; an output of cond stays implicit only if all branches agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from eformer import _jax
from eformer import errors as errors

from . import aval as _aval
from .box import can_stack
from .fallback import dense_for
from .trace import call_jaxpr, is_implicit, rule


def _type_of(value: Any) -> Any:
    """What must not change from one iteration to the next: structure, static data and the avals of the leaves."""
    leaves, treedef = jtu.tree_flatten(value)
    return treedef, tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)


def _stable_carry(primitive: Any, carry: list[Any], step: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
    """The carry with every implicit slot made dense that `step` (on shapes) does not preserve."""
    while True:
        after = step(carry)
        changed = [is_implicit(a) and _type_of(a) != _type_of(b) for a, b in zip(carry, after, strict=True)]
        if not any(changed):
            return carry
        carry = [dense_for(primitive, c) if drop else c for c, drop in zip(carry, changed, strict=True)]


def _like(primitive: Any, out: Sequence[Any], carry: Sequence[Any]) -> list[Any]:
    return [o if is_implicit(c) else dense_for(primitive, o) for o, c in zip(out, carry, strict=True)]


@rule("scan")
def _scan(primitive: Any, values: list[Any], params: dict[str, Any]) -> list[Any]:
    jaxpr, length = params["jaxpr"], params["length"]
    n_consts, n_carry = _jax.scan_counts(params)
    consts, carry, xs = values[:n_consts], values[n_consts : n_consts + n_carry], values[n_consts + n_carry :]
    xs = [x if not is_implicit(x) or can_slice(x) else dense_for(primitive, x) for x in xs]

    def step(carry: list[Any]) -> Sequence[Any]:
        one = [jtu.tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), x) for x in xs]
        return jax.eval_shape(lambda k, c, x: call_jaxpr(jaxpr, [*k, *c, *x])[:n_carry], consts, carry, one)

    def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        out = call_jaxpr(jaxpr, [*consts, *carry, *x])
        ys = [y if not is_implicit(y) or can_stack(y) else dense_for(primitive, y) for y in out[n_carry:]]
        return _like(primitive, out[:n_carry], carry), ys

    options = {k: params[k] for k in ("reverse", "unroll", "_split_transpose") if k in params}
    carry = _stable_carry(primitive, list(carry), step)
    carry, ys = jax.lax.scan(body, carry, xs, length=length, **options)
    return [*carry, *ys]


def can_slice(q: Any) -> bool:
    """Is the first logical axis the first axis of every leaf?"""
    leaves, treedef = jtu.tree_flatten(q)
    if _aval.batch_rank(q, leaves) <= 0 and (q.core_ndim is None or q.ndim <= q.core_ndim):
        return False
    if not leaves or any(leaf.ndim == 0 or leaf.shape[0] != q.shape[0] for leaf in leaves):
        return False
    one = jtu.tree_unflatten(treedef, [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in leaves])
    try:
        return one.shape == q.shape[1:]
    except errors.SlicedBelowCoreError:
        return False


@rule("while")
def _while(primitive: Any, values: list[Any], params: dict[str, Any]) -> list[Any]:
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts = values[:n_cond], values[n_cond : n_cond + n_body]
    cond_jaxpr, body_jaxpr = params["cond_jaxpr"], params["body_jaxpr"]

    def step(carry: list[Any]) -> Sequence[Any]:
        return jax.eval_shape(lambda k, c: call_jaxpr(body_jaxpr, [*k, *c]), body_consts, carry)

    def keep_going(carry: list[Any]) -> Any:
        return dense_for(primitive, call_jaxpr(cond_jaxpr, [*cond_consts, *carry])[0])

    def body(carry: list[Any]) -> list[Any]:
        return _like(primitive, call_jaxpr(body_jaxpr, [*body_consts, *carry]), carry)

    carry = _stable_carry(primitive, values[n_cond + n_body :], step)
    return list(jax.lax.while_loop(keep_going, body, carry))


@rule("cond")
def _cond(primitive: Any, values: list[Any], params: dict[str, Any]) -> list[Any]:
    index, operands, branches = values[0], values[1:], params["branches"]
    outs = [jax.eval_shape(lambda *o, j=j: call_jaxpr(j, o), *operands) for j in branches]
    agreed = [len({_type_of(out[i]) for out in outs}) == 1 for i in range(len(outs[0]))]

    def branch(jaxpr: Any) -> Callable[..., list[Any]]:
        def run(*operands: Any) -> list[Any]:
            out = call_jaxpr(jaxpr, operands)
            return [o if keep else dense_for(primitive, o) for o, keep in zip(out, agreed, strict=True)]

        return run

    return list(jax.lax.switch(dense_for(primitive, index), [branch(j) for j in branches], *operands))
