"""Structural rules of control flow: scan, while and cond are built again with implicit arrays as pytrees.

Only counts and jaxprs are read from the parameters; JAX's public functions do the rest. A carry whose type the body
does not preserve becomes dense, and the check repeats; an output of cond stays implicit only if all branches agree, or
can be made to (`ImplicitArray.stored_like`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from eformer import _stacks, errors
from eformer._jax import jaxprs

from . import shape_dtype as _shape_dtype
from .box import can_stack
from .materialization import dense_for
from .trace import call_jaxpr, is_implicit, rule


def _type_of(value: Any) -> Any:
    """What must not change from one iteration to the next: structure, static data and the avals of the leaves."""
    leaves, treedef = jtu.tree_flatten(value)
    return treedef, tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)


def _stable_carry(primitive: Any, carry: list[Any], step: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
    """The carry with every implicit slot changed that `step` (on shapes) does not preserve.

    Such a slot gets the structure of what follows it if it can have that, and becomes dense otherwise.
    """
    while True:
        after = step(carry)
        pairs = list(zip(carry, after, strict=True))
        changed = [is_implicit(c) and _type_of(c) != _type_of(a) for c, a in pairs]
        if not any(changed):
            return carry
        alike = [c.stored_like(a) if changes else c for (c, a), changes in zip(pairs, changed, strict=True)]
        stuck = [changes and _type_of(a) == _type_of(c) for a, c, changes in zip(alike, carry, changed, strict=True)]
        carry = [dense_for(primitive, a) if lost else a for a, lost in zip(alike, stuck, strict=True)]


def _matched(out: Sequence[Any], carry: Sequence[Any]) -> list[Any]:
    return [o.stored_like(c) if is_implicit(o) else o for o, c in zip(out, carry, strict=True)]


def _like(primitive: Any, out: Sequence[Any], carry: Sequence[Any]) -> list[Any]:
    pairs = zip(_matched(out, carry), carry, strict=True)
    return [o if is_implicit(c) else dense_for(primitive, o) for o, c in pairs]


def _common(outs: Sequence[Any]) -> Any:
    """The one among the outputs of branches whose structure all of them can have, or None."""
    for one in outs:
        alike = [jax.eval_shape(lambda o, c: _matched([o], [c])[0], out, one) for out in outs]
        if len(set(map(_type_of, alike))) == 1:
            return one
    return None


@rule("scan")
def _scan(primitive: Any, values: list[Any], params: dict[str, Any]) -> list[Any]:
    jaxpr, length = params["jaxpr"], params["length"]
    n_consts, n_carry = jaxprs.scan_counts(params)
    consts, carry, xs = values[:n_consts], values[n_consts : n_consts + n_carry], values[n_consts + n_carry :]
    xs = [x if not is_implicit(x) or can_slice(x) else dense_for(primitive, x) for x in xs]

    def step(carry: list[Any]) -> Sequence[Any]:
        one = [jtu.tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), x) for x in xs]
        return jax.eval_shape(
            lambda k, c, x: _matched(call_jaxpr(jaxpr, [*k, *c, *x])[:n_carry], c), consts, carry, one
        )

    def body(carry: list[Any], given: tuple[list[Any], Any]) -> tuple[list[Any], list[Any]]:
        x, index = given
        layers = [place for one, stack in zip(x, xs, strict=True) for place in _places(one, stack, index)]
        with _stacks.noted(layers):
            out = call_jaxpr(jaxpr, [*consts, *carry, *x])
        ys = [y if not is_implicit(y) or can_stack(y) else dense_for(primitive, y) for y in out[n_carry:]]
        return _like(primitive, out[:n_carry], carry), ys

    options = {k: params[k] for k in ("reverse", "unroll", "_split_transpose") if k in params}
    carry = _stable_carry(primitive, list(carry), step)
    index = jnp.arange(length, dtype=jnp.int32) if any(map(is_implicit, xs)) else None
    carry, ys = jax.lax.scan(body, carry, (xs, index), length=length, **options)
    return [*carry, *ys]


def _places(layer: Any, stack: Any, index: Any) -> list[_stacks.Place]:
    if not is_implicit(layer):
        return []
    return [_stacks.Place(*pair, index) for pair in zip(jtu.tree_leaves(layer), jtu.tree_leaves(stack), strict=True)]


def can_slice(q: Any) -> bool:
    """Is the first logical axis the first axis of every leaf?"""
    leaves, treedef = jtu.tree_flatten(q)
    if _shape_dtype.batch_rank(q, leaves) <= 0 and (q.core_ndim is None or q.ndim <= q.core_ndim):
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
        return jax.eval_shape(lambda k, c: _matched(call_jaxpr(body_jaxpr, [*k, *c]), c), body_consts, carry)

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
    common = [_common(slot) for slot in zip(*outs, strict=True)]

    def branch(jaxpr: Any) -> Callable[..., list[Any]]:
        def run(*operands: Any) -> list[Any]:
            out = call_jaxpr(jaxpr, operands)
            pairs = zip(_matched(out, common), common, strict=True)
            return [dense_for(primitive, o) if one is None else o for o, one in pairs]

        return run

    return list(jax.lax.switch(dense_for(primitive, index), [branch(j) for j in branches], *operands))
