"""Attention of one new token over the keys and values of a text so far, dense or quantized.

    scores = q @ keys.T * scale          capped, if there is a cap
    y      = softmax(scores) @ values    over the positions up to `place`, within the window

q is (batch, heads, group, size), keys and values are (batch, heads, positions, size), or stacks of such with an index.
An operation of its own, since one kernel can do all of it, and read an entry of a stack where it lies.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eformer._jax import primitives

from . import cuda
from .matmul import qmatmul
from .operation import Operation
from .parameters import Problem
from .select import Candidate, anything

DENSE = "dense"


@dataclasses.dataclass(frozen=True)
class Attention(Problem):
    """The parameters of the operation, and with sizes the problem: `fmt` and `block` are those of keys.

    `m` is the size of a group, `rows` the number of positions, `cols` the size of a head.
    """

    values: str = DENSE
    values_block: int | None = None
    values_scale_dtype: np.dtype | None = None
    factor: float = 1.0
    cap: float | None = None
    window: int | None = None
    stacked: bool = False

    def __str__(self) -> str:
        heads, kinds = " × ".join(map(str, self.batch)), dict.fromkeys((self.fmt, self.values))
        return f"{heads} × {self.m} queries of {self.x_dtype}, {' and '.join(kinds)} cache of {self.rows} × {self.cols}"

    def parts(self, operands: tuple[Any, ...]) -> tuple[Any, ...]:
        """q, keys, values, place, index or None, scales or two times None."""
        q, keys, values, place, *rest = operands
        index = rest.pop(0) if self.stacked else None
        return q, keys, values, place, index, *(rest or (None, None))


def attend(
    q: Any,
    keys: Any,
    values: Any,
    place: Any,
    index: Any = None,
    *,
    factor: float,
    cap: float | None = None,
    window: int | None = None,
) -> jax.Array:
    """What `place`, the last position so far, sees; of entry `index`, where keys and values are stacks.

    Under `implicit`, caches of quantized rows are read as they are.

    >>> keys = jnp.zeros((1, 1, 4, 2))
    >>> values = jnp.arange(8.0).reshape(1, 1, 4, 2)
    >>> attend(jnp.ones((1, 1, 1, 2)), keys, values, 1, factor=1.0)
    Array([[[[1., 2.]]]], dtype=float32)
    """
    how = {"factor": float(factor), "cap": cap, "window": window, "stacked": index is not None}
    parameters = Attention(DENSE, "attention", q.shape[-1], None, np.dtype(q.dtype), **how)
    given = [jnp.asarray(place, jnp.int32), *([] if index is None else [jnp.asarray(index, jnp.int32)])]
    return ATTENTION.bind(parameters, q, keys, values, *given, announced=True)


def attend_quantized(parameters: Attention, operands: Any, formats: Any, blocks: Any, scales: Any) -> jax.Array:
    """As `attend` on the operands of the primitive, with the codes of keys and values in their places.

    Codes come as caches store them, with an axis of blocks: a view of an array that a loop has just written into would
    be a copy of it.
    """
    (fmt, values), (block, values_block) = formats, blocks
    how = {"fmt": fmt, "values": values, "block": block, "values_block": values_block}
    return ATTENTION.bind(dataclasses.replace(parameters, **how), *operands, *scales)


def _problem(parameters: Attention, platform: str, *operands: Any) -> Attention:
    q, keys, _, _, _, *scales = parameters.parts(operands)
    dtypes = [None if scale is None else np.dtype(scale.dtype) for scale in scales]
    return dataclasses.replace(
        parameters,
        platform=platform,
        batch=tuple(q.shape[:2]),
        m=q.shape[2],
        rows=keys.shape[2 + parameters.stacked],
        x_dtype=np.dtype(q.dtype),
        scale_dtype=dtypes[0],
        values_scale_dtype=dtypes[1],
    )


def in_products(problem: Attention, *operands: Any) -> jax.Array:
    """The readable twin: two products and a softmax between them."""
    q, keys, values, place, index, *scales = problem.parts(operands)
    scores = _multiply(problem.fmt, problem.block, "dot", q, keys, scales[0], index) * problem.factor
    if problem.cap is not None:
        scores = jnp.tanh(scores / problem.cap) * problem.cap
    positions = jnp.arange(keys.shape[2 + problem.stacked])
    seen = positions <= place
    if problem.window is not None:
        seen &= positions > place - problem.window
    scores = jnp.where(seen, scores.astype(jnp.promote_types(scores.dtype, jnp.float32)), -jnp.inf)
    odds = jax.nn.softmax(scores).astype(q.dtype)
    return _multiply(problem.values, problem.values_block, "axpy", odds, values, scales[1], index, problem.cols)


def _multiply(
    fmt: str, block: Any, form: str, x: jax.Array, codes: Any, scale: Any, index: Any, cols: int | None = None
) -> jax.Array:
    if index is not None:
        codes, scale = (a if a is None else lax.dynamic_index_in_dim(a, index, keepdims=False) for a in (codes, scale))
    if fmt == DENSE:
        axes = "bkgd,bksd->bkgs" if form == "dot" else "bkgs,bksd->bkgd"
        return jnp.einsum(axes, x, codes.astype(x.dtype))
    if block is None:  # a row is one block, which the storage of a cache has an axis for
        codes = codes[..., 0, :]
    return qmatmul(x, codes, scale, fmt=fmt, form=form, cols=cols or x.shape[-1], block=block)


def _jvp(primals: Any, tangents: Any, *, parameters: Attention) -> tuple[Any, Any]:
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, primitives.ad.Zero)]

    def along(*operands: Any) -> jax.Array:
        given = dict(zip(moving, operands, strict=True))
        return in_products(parameters, *(given.get(i, primal) for i, primal in enumerate(primals)))

    return jax.jvp(along, [primals[i] for i in moving], [tangents[i] for i in moving])


def _series(primals: Any, series: Any, *, parameters: Attention) -> tuple[Any, Any]:
    moving = [i for i, primal in enumerate(primals) if jnp.issubdtype(primal.dtype, jnp.inexact)]

    def along(*operands: Any) -> jax.Array:
        given = dict(zip(moving, operands, strict=True))
        return in_products(parameters, *(given.get(i, primal) for i, primal in enumerate(primals)))

    return primitives.jet.jet(along, [primals[i] for i in moving], [series[i] for i in moving])


def _batch(bind: Any, parameters: Attention, operands: Any, dims: Any) -> tuple[Any, int]:
    del bind
    return jax.vmap(lambda *each: in_products(parameters, *each), in_axes=tuple(dims))(*operands), 0


ATTENTION = Operation(
    "cache_attention",
    ("q", "keys", "values", "place"),
    result=lambda parameters, q, *rest: [(q.shape, parameters.out_dtype)],
    problem=_problem,
    candidates=(
        Candidate("native_cuda", "native", cuda.refuses_attention, cuda.attention),
        Candidate("products", "xla", anything, in_products, why="two products and a softmax"),
    ),
    batch=_batch,
    split=lambda operation, problem, *operands: in_products(problem, *operands),
    sharded_like=lambda parameters, q, *rest: [(q, axis) for axis in range(4)],
    derivative=_jvp,
)
primitives.define_series(ATTENTION.primitive, _series)
