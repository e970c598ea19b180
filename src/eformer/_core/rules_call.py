"""Structural rules: shardings, jit, checkpoint, custom_vmap, higher-level primitives, identities on the storage."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec

from eformer import _stacks, errors
from eformer._jax import jaxprs, traces

from .materialization import dense_for, during, materialize, repeat_notices
from .placement import split_as
from .registry import registry
from .trace import call_jaxpr, is_implicit, rule, run

# -- shardings of a logical array, as shardings of the children that store it ------------------------------------------


def child_specs(q: Any, sharding: NamedSharding) -> list[PartitionSpec] | None:
    """One PartitionSpec per leaf of `q`, or None if the array cannot be split so that every part is an array again."""
    if all(part is None for part in sharding.spec):  # replicated means replicated, whatever the layout
        return [PartitionSpec() for _ in jtu.tree_leaves(q)]
    try:
        mapped = q.child_specs(sharding.spec)
    except errors.ShardingError:
        return None
    specs = None if mapped is None else jtu.tree_leaves(mapped, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return specs if specs is not None and _part_shape(q, sharding.mesh, specs) == _shard(q, sharding) else None


def _shard(x: Any, sharding: NamedSharding) -> tuple[int, ...] | None:
    """The shape of what one device gets; None if that is not the same for all."""
    try:
        return sharding.shard_shape(jnp.shape(x))
    except ValueError:
        return None


def _part_shape(q: Any, mesh: Any, specs: list[PartitionSpec]) -> tuple[int, ...]:
    """The shape of the array made of what one device gets of every leaf; () if they do not make one."""
    leaves, treedef = jtu.tree_flatten(q)
    shapes = [_shard(leaf, NamedSharding(mesh, spec)) for leaf, spec in zip(leaves, specs, strict=True)]
    if None in shapes:
        return ()
    parts = [jax.ShapeDtypeStruct(s, jnp.result_type(leaf)) for s, leaf in zip(shapes, leaves, strict=True)]
    try:
        return jtu.tree_unflatten(treedef, parts).shape
    except (TypeError, ValueError):
        return ()


def child_shardings(q: Any, sharding: Any) -> Any:
    """A pytree like `q` of shardings of its leaves, or None."""
    leaves, treedef = jtu.tree_flatten(q)
    if isinstance(sharding, NamedSharding):
        specs = child_specs(q, sharding)
        if specs is None:
            return None
        kind = sharding.memory_kind
        placed = [NamedSharding(sharding.mesh, spec, memory_kind=kind) for spec in specs]
        return jtu.tree_unflatten(treedef, placed)
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return jtu.tree_unflatten(treedef, [sharding] * len(leaves))
    return None


@rule("device_put")
def _device_put(primitive: Any, values: list[Any], params: dict[str, Any]) -> Any:
    """Move the storage; a sharding the storage cannot have moves the dense array instead."""
    placed = []
    for value, device in zip(values, params["devices"], strict=True):
        if is_implicit(value) and isinstance(device, jax.sharding.Sharding):
            target = child_shardings(value, device)
            if target is not None:
                placed.append(_split_as(jax.device_put(value, target), device))
                continue
            value = dense_for(primitive, value)
        placed.append(jax.device_put(value, device))
    return placed


@rule("sharding_constraint")
def _sharding_constraint(primitive: Any, values: list[Any], params: dict[str, Any]) -> Any:
    (q,) = values
    target = child_shardings(q, params["sharding"])
    if target is None:
        return type(q).default_handler(primitive, q, params=params)
    return _split_as(jtu.tree_map(jax.lax.with_sharding_constraint, q, target), params["sharding"])


@rule("reshard")
def _reshard(primitive: Any, values: list[Any], params: dict[str, Any]) -> Any:
    """Also how an array enters `auto_axes`, as the operand of a lookup with `out_sharding` does."""
    (q,) = values
    asked = params["dst_sharding"]
    mesh = params.get("concrete_mesh") or asked.mesh
    target = child_shardings(q, NamedSharding(mesh, asked.spec))
    if target is None:
        return type(q).default_handler(primitive, q, params=params)
    moved = jtu.tree_map(jax.sharding.reshard, q, target)
    return _split_as(moved, NamedSharding(mesh, asked.spec) if mesh.are_all_axes_explicit else None)


def _split_as(q: Any, sharding: Any) -> Any:
    if not isinstance(sharding, NamedSharding):
        return split_as(q, None)
    if PartitionSpec.UNCONSTRAINED in sharding.spec:
        return q
    # In full, so that it still means the same axes behind new leading ones.
    full = PartitionSpec(*sharding.spec, *[None] * (q.ndim - len(sharding.spec)))
    return split_as(q, sharding.update(spec=full))


@rule("jit")
def _jit(primitive: Any, values: list[Any], params: dict[str, Any]) -> list[Any]:
    inlined = jaxprs.inlined_early(params["inline"]) or _would_forget(values, params)
    if inlined and traces.current_trace() is not traces.eval_trace:
        return call_jaxpr(params["jaxpr"], values)
    in_shardings = ()
    for sharding in params["in_shardings"]:
        if isinstance(sharding, jax.sharding.Sharding):
            values, in_shardings = _placed_arguments(primitive, values, params)
            break
    jitted, notices = _jitted(params, in_shardings)
    if notices:
        repeat_notices(notices, {type(v) for v in values})
    return jitted(*values)


def _would_forget(values: list[Any], params: dict[str, Any]) -> bool:
    """Is there a layer of a stack among the arguments, or a transpose, that a product can use? Shardings come first."""
    arrays = [v for v in values if is_implicit(v)]
    if not any(v.knows_more for v in arrays) and not any(map(_stacks.place_of, jtu.tree_leaves(arrays))):
        return False
    asked = (*params["in_shardings"], *params["out_shardings"])
    return not any(isinstance(sharding, jax.sharding.Sharding) for sharding in asked)


def _placed_arguments(primitive: Any, values: list[Any], params: dict[str, Any]) -> tuple[list[Any], tuple[Any, ...]]:
    """Arguments with the shardings given to jit; an array that cannot have its sharding becomes dense."""
    placed, shardings = [], []
    for value, sharding in zip(values, params["in_shardings"], strict=True):
        asked = sharding if isinstance(sharding, jax.sharding.Sharding) else None
        if asked is not None and is_implicit(value):
            per_child = child_shardings(value, asked)
            value = dense_for(primitive, value) if per_child is None else value
            asked = asked if per_child is None else per_child
        placed.append(value)
        shardings.append(asked)
    return placed, tuple(shardings)


def _jitted(params: dict[str, Any], in_shardings: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """A jitted replay of the jaxpr, one per jaxpr and state of the registry, with everything the user asked of jit.

    With it comes what was noticed while it was traced, for callers who find it traced already.
    """
    jaxpr = params["jaxpr"]
    placement = (tuple(jtu.tree_leaves(in_shardings)), jtu.tree_structure(in_shardings)) if in_shardings else None
    known = _remembered(jaxpr, registry.version, placement, params["donated_invars"])
    if known:
        return known[0]
    notices: list[Any] = []
    replay = _replay(jaxpr, params["out_shardings"], params.get("name", "implicit_jit"), notices)
    jitted = jax.jit(replay, **_jit_options(params, in_shardings))
    known.append((jitted, notices))
    return jitted, []


@functools.lru_cache(maxsize=1024)
def _remembered(jaxpr: Any, version: int, placement: Any, donated: tuple[bool, ...]) -> list[tuple[Any, list[Any]]]:
    """Where to keep the function of a jaxpr, which is known by its identity."""
    return []


def _replay(jaxpr: Any, out_shardings: Any, name: str, notices: list[Any]) -> Any:
    asked = [isinstance(s, jax.sharding.Sharding) for s in out_shardings]

    def replay(*values: Any) -> list[Any]:
        with during(notices=notices):  # for whoever calls this when it is compiled, each of whom is warned once
            out = call_jaxpr(jaxpr, values)
        if not any(asked):
            return out
        # An output with a sharding of its own is dense: that sharding is about the logical array.
        return [dense_for(name, o) if dense else o for o, dense in zip(out, asked, strict=True)]

    replay.__name__ = replay.__qualname__ = name
    return replay


def _jit_options(params: dict[str, Any], in_shardings: tuple[Any, ...]) -> dict[str, Any]:
    options: dict[str, Any] = {
        "donate_argnums": tuple(i for i, donated in enumerate(params["donated_invars"]) if donated),
        "keep_unused": params["keep_unused"],
        "inline": jaxprs.inlined_early(params["inline"]),
    }
    if any(isinstance(s, jax.sharding.Sharding) for s in params["out_shardings"]):
        options["out_shardings"] = [
            s if isinstance(s, jax.sharding.Sharding) else None for s in params["out_shardings"]
        ]
    if in_shardings:
        options["in_shardings"] = in_shardings
    if params.get("compiler_options_kvs"):
        options["compiler_options"] = dict(params["compiler_options_kvs"])
    return options


@rule("remat2", "checkpoint", "remat")
def _checkpoint(primitive: Any, values: list[Any], params: dict[str, Any]) -> list[Any]:
    jaxpr, prevent_cse = params["jaxpr"], params["prevent_cse"]
    if params.get("differentiated") and prevent_cse:  # already the backward pass: keep the barrier, do not nest
        return call_jaxpr(jaxpr, jax.lax.optimization_barrier(list(values)))
    return _checkpointed(jaxpr, prevent_cse, params["policy"], values)


def _checkpointed(jaxpr: Any, prevent_cse: bool, policy: Any, values: list[Any]) -> list[Any]:
    def again(*inside: Any) -> list[Any]:
        with _stacks.passed_on(jtu.tree_leaves(values), jtu.tree_leaves(inside)):
            return call_jaxpr(jaxpr, inside)

    return jax.checkpoint(again, prevent_cse=prevent_cse, policy=policy)(*values)


@rule("closed_call", "core_call", "core_closed_call", "eval_jaxpr")
def _inlined(primitive: Any, values: list[Any], params: dict[str, Any]) -> list[Any]:
    return call_jaxpr(params["call_jaxpr"], values)


@rule("call_hi_primitive")
def _hi_primitive(primitive: Any, values: list[Any], params: dict[str, Any]) -> Any:
    """Higher-level primitives: jax.numpy's own are expanded; one with a user's derivative rule is never taken apart."""
    hi = params["_prim"]
    remat = jaxprs.remat_hi_primitive(hi)
    if remat is not None:
        jaxpr, prevent_cse, policy = remat
        return _checkpointed(jaxpr, prevent_cse, policy, values)
    if jaxprs.is_jnp_hi_primitive(hi):
        return run(functools.partial(jaxprs.lower_hi_primitive, primitive, **params), values)
    return primitive.bind(*(dense_for(primitive, v) for v in values), **params)


@rule("custom_vmap_call")
def _custom_vmap(primitive: Any, values: list[Any], params: dict[str, Any]) -> list[Any]:
    """The user's batching rule sees dense arrays; the function itself keeps dispatching."""
    in_tree, out_tree = params["in_tree"], params["out_tree"]
    f = jax.custom_batching.custom_vmap(lambda *vals: call_jaxpr(params["call"], vals))

    @f.def_vmap
    def _(size: int, batched: Any, *vals: Any) -> Any:
        flags = [any(jtu.tree_leaves(b)) for b in batched]
        vals = tuple(_batched_dense(primitive, v, b, size) for v, b in zip(vals, batched, strict=True))
        args = jtu.tree_unflatten(in_tree, vals)
        out, out_batched = params["rule"](size, list(jtu.tree_unflatten(in_tree, flags)), *args)
        return jtu.tree_leaves(out), out_tree.flatten_up_to(out_batched)

    return f(*values)


