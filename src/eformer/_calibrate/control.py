"""Rules of equations that hold programs. Calls are looked into where they stand; loops, branches and shard_map are
built again with JAX's public functions, with the sums of their bodies as further results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from eformer._jax import jaxprs

from . import products, views
from .frame import Frame, Key, Source, Tracked, bind, dense, rule, run, stack_axes
from .views import Sums, _NotFollowed

# Where a call keeps its program. Derivatives are of no interest here, nor is what is stored for them.
PROGRAM = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr",
    "core_closed_call": "call_jaxpr", "eval_jaxpr": "call_jaxpr", "remat2": "jaxpr", "remat": "jaxpr",
    "checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call", "composite": "jaxpr",
}  # fmt: skip


@rule(*PROGRAM)
def _call(frame: Frame, primitive: Any, operands: list[Any], params: dict[str, Any]) -> list[Any]:
    return run(frame, params[PROGRAM[primitive.name]], operands)


@rule("call_hi_primitive")
def _hi_primitive(frame: Frame, primitive: Any, operands: list[Any], params: dict[str, Any]) -> Any:
    hi = params["_prim"]
    remat = jaxprs.remat_hi_primitive(hi)
    if remat is not None:
        return run(frame, remat[0], operands)
    if jaxprs.is_jnp_hi_primitive(hi):
        lowered = functools.partial(jaxprs.lower_hi_primitive, primitive, **params)
        return run(frame, jax.make_jaxpr(lowered)(*map(dense, operands)), operands)
    for operand in operands:
        if isinstance(operand, Tracked):
            frame.note(frame.unseen, operand, type(hi).__name__)
    return bind(primitive, operands, params)


class Body:
    """A frame for the body of a loop or a branch: each of its leaves is an array that shows leaves outside."""

    def __init__(self, outer: Frame, arguments: Sequence[Any], sliced: Sequence[bool]):
        """`arguments` of which tracked ones become leaves; `sliced`: the body gets one entry along the first axis."""
        self.outer, self.shown, self.sliced = outer, [], []
        self.sources: list[Source] = []
        self.places: dict[int, int] = {}  # argument -> leaf of the body
        self.manual, self.is_typed = outer.manual, outer.is_typed
        for place, (argument, cut) in enumerate(zip(arguments, sliced, strict=True)):
            if not isinstance(argument, Tracked):
                continue
            one = _as_source(outer, argument)
            if cut:
                above = one.split_by([0])
                one = Source(one.shape[1:], one.names[1:], one.whole[1:], above)
            if len(one.shape) >= 2:
                self.places[place] = len(self.sources)
                self.sources.append(one)
                self.shown.append(argument)
                self.sliced.append(cut)
        self.keys: dict[Key, dict[str, Any]] = {}

    def run(self, jaxpr: Any, values: Sequence[Any]) -> tuple[list[Any], Frame]:
        frame = Frame(self.sources, self.outer.diagonal_only, self.manual, self.is_typed)
        tracked = [
            Tracked(v, (views.whole(self.places[i], jnp.shape(v)),)) if i in self.places else v
            for i, v in enumerate(values)
        ]
        out = list(map(dense, run(frame, jaxpr, tracked)))
        for key, sums in frame.sums.items():
            self.keys[key] = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in sums.items()}
        for theirs, ours in ((frame.unseen, self.outer.unseen), (frame.other, self.outer.other)):
            for number, notes in theirs.items():
                for note in notes:
                    self.outer.note(ours, self.shown[number], note)
        return out, frame

    def start(self, key: Key) -> Sums:
        """Zeros for the sums of one use, which is known once the body has run."""
        number, _, stack = key
        return products.zeros(self.keys[key], self.sources[number].split_by(stack))

    def finish(self, keys: Sequence[Key], sums: Sequence[Sums]) -> None:
        """Hand the sums of these uses to the leaves outside."""
        for (number, axes, stack), one in zip(keys, sums, strict=True):
            shift = int(self.sliced[number])
            batch = [*([0] if shift else []), *(axis + shift for axis in stack)]
            for view in self.shown[number].views:
                try:
                    self.outer.add(view, batch, [axis + shift for axis in axes], one)
                except _NotFollowed as why:
                    self.outer.note(self.outer.unseen, Tracked(None, (view,)), str(why))


def _as_source(frame: Frame, tracked: Tracked) -> Source:
    """An array as a leaf of a body: an axis that is one whole axis of a leaf is split over devices as that is."""
    shape = jnp.shape(tracked.value)
    above = frozenset[str]().union(*(frame.sources[v.source].split_by(stack_axes(v, ())) for v in tracked.views))
    names, whole = [], []
    for axis, size in enumerate(shape):
        found: tuple[str, ...] = ()
        for view in tracked.views:
            for leaf_axis, _, _ in view.axes[axis]:
                found = found or frame.sources[view.source].names[leaf_axis]
                if found and len(view.axes[axis]) == 1 and len(tracked.views) == 1:
                    size = frame.sources[view.source].whole[leaf_axis]
        names.append(found)
        whole.append(size)
    return Source(tuple(shape), tuple(names), tuple(whole), above)


def _unfollowed(frame: Frame, body: Body, operands: Sequence[Any], name: str) -> None:
    for place, operand in enumerate(operands):
        if isinstance(operand, Tracked) and place not in body.places:
            frame.note(frame.other, operand, name)


@rule("scan")
def _scan(frame: Frame, primitive: Any, operands: list[Any], params: dict[str, Any]) -> list[Any]:
    jaxpr = params["jaxpr"]
    n_consts, n_carry = jaxprs.scan_counts(params)
    first = n_consts + n_carry
    kept = {at for at, place in jaxprs.unchanged(jaxpr) if place == n_consts + at and at < n_carry}
    is_carry = [n_consts <= i < first and i - n_consts not in kept for i in range(len(operands))]
    body = Body(frame, [dense(o) if c else o for o, c in zip(operands, is_carry, strict=True)],
                [i >= first for i in range(len(operands))])  # fmt: skip
    _unfollowed(frame, body, operands, "scan, which changes it")
    values = list(map(dense, operands))
    consts, carry, xs = values[:n_consts], values[n_consts:first], values[first:]
    jax.eval_shape(lambda c, x: body.run(jaxpr, [*consts, *c, *x])[0], carry, [_row(x) for x in xs])
    summed = [key for key in body.keys if not body.sliced[key[0]]]
    stacked = [key for key in body.keys if body.sliced[key[0]]]

    def step(state: Any, x: list[Any]) -> tuple[Any, Any]:
        carry, sums = state
        out, inner = body.run(jaxpr, [*consts, *carry, *x])
        sums = [products.added(s, inner.sums[key]) for s, key in zip(sums, summed, strict=True)]
        return (out[:n_carry], sums), (out[n_carry:], [inner.sums[key] for key in stacked])

    options = {k: params[k] for k in ("reverse", "unroll", "_split_transpose") if k in params}
    start = carry, [body.start(key) for key in summed]
    (carry, sums), (ys, parts) = lax.scan(step, start, xs, length=params["length"], **options)
    body.finish([*summed, *stacked], [*sums, *parts])
    return [*carry, *ys]


def _row(x: Any) -> Any:
    return jax.eval_shape(lambda x: lax.index_in_dim(x, 0, keepdims=False), x)


@rule("while")
def _while(frame: Frame, primitive: Any, operands: list[Any], params: dict[str, Any]) -> list[Any]:
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    first = n_cond + n_body
    kept = {at for at, place in jaxprs.unchanged(params["body_jaxpr"]) if place == n_body + at}
    seen = [o if n_body > i or i - n_body in kept else dense(o) for i, o in enumerate(operands[n_cond:])]
    body = Body(frame, seen, [False] * len(seen))
    _unfollowed(frame, body, operands[n_cond:], "while, which changes it")
    values = list(map(dense, operands))
    cond_consts, consts, carry = values[:n_cond], values[n_cond:first], values[first:]
    jax.eval_shape(lambda c: body.run(params["body_jaxpr"], [*consts, *c])[0], carry)
    keys = list(body.keys)

    def step(state: Any) -> Any:
        carry, sums = state
        out, inner = body.run(params["body_jaxpr"], [*consts, *carry])
        return out, [products.added(s, inner.sums[key]) for s, key in zip(sums, keys, strict=True)]

    def go_on(state: Any) -> Any:
        return jaxprs.jaxpr_function(params["cond_jaxpr"])(*cond_consts, *state[0])[0]

    carry, sums = lax.while_loop(go_on, step, (carry, [body.start(key) for key in keys]))
    body.finish(keys, sums)
    return list(carry)


@rule("cond")
def _cond(frame: Frame, primitive: Any, operands: list[Any], params: dict[str, Any]) -> list[Any]:
    index, arguments = dense(operands[0]), operands[1:]
    body = Body(frame, arguments, [False] * len(arguments))
    _unfollowed(frame, body, arguments, "cond")
    values = list(map(dense, arguments))
    for branch in params["branches"]:
        jax.eval_shape(lambda *v, branch=branch: body.run(branch, v)[0], *values)
    keys = list(body.keys)

    def observed(branch: Any) -> Callable[..., Any]:
        def call(*values: Any) -> Any:
            out, inner = body.run(branch, values)
            return out, [inner.sums[key] if key in inner.sums else body.start(key) for key in keys]

        return call

    out, sums = lax.switch(index, [observed(branch) for branch in params["branches"]], *values)
    body.finish(keys, sums)
    return list(out)


@rule("shard_map")
def _shard_map(frame: Frame, primitive: Any, operands: list[Any], params: dict[str, Any]) -> list[Any]:
    jaxpr, specs = params["jaxpr"], params["in_specs"]
    names = tuple(sorted(params["newly_manual_axes"]))
    body = Body(frame, operands, [False] * len(operands))
    body.manual, body.is_typed = (*frame.manual, *names), params["check_vma"] and frame.is_typed
    sizes = dict(zip(params["mesh"].axis_names, params["mesh"].axis_sizes, strict=True))
    for place, number in body.places.items():
        body.sources[number] = _part(body.sources[number], specs[place], sizes)
    _unfollowed(frame, body, operands, "shard_map")
    values = list(map(dense, operands))

    def mapped(f: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(
            f, mesh=params["mesh"], in_specs=tuple(specs), out_specs=out_specs, axis_names=set(names),
            check_vma=params["check_vma"],
        )  # fmt: skip

    out_specs = tuple(params["out_specs"])
    jax.eval_shape(mapped(lambda *v: tuple(body.run(jaxpr, v)[0]), out_specs), *values)
    keys = list(body.keys)

    def split(number: int, axis: int) -> Any:
        return tuple(name for name in body.sources[number].names[axis] if name in names) or None

    per_key = [PartitionSpec(*(split(number, axis) for axis in stack)) for number, _, stack in keys]

    def observed(*values: Any) -> Any:
        out, inner = body.run(jaxpr, values)
        return tuple(out), tuple(inner.sums[key] for key in keys)

    out, sums = mapped(observed, (out_specs, tuple(per_key)))(*values)
    body.finish(keys, sums)
    return list(out)


def _part(whole: Source, spec: PartitionSpec, sizes: dict[str, int]) -> Source:
    """What one device gets of an argument."""
    entries = [*spec, *[None] * (len(whole.shape) - len(spec))]
    names = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]
    shape = list(whole.shape)
    for axis, here in enumerate(names):
        for name in here:
            shape[axis] //= sizes[name]
    joined = tuple((*a, *b) for a, b in zip(whole.names, names, strict=True))
    return Source(tuple(shape), joined, whole.whole, whole.above)
