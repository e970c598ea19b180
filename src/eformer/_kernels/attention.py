"""Attention of one new token over the keys and values of a text so far, dense or quantized.

    keys[place], values[place] = new     the token's own rows, where they are given
    scores = q @ keys.T * scale          capped, if there is a cap
    y      = softmax(scores) @ values    over the positions up to `place`, within the window

q is (batch, heads, group, size), keys and values are (batch, heads, positions, size), or stacks of such with an index.
All that the token has may come as one array, as a product makes it; rotary positions may be part of it.
An operation of its own, since one kernel can do all of it, and read and write an entry of a stack where it lies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eformer._jax import avals, primitives
from eformer.errors import QuantizedGradientError

from . import cuda
from .matmul import qmatmul
from .operation import NO_GRADIENT, Operation
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
    written: bool = False
    joined: bool = False  # q is (batch, values): queries of all heads, then the rows of keys, then those of values
    turned: bool = False  # by cosines and sines
    halves: bool = False  # a pair that is turned is (i, i + size / 2), not (2i, 2i + 1)
    encode: tuple[Callable[[Any], Any], ...] = ()  # rows of keys, and of values, as codes and scales

    def __str__(self) -> str:
        heads, kinds = " × ".join(map(str, self.batch)), dict.fromkeys((self.fmt, self.values))
        return f"{heads} × {self.m} queries of {self.x_dtype}, {' and '.join(kinds)} cache of {self.rows} × {self.cols}"

    def parts(self, operands: tuple[Any, ...]) -> tuple[Any, Any, Any, Any, Any, Any]:
        """q, rows to write or (), place, index or None, cosines and sines or None; then keys, values and, unless they
        are dense, their scales."""
        q, keys, values, place, *rest = operands
        index = rest.pop(0) if self.stacked else None
        turns = rest.pop(0) if self.turned else None
        new = (rest.pop(0), rest.pop(0)) if self.written and not self.joined else ()
        return q, new, place, index, turns, [keys, values, *rest]

    def queries(self, q: Any, keys: Any) -> tuple[int, int, int, int]:
        """The shape of the queries alone, which is that of the result."""
        if not self.joined:
            return q.shape
        batch, heads = keys.shape[self.stacked : self.stacked + 2]
        return batch, heads, q.shape[-1] // (heads * self.cols) - 2, self.cols


def attend(
    q: Any,
    keys: Any,
    values: Any,
    place: Any,
    index: Any = None,
    *,
    new: Any = None,
    factor: float,
    cap: float | None = None,
    window: int | None = None,
) -> Any:
    """What `place`, the last position so far, sees; of entry `index`, where keys and values are stacks.

    With `new`, rows of keys and values (batch, heads, size), these are written at `place` first, and the result is
    what it sees, keys and values. Under `implicit`, caches of quantized rows are read and written as they are.

    >>> keys = jnp.zeros((1, 1, 4, 2))
    >>> values = jnp.arange(8.0).reshape(1, 1, 4, 2)
    >>> attend(jnp.ones((1, 1, 1, 2)), keys, values, 1, factor=1.0)
    Array([[[[1., 2.]]]], dtype=float32)
    """
    how = {"factor": factor, "cap": cap, "window": window, "written": new is not None}
    found = _bound(q.shape[-1], (q, keys, values, place), index, [row.astype(q.dtype) for row in new or ()], **how)
    return found[0] if new is None else tuple(found)


def attend_joined(
    rows: Any,
    keys: Any,
    values: Any,
    place: Any,
    index: Any = None,
    *,
    size: int,
    turns: Any,
    halves: bool,
    factor: float,
    cap: float | None = None,
    window: int | None = None,
) -> tuple[Any, Any, Any]:
    """As `attend`, with rows to write, of all that a token has in one array.

    For every text `rows` are queries of all heads, (heads, group, size), then keys and values, (heads, size) each.
    `turns`, cosines and sines of (2, size / 2), or None, turn pairs of queries and keys first.
    """
    how = {"factor": factor, "cap": cap, "window": window, "written": True, "joined": True, "halves": halves}
    more = [] if turns is None else [turns]
    return tuple(_bound(size, (rows, keys, values, place), index, more, turned=turns is not None, **how))


def _bound(size: int, operands: Any, index: Any, more: list[Any], *, factor: float, **how: Any) -> list[Any]:
    q, keys, values, place = operands
    numbers = [jnp.asarray(number, jnp.int32) for number in (place, index) if number is not None]
    how |= {"factor": float(factor), "stacked": index is not None}
    parameters = Attention(DENSE, "attention", size, None, np.dtype(q.dtype), **how)
    given = q, keys, values, *numbers, *more
    # On a mesh of explicit axes every result would need a sharding of its own: there it is what it stands for.
    typed = avals.typed_by_a_mesh(q)
    return in_products(parameters, *given) if typed else ATTENTION.bind(parameters, *given, announced=True)


def attend_quantized(
    parameters: Attention, operands: Any, formats: Any, blocks: Any, scales: Any, encode: Any
) -> list[Any]:
    """As `attend` on the operands of the primitive, with the codes of keys and values in their places.

    Codes come as caches store them, with an axis of blocks: a view of an array that a loop has just written into would
    be a copy of it. Scales follow the other results, where rows are written.
    """
    (fmt, values), (block, values_block) = formats, blocks
    how = {"fmt": fmt, "values": values, "block": block, "values_block": values_block}
    how["encode"] = tuple(encode) if parameters.written else ()
    return ATTENTION.bind(dataclasses.replace(parameters, **how), *operands, *scales)


def _results(parameters: Attention, *operands: Any) -> list[tuple[Any, Any]]:
    q, *_, cache = parameters.parts(operands)
    shape, cache = parameters.queries(q, cache[0]), cache if parameters.written else []
    return [(shape, parameters.out_dtype), *((part.shape, part.dtype) for part in cache)]


def _problem(parameters: Attention, platform: str, *operands: Any) -> Attention:
    q, *_, (keys, _, *scales) = parameters.parts(operands)
    batch, heads, group, _ = parameters.queries(q, keys)
    dtypes = [np.dtype(scale.dtype) for scale in scales] or [None, None]
    return dataclasses.replace(
        parameters,
        platform=platform,
        batch=(batch, heads),
        m=group,
        rows=keys.shape[2 + parameters.stacked],
        x_dtype=np.dtype(q.dtype),
        scale_dtype=dtypes[0],
        values_scale_dtype=dtypes[1],
    )


def _in_one_kernel(problem: Attention, *operands: Any) -> list[Any]:
    """The CUDA kernel, which turns rows unless they are padded."""
    if not problem.turned or not cuda.pads_heads(problem):
        return cuda.attention(problem, *operands)
    q, _, place, index, turns, (keys, values, *scales) = problem.parts(operands)
    q, *new = _apart(problem, q, turns, keys)
    problem = dataclasses.replace(problem, joined=False, turned=False)
    return cuda.attention(problem, q, keys, values, place, *([] if index is None else [index]), *new, *scales)


def in_products(problem: Attention, *operands: Any) -> list[Any]:
    """The readable twin: rows are put in their place, then two products and a softmax between them."""
    q, new, place, index, turns, cache = problem.parts(operands)
    if problem.joined:
        q, *new = _apart(problem, q, turns, cache[0])
    if new:
        rows = [row[..., None, :] for row in new]
        if problem.encode:  # codes of both, then scales of both, as in the cache
            stored = (encode(row) for encode, row in zip(problem.encode, rows, strict=True))
            rows = [part for parts in zip(*stored, strict=True) for part in parts]
        cache = [put(old, row, place, index) for old, row in zip(cache, rows, strict=True)]
    keys, values, *scales = cache
    key_scale, value_scale = scales or (None, None)
    scores = _multiply(problem.fmt, problem.block, "dot", q, keys, key_scale, index) * problem.factor
    if problem.cap is not None:
        scores = jnp.tanh(scores / problem.cap) * problem.cap
    positions = jnp.arange(keys.shape[2 + problem.stacked])
    seen = positions <= place
    if problem.window is not None:
        seen &= positions > place - problem.window
    scores = jnp.where(seen, scores.astype(jnp.promote_types(scores.dtype, jnp.float32)), -jnp.inf)
    odds = jax.nn.softmax(scores).astype(q.dtype)
    y = _multiply(problem.values, problem.values_block, "axpy", odds, values, value_scale, index, problem.cols)
    return [y, *(cache if new else [])]


def _apart(problem: Attention, rows: Any, turns: Any, keys: Any) -> tuple[Any, Any, Any]:
    """Queries, keys and values of a token, the first two turned."""
    batch, heads, group, size = problem.queries(rows, keys)
    q, key, value = jnp.split(rows, [heads * group * size, heads * (group + 1) * size], axis=-1)
    if turns is not None:
        q, key = (turn(part.reshape(batch, -1, size), turns, problem.halves) for part in (q, key))
    return q.reshape(batch, heads, group, size), key.reshape(batch, heads, size), value.reshape(batch, heads, size)


def turn(x: jax.Array, turns: Any, halves: bool) -> jax.Array:
    """Pairs along the last axis of x, turned by angles whose cosines and sines are the two entries of `turns`."""
    cos, sin = turns
    pairs = x.reshape(*x.shape[:-1], 2, -1) if halves else jnp.moveaxis(x.reshape(*x.shape[:-1], -1, 2), -1, -2)
    a, b = pairs[..., 0, :].astype(jnp.float32), pairs[..., 1, :].astype(jnp.float32)
    turned = jnp.stack((a * cos - b * sin, b * cos + a * sin), axis=-2 if halves else -1)
    return turned.reshape(x.shape).astype(x.dtype)


def put(old: Any, rows: Any, place: Any, index: Any) -> Any:
    """Rows (batch, heads, time, ...) of all heads from a place on of the cache, or of an entry of a stack of caches."""
    lead = [] if index is None else [index]
    rows = rows.astype(old.dtype).reshape(*[1] * len(lead), *rows.shape)
    zero, behind = jnp.zeros_like(place), old.ndim - len(lead) - 3
    return lax.dynamic_update_slice(old, rows, [*lead, zero, zero, place, *[zero] * behind])


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
    q, new, *_ = parameters.parts(tangents)
    written = [q] if parameters.joined else new
    if parameters.encode and not all(isinstance(tangent, primitives.ad.Zero) for tangent in written):
        raise QuantizedGradientError(NO_GRADIENT.format(what="rows", fmt=parameters.fmt))
    return jax.jvp(_along(parameters, primals, moving), [primals[i] for i in moving], [tangents[i] for i in moving])


def _series(primals: Any, series: Any, *, parameters: Attention) -> tuple[Any, Any]:
    moving = [i for i, primal in enumerate(primals) if jnp.issubdtype(primal.dtype, jnp.inexact)]
    along = _along(parameters, primals, moving)
    return primitives.jet.jet(along, [primals[i] for i in moving], [series[i] for i in moving])


def _along(parameters: Attention, primals: Any, moving: list[int]) -> Callable[..., list[Any]]:
    def along(*operands: Any) -> list[Any]:
        given = dict(zip(moving, operands, strict=True))
        return in_products(parameters, *(given.get(i, primal) for i, primal in enumerate(primals)))

    return along


def _batch(bind: Any, parameters: Attention, operands: Any, dims: Any) -> tuple[Any, Any]:
    del bind
    found = jax.vmap(lambda *each: in_products(parameters, *each), in_axes=tuple(dims))(*operands)
    return found, [0] * len(found)


ATTENTION = Operation(
    "cache_attention",
    ("q", "keys", "values", "place"),
    result=_results,
    problem=_problem,
    candidates=(
        Candidate("native_cuda", "native", cuda.refuses_attention, _in_one_kernel),
        Candidate("products", "xla", anything, in_products, why="two products and a softmax"),
    ),
    batch=_batch,
    split=lambda operation, problem, *operands: in_products(problem, *operands),
    derivative=_jvp,
    multiple_results=True,
)
primitives.define_series(ATTENTION.primitive, _series)