def _batched_dense(primitive: Any, value: Any, batched: Any, size: int) -> Any:
    if not is_implicit(value):
        return value
    if not any(jtu.tree_leaves(batched)):
        return dense_for(primitive, value)
    leaves, treedef = jtu.tree_flatten(value)
    flags = jtu.tree_leaves(batched)
    stacked = [x if b else jnp.broadcast_to(x, (size, *jnp.shape(x))) for x, b in zip(leaves, flags, strict=True)]
    return jax.vmap(lambda *ls: materialize(jtu.tree_unflatten(treedef, ls)))(*stacked)


@rule("copy", "copy_p", "name", "pvary", "pcast", "stop_gradient")
def _on_children(primitive: Any, values: list[Any], params: dict[str, Any]) -> Any:
    """Identities act on every child; results of the same type."""
    (q,) = values
    return jtu.tree_map(lambda leaf: primitive.bind(jnp.asarray(leaf), **params), q)


@rule("optimization_barrier")
def _barrier(primitive: Any, values: list[Any], params: dict[str, Any]) -> list[Any]:
    return jax.lax.optimization_barrier(list(values))


@rule("convert_element_type")
def _convert(primitive: Any, values: list[Any], params: dict[str, Any]) -> Any:
    """A conversion to the same dtype does nothing; any other needs a handler or the dense array."""
    (q,) = values
    if jnp.dtype(params["new_dtype"]) == q.dtype and params.get("sharding") is None:
        return q
    return type(q).default_handler(primitive, q, params=params)
