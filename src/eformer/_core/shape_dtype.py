"""The shape and dtype of an implicit array, derived from its children and never stored beside them.

Three facts decide. The children (vmap, scan and stacking change their shapes, and the logical shape follows). What the
instance was told (`shape=`, `dtype=`), kept only where `materialize` cannot do without. And the ranks its leaves had
when it was built, kept unless the class declares `core_ndim`: more axes on every leaf are batch axes in front, fewer
mean that an axis other than a batch axis was sliced, which is an error rather than a wrong value.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from eformer import _messages, errors
from eformer._jax import avals

from .fields import DECLARED, layout, replaceable_fields

_MEMO_LIMIT = 8192
_memo: dict[Any, tuple[tuple[int, ...], Any]] = {}
_settled: dict[Any, tuple[bool, bool]] = {}


class _State(threading.local):
    keys: tuple[Any, ...] = ()  # of the arrays whose shapes are being derived, the outermost first


_state = _State()


def deriving() -> bool:
    """Is `materialize` being called only to learn a shape?"""
    return bool(_state.keys)


@contextlib.contextmanager
def _abstractly(key: Any) -> Iterator[None]:
    outer = _state.keys
    _state.keys = (*outer, key)
    try:
        yield
    finally:
        _state.keys = outer


def leaf_key(leaf: Any) -> tuple[tuple[int, ...], Any] | None:
    """(shape, dtype) of an array-like leaf, or None for a placeholder (a spec, a sentinel of some tree_map)."""
    try:
        return leaf.shape, leaf.dtype
    except AttributeError:
        if isinstance(leaf, (bool, int, float, complex)):
            return (), jax.dtypes.canonicalize_dtype(np.result_type(type(leaf)))
        return None


def _keys_of(q: Any, leaves: Sequence[Any]) -> tuple[tuple[tuple[int, ...], Any], ...]:
    keys = tuple(map(leaf_key, leaves))
    if None in keys:
        named = [(name, leaf) for name in layout(type(q)).children for leaf in jtu.tree_leaves(getattr(q, name))]
        raise bad_child(q, *next((name, leaf) for name, leaf in named if leaf_key(leaf) is None))
    return keys  # pyright: ignore[reportReturnType]


def bad_child(q: Any, field: str, value: Any) -> Exception:
    kind = type(value).__name__
    message = _messages.BAD_CHILD.format(field=field, name=type(q).__name__, value=value, kind=kind)
    return errors.InvalidImplicitArrayError(message)


def require_hashable(q: Any) -> None:
    """Static data is part of compilation keys."""
    for name in layout(type(q)).aux:
        value = getattr(q, name)
        try:
            hash(value)
        except TypeError as err:
            kind = type(value).__name__
            message = _messages.UNHASHABLE_AUX.format(field=name, name=type(q).__name__, kind=kind, value=value)
            raise errors.InvalidImplicitArrayError(message) from err


def settle(q: Any) -> None:
    """Decide, once per instance, what it has to remember beside its children."""
    state = q.__dict__
    state["_settled"] = True
    keep = (False, False)
    for slot, default in (("_shape", q.default_shape), ("_dtype", q.default_dtype)):
        if default is not None and state.get(slot) is None:
            state[slot] = tuple(default) if slot == "_shape" else np.dtype(default)
    if q._remembers is not None:
        keep = q._remembers
        compare(q, "shape", None if keep[0] else state.get("_shape"), q.compute_shape())
        state["_shape"], state["_dtype"] = state.get("_shape") if keep[0] else None, state.get("_dtype")
    elif state.get("_shape") is not None or state.get("_dtype") is not None:
        keep = _what_to_keep(q)
        state["_shape"] = state["_shape"] if keep[0] else None
        state["_dtype"] = state["_dtype"] if keep[1] else None
    state["_ranks"] = None if q.core_ndim is not None and not keep[0] else _ranks(q)
    state["__dataclass_fields__"] = replaceable_fields(type(q), keep)
    state.pop("_aux", None)  # deciding looked at the structure, which has changed since


def _ranks(q: Any) -> tuple[int, ...] | None:
    keys = [leaf_key(leaf) for leaf in jtu.tree_leaves(layout(type(q)).get_children(q))]
    return None if None in keys else tuple(len(k[0]) for k in keys)  # pyright: ignore[reportOptionalSubscript]


def _what_to_keep(q: Any) -> tuple[bool, bool]:
    """(shape, dtype): which declared ones `materialize` needs; those it does not need are checked and dropped."""
    shape, dtype = q.__dict__.get("_shape"), q.__dict__.get("_dtype")
    leaves = jtu.tree_leaves(layout(type(q)).get_children(q))
    if any(leaf_key(leaf) is None for leaf in leaves):
        return shape is not None, dtype is not None  # placeholders: nothing can be checked
    key = (jtu.tree_structure(q), tuple(map(leaf_key, leaves)))
    if key not in _settled:
        _bound(_settled)[key] = _try_without(q, shape, dtype)
    return _settled[key]


def _try_without(q: Any, shape: Any, dtype: Any) -> tuple[bool, bool]:
    for keep_shape, keep_dtype in itertools.product((False, True), repeat=2):
        if (keep_shape and shape is None) or (keep_dtype and dtype is None):
            continue
        trial = _copy_declaring(q, shape if keep_shape else None, dtype if keep_dtype else None)
        try:
            found_shape, found_dtype = _infer_unbatched(trial)
        except errors.UninitializedAval:
            continue
        compare(q, "shape", shape, found_shape)
        compare(q, "dtype", dtype, found_dtype)
        return keep_shape, keep_dtype
    return shape is not None, dtype is not None


def _copy_declaring(q: Any, shape: Any, dtype: Any) -> Any:
    copy = object.__new__(type(q))
    copy.__dict__.update(q.__dict__, _shape=shape, _dtype=dtype, _ranks=None, _settled=True)
    for cache in ("_known", "_aux"):
        copy.__dict__.pop(cache, None)
    return copy


def compare(q: Any, what: str, declared: Any, found: Any) -> None:
    """Refuse what was declared if `materialize` gives something else."""
    if declared is not None and declared != found:
        name = type(q).__name__
        raise errors.AvalMismatchError(
            _messages.DECLARED_MISMATCH.format(
                name=name, what=what, declared=declared, source=f"{name}.materialize()", found=found
            )
        )


def shape_and_dtype(q: Any) -> tuple[tuple[int, ...], Any]:
    known = q.__dict__.get("_known")
    if known is None:
        leaves, treedef = jtu.tree_flatten(q)
        key = (treedef, _keys_of(q, leaves))
        known = _memo.get(key)
        if known is None:
            if key in _state.keys:
                return _declared(q, "shape"), _declared(q, "dtype")
            known = _bound(_memo)[key] = _infer(q, leaves, treedef, key)
        q.__dict__["_known"] = known
    return known


def derived(q: Any, index: int) -> Any:
    """The shape (0) or the dtype (1).

    `materialize` may read one of them while we call it to learn them: then only declarations can answer.
    """
    if _state.keys:
        leaves, treedef = jtu.tree_flatten(q)
        if (treedef, _keys_of(q, leaves)) in _state.keys:
            return _declared(q, DECLARED[index])
    return shape_and_dtype(q)[index]


def _declared(q: Any, what: str) -> Any:
    value = q.__dict__.get(f"_{what}")
    value = getattr(q, f"compute_{what}")() if value is None else value
    if value is None:
        raise errors.UninitializedAval(_messages.NEEDS_SHAPE.format(name=type(q).__name__, what=what))
    return tuple(value) if what == "shape" else np.dtype(value)


def batch_rank(q: Any, leaves: Sequence[Any]) -> int:
    """How many leading axes the leaves have gained since `q` was built (negative: lost)."""
    ranks = q.__dict__.get("_ranks")
    if not ranks:
        return 0
    gained = {len(leaf_key(leaf)[0]) - rank for leaf, rank in zip(leaves, ranks, strict=True)}  # pyright: ignore[reportOptionalSubscript]
    if len(gained) > 1:
        raise errors.SlicedBelowCoreError(_rank_message(_messages.UNEVEN_BATCH, q, leaves))
    return gained.pop()


def expand_ranks(q: Any, was_leaf: Callable[[Any], bool]) -> None:
    """Let a fresh `q` remember the ranks of the leaves of those children that were single leaves when it was built."""
    children = layout(type(q)).get_children(q)
    for nested in jtu.tree_leaves(children, is_leaf=lambda x: hasattr(x, "materialize")):
        if hasattr(nested, "materialize") and not was_leaf(nested):
            expand_ranks(nested, was_leaf)
    ranks, expanded = q.__dict__.get("_ranks"), []
    if ranks is None:
        return
    for leaf, rank in zip(jtu.tree_leaves(children, is_leaf=was_leaf), ranks, strict=True):
        gained = leaf.ndim - rank
        expanded += [part.ndim - gained for part in jtu.tree_leaves(leaf)] if was_leaf(leaf) else [rank]
    q.__dict__["_ranks"] = tuple(expanded)
    q.__dict__.pop("_aux", None)


def _rank_message(template: str, q: Any, leaves: Sequence[Any]) -> str:
    now = tuple(len(leaf_key(leaf)[0]) for leaf in leaves)  # pyright: ignore[reportOptionalSubscript]
    built = q.__dict__.get("_ranks")
    if built is None:  # the class declares its core, so instances need not remember what they were built with
        return _messages.BELOW_DECLARED_CORE.format(name=type(q).__name__, now=now, core=q.core_ndim)
    core = "" if q.core_ndim is None else f" (core_ndim={q.core_ndim})"
    return template.format(name=type(q).__name__, now=now, built=built, core=core)


def _infer(q: Any, leaves: Sequence[Any], treedef: Any, key: Any) -> tuple[tuple[int, ...], Any]:
    extra = batch_rank(q, leaves)
    if extra > 0:
        core = jtu.tree_unflatten(treedef, [_struct(leaf, drop=extra) for leaf in leaves])
        core_shape, dtype = shape_and_dtype(core)
        return (*leaf_key(leaves[0])[0][:extra], *core_shape), dtype  # pyright: ignore[reportOptionalSubscript]
    if extra < 0:
        declared = q.__dict__.get("_shape")
        if declared is None or q.core_ndim is None or len(declared) + extra < q.core_ndim:
            raise errors.SlicedBelowCoreError(_rank_message(_messages.BELOW_CORE, q, leaves))
        q = _copy_declaring(q, declared[-extra:], q.__dict__.get("_dtype"))
    shape, dtype = _infer_unbatched(q, key)
    if q.core_ndim is not None and len(shape) < q.core_ndim:
        raise errors.SlicedBelowCoreError(_rank_message(_messages.BELOW_CORE, q, leaves))
    return shape, dtype


def _infer_unbatched(q: Any, key: Any = None) -> tuple[tuple[int, ...], Any]:
    shape, dtype = q.__dict__.get("_shape"), q.__dict__.get("_dtype")
    shape = q.compute_shape() if shape is None else shape
    dtype = q.compute_dtype() if dtype is None else dtype
    if shape is None or dtype is None:
        out = abstract_materialize(q, key)
        shape = out.shape if shape is None else shape
        dtype = out.dtype if dtype is None else dtype
        compare(q, "shape", tuple(shape), out.shape)
    return tuple(shape), dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype)


def abstract_materialize(q: Any, key: Any = None) -> Any:
    """The shape and dtype `materialize` would give, without computing anything."""
    leaves, treedef = jtu.tree_flatten(q)
    if key is None:
        key = (treedef, _keys_of(q, leaves))

    def run(*leaves: Any) -> Any:
        out = jtu.tree_unflatten(treedef, leaves)
        while hasattr(out, "materialize"):
            out = out.materialize()
        return out

    with _abstractly(key), explained(q), avals.in_mesh_of(leaves):
        out = jax.eval_shape(run, *map(_struct, leaves))
    if not hasattr(out, "shape"):
        raise errors.InvalidImplicitArrayError(
            f"{type(q).__name__}.materialize() must return one array, got {type(out).__name__}: {out!r}"
        )
    return out


@contextlib.contextmanager
def explained(q: Any) -> Iterator[None]:
    """Say which array was at fault when its `materialize` fails.

    TypeError and ValueError, which JAX raises for children that do not fit together, keep their type and get a note;
    anything else becomes a MaterializationError, chained to the cause.
    """
    passed_on = (errors.UninitializedAval, errors.MaterializationError, errors.InvalidImplicitArrayError, Warning)
    try:
        yield
    except (*passed_on, KeyboardInterrupt, GeneratorExit, SystemExit):
        raise
    except (TypeError, ValueError) as err:
        err.add_note(f"while materializing a {type(q).__name__} with children {describe_leaves(q)}")
        raise
    except BaseException as err:
        raise errors.MaterializationError(
            f"{type(q).__name__}.materialize() failed on children {describe_leaves(q)}: {type(err).__name__}: {err}"
        ) from err


def describe_leaves(q: Any) -> str:
    leaves = jtu.tree_leaves(q)
    return ", ".join(f"{key[1]}{list(key[0])}" for key in map(leaf_key, leaves) if key is not None)


def _struct(leaf: Any, drop: int = 0) -> jax.ShapeDtypeStruct:
    shape, dtype = leaf_key(leaf)  # pyright: ignore[reportGeneralTypeIssues]
    sharding = None if drop else avals.explicit_sharding_of(leaf)
    return jax.ShapeDtypeStruct(shape[drop:], dtype, sharding=sharding)


def aval_of(q: Any) -> Any:
    """The abstract value JAX sees, with the varying axes and the explicit sharding of the children."""
    aval = q.__dict__.get("_aval")
    if aval is None:
        shape, dtype = shape_and_dtype(q)
        leaves = jtu.tree_leaves(q)
        aval = avals.derived_aval(shape, dtype, leaves)
        if any(avals.explicit_sharding_of(leaf) is not None for leaf in leaves) and not batch_rank(q, leaves):
            aval = avals.with_sharding_type(aval, abstract_materialize(q).sharding)
        q.__dict__["_aval"] = aval
    return aval


def _bound(memo: dict[Any, Any]) -> dict[Any, Any]:
    if len(memo) >= _MEMO_LIMIT:
        memo.clear()
    return memo
