"""Materializing: the policy that governs it, the one place where it is noticed, and the last resort of dispatch."""

from __future__ import annotations

import contextlib
import functools
import math
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from eformer import _messages, errors
from eformer import _settings as settings
from eformer._jax import callers, traces
from eformer._record import record, recording

from . import shape_dtype as _shape_dtype
from .operators import ArrayOperators
from .operators import materialize as materialize

# Part of JAX's compilation key: a program traced under one policy, or with one token, is traced again under another.
_policy, _token = jax.make_user_context(default_value=None), jax.make_user_context(default_value=None)
_warned: set[tuple[Any, ...]] = set()


class _State(threading.local):
    primitive: Any = None  # whose operands are being handled
    materializing: Any = None  # the array inside whose materialize() we are
    requested: bool = False  # a dense array was asked for by name
    declined: tuple[Any, str, dict[str, Any]] | None = None  # the primitive and handler that last gave NotImplemented
    cut: Any = None  # the spec by which a shard_map cannot split the array
    notices: list[Any] | None = None  # where to keep what concerns whoever calls the code being traced


state = _State()
OUTSIDE = "a function outside implicit"


def name_array(q: Any, path: str, note: str = "") -> None:
    """Remember where in a model an array is, for messages, and how it was made, for reports.

    Copies that are rebuilt from its parts remember it too.
    """
    jtu.tree_flatten(q)
    q.__dict__["_aux"].path, q.__dict__["_aux"].note = path, note


def note_of(q: Any) -> str:
    """What `name_array` noted of an array."""
    return getattr(q.__dict__.get("_aux"), "note", "")


@contextlib.contextmanager
def during(**values: Any) -> Iterator[None]:
    """A block in which the state of this thread has these values."""
    before = {name: getattr(state, name) for name in values}
    state.__dict__.update(values)
    try:
        yield
    finally:
        state.__dict__.update(before)


def policy_in_force() -> settings.Policy:
    return settings.materialization_policy() if _policy.value is None else _policy.value


def materialization_policy(policy: str) -> contextlib.AbstractContextManager[Any]:
    """What to do in this block when an operation has no handler: `"allow"`, `"warn"` (once per place) or `"error"`.

    >>> with materialization_policy("error"):
    ...     pass
    """
    return _policy(settings.checked_policy(policy, source="the policy"))


def fresh_trace(token: object) -> contextlib.AbstractContextManager[Any]:
    """A block in which nothing traced before is reused, so that every decision is made, and seen, again."""
    return _token(token)


def notice(q: Any) -> None:
    """Record that `q` is about to be materialized, and apply the policy unless it was requested by name."""
    primitive = None if state.requested else state.primitive
    policy = "allow" if primitive is None else policy_in_force()
    warn = policy == "warn" and q.warn_on_materialize
    if not (recording() or warn or policy == "error"):
        return
    replayed = callers.replayed_location()
    where = replayed or callers.calling_location()
    told = warn and _key(type(q), str(primitive), where) in _warned and (replayed is not None or state.notices is None)
    if policy != "error" and told and not recording():
        return
    facts = _facts(q, q.shape, primitive, where)
    record("materialize", dtype=q.dtype, **facts)
    if policy == "error":
        raise errors.MaterializationError(_message(_messages.REFUSED, facts, primitive))
    if warn:
        message = _message(_messages.WARNED, facts, primitive)
        kind, primitive = type(q), facts["primitive"]
        if replayed is None and state.notices is not None:
            state.notices.append((kind, primitive, message))
        _warn_once(kind, primitive, message, where)


def _facts(q: Any, shape: Sequence[int], primitive: Any, where: tuple[str, int]) -> dict[str, Any]:
    return {
        "array": repr(q),
        "type": type(q).__name__,
        "shape": tuple(shape),
        "primitive": "an explicit call" if primitive is None else str(primitive),
        "dense_bytes": math.prod(shape) * q.itemsize,
        "where": f"{where[0]}:{where[1]}",
        "path": getattr(q.__dict__.get("_aux"), "path", ""),
    }


def _message(template: str, facts: dict[str, Any], primitive: Any) -> str:
    named = f", {facts['path']!r}," if facts["path"] else ""
    return template.format(**{**facts, "path": named}, cause=_cause(facts, primitive))


def _cause(facts: dict[str, Any], primitive: Any) -> str:
    """Why an array is about to become dense, and the one line that mends it."""
    if primitive == OUTSIDE:
        return _messages.FORGOTTEN.format(**facts)
    if state.cut is not None:
        return _messages.CUT.format(cut=state.cut)
    if state.declined is None or state.declined[0] is not primitive:
        return _messages.NO_HANDLER.format(**facts)
    _, handler, params = state.declined
    listed = textwrap.shorten(", ".join(f"{k}={v!r}" for k, v in params.items()) or "these operands", 200)
    return _messages.DECLINED.format(**facts, handler=handler, params=listed)


