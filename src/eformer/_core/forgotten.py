"""Where `implicit` was forgotten: what is said when JAX or Flax takes an array apart and cannot go on with its parts.

They would say it in words of their own, which do not name the cause.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu

from eformer import _messages, errors
from eformer._jax import callers

from .fields import stored_arrays
from .operators import ArrayOperators


def check(q: Any, frame: FrameType) -> None:
    """Raise if the function of this frame cannot do what it is about to do with the parts of `q`."""
    _CHECKS[frame.f_code.co_name](q, frame, frame.f_locals)


def _loops_and_branches(q: Any, frame: FrameType, given: dict[str, Any]) -> None:
    """The structures of two values differ, and JAX is looking for the place."""
    others = [side for side in (given.get("t1"), given.get("t2")) if side is not q]
    if len(others) != 1 or isinstance(others[0], ArrayOperators):
        return
    if callers.in_loop_or_branch(frame) and jtu.treedef_is_leaf(jtu.tree_structure(others[0])):
        path = jtu.keystr(given.get("path") or ())
        where = f"at {path}, " if path else ""
        message = _messages.DENSE_ON_ONE_SIDE.format(where=where, name=type(q).__name__)
        raise errors.ForgottenImplicitError(message)


def _gradient(q: Any, frame: FrameType, given: dict[str, Any]) -> None:
    types = [leaf.dtype for leaf in stored_arrays(q)]
    if given.get("allow_int") is False and not all(jnp.issubdtype(dtype, jnp.inexact) for dtype in types):
        raise errors.QuantizedGradientError(_messages.GRADIENT_OF_STORED.format(name=type(q).__name__))


def _linen(q: Any, frame: FrameType, given: dict[str, Any]) -> None:
    wanted: Any = given.get("abs_value_flat") or ()
    differ = any(leaf.shape != want.shape for leaf, want in zip(stored_arrays(q), wanted, strict=False))
    if differ and tuple(q.shape) == tuple(wanted[0].shape):  # or it does not fit anyway, and Flax may say so
        param = f"{getattr(given.get('self'), 'path_text', '').rstrip('/')}/{given.get('name')}"
        message = _messages.LINEN_TAKES_APART.format(wanted=tuple(q.shape), param=param, name=type(q).__name__)
        raise errors.ForgottenImplicitError(message)


def _shard_map(q: Any, frame: FrameType, given: dict[str, Any]) -> None:
    """One spec for all that an array stores, where that cuts other axes than its own or what cannot be cut."""
    spec, parts = callers.split_in_shard_map(q, frame)
    shapes = [leaf.shape for leaf in stored_arrays(q)]
    for axis, count in parts.items():
        cut = all(axis < len(shape) and shape[axis] % count == 0 for shape in shapes)
        if count > 1 and not (cut and q.stores_axis_in_place(axis, q.ndim)):
            raise errors.ShardingError(_messages.SHARDED_STORAGE.format(name=type(q).__name__, spec=spec))


def _associative_scan(q: Any, frame: FrameType, given: dict[str, Any]) -> None:
    raise errors.SlicedBelowCoreError(_messages.SCANNED_STORAGE.format(name=type(q).__name__))


_CHECKS = {
    "associative_scan": _associative_scan,
    "wrapped": _shard_map,
    "_equality_errors": _loops_and_branches,
    "value_and_grad_f": _gradient,
    "param": _linen,
}