def notice_lookup(q: Any, shape: Sequence[int]) -> None:
    """Record that a lookup decodes values of this shape from `q`. They are activations: no policy refuses them."""
    if recording():
        where = callers.replayed_location() or callers.calling_location()
        record("decode", dtype=q.dtype, **_facts(q, shape, state.primitive, where))


def repeat_notices(notices: list[tuple[type, str, str]], types: set[type]) -> None:
    """Warn the code that is running about what was noticed, for these types, when the function it calls was traced."""
    if policy_in_force() == "warn":
        where = callers.replayed_location() or callers.calling_location()
        for kind, primitive, message in tuple(notices):
            if kind in types:
                _warn_once(kind, primitive, message, where)


def _key(kind: type, primitive: str, where: tuple[str, int]) -> tuple[Any, ...]:
    """What is told once: a place; where `implicit` was forgotten, a program, whatever else of it becomes dense."""
    return (primitive, callers.program_location() or where) if primitive == OUTSIDE else (kind, primitive, *where)


def _warn_once(kind: type, primitive: str, message: str, where: tuple[str, int]) -> None:
    key = _key(kind, primitive, where)
    if key not in _warned:
        warnings.warn_explicit(message, errors.MaterializationWarning, *where)
        _warned.add(key)


def instrumented(raw: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a subclass' `materialize`: notice it, map it over batch axes, check what it returns."""

    @functools.wraps(raw)
    def materialize(self: Any) -> Any:
        # Only to learn a shape; or a part of an array that is being materialized already, or super().
        if _shape_dtype.deriving() or state.materializing is not None:
            return _over_batch_axes(raw, self)
        notice(self)
        with during(materializing=self):
            out = _over_batch_axes(raw, self)
        for what in ("shape", "dtype"):
            _shape_dtype.compare(self, what, getattr(self, what), getattr(out, what, None))
        return out

    return materialize


def _over_batch_axes(raw: Callable[[Any], Any], q: Any) -> Any:
    leaves, treedef = jtu.tree_flatten(q)
    extra = _shape_dtype.batch_rank(q, leaves)
    if extra <= 0:
        return raw(q)

    def run(*leaves: Any) -> Any:
        return raw(jtu.tree_unflatten(treedef, leaves))

    for _ in range(extra):
        run = jax.vmap(run)
    return run(*leaves)


def decode(part: Any, of: Any = None) -> Any:
    """The dense array of a part: what a lookup took out of `of`, or a panel of a product. No policy is about these."""
    if of is not None:
        notice_lookup(of, part.shape)
    with during(materializing=part):
        return part.materialize()


def materialize_on_request(q: Any) -> Any:
    """As `materialize`, for conversions that ask for a dense array by name (`np.asarray`, `jnp.asarray`)."""
    with during(requested=True):
        return materialize(q)


def dense_for(primitive: Any, value: Any) -> Any:
    """`value`, materialized on behalf of a primitive if it is implicit."""
    if not isinstance(value, ArrayOperators):
        return value
    with during(primitive=primitive, requested=False), _shape_dtype.explained(value):
        return materialize(value)


def materialize_nested(implicit_arr: Any, full: bool = False, on_failure: Literal["raise", "ones"] = "raise") -> Any:
    """Materialize one layer of an implicit array, or all of them.

    Args:
        implicit_arr: an implicit array; anything else is returned unchanged.
        full: go on until the result is dense.
        on_failure: `"raise"` a `MaterializationError` from the cause, or give an array of `"ones"` of the declared
            shape and dtype, with a warning.
    """
    if on_failure not in ("raise", "ones"):
        raise ValueError(f"on_failure is {on_failure!r}; allowed values are 'raise' and 'ones'.")
    q = implicit_arr
    if not isinstance(q, ArrayOperators):
        return q
    try:
        return materialize(q) if full else q.materialize()
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as err:
        cause = f"{type(err).__name__}: {err}"
        message = f"materializing {type(q).__name__}({_shape_dtype.describe_leaves(q)}) failed: {cause}"
        if on_failure == "raise":
            raise errors.MaterializationError(message) from err
    warnings.warn(f"{message}; returning ones as asked", errors.MaterializationWarning, stacklevel=2)
    return jnp.ones(q.shape, q.dtype)


def default_handler(primitive: Any, *args: Any, **params: Any) -> Any:
    """Bind a primitive as JAX would."""
    return primitive.bind(*args, **traces.bind_params(primitive, params))


def materialize_handler(primitive: Any, *vals: Any, params: dict[str, Any]) -> Any:
    """Materialize every implicit operand, then bind."""
    return default_handler(primitive, *(dense_for(primitive, v) for v in vals), **params)
