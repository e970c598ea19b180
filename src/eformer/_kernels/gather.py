"""Embedding rows: a lookup in a packed table decodes only the rows asked for."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching

from eformer._jax.avals import agree, result_type
from eformer.errors import QuantizedGradientError

from . import cpu, cuda, explicit, lowering, select, tpu
from .partition_groups import split_lookup
from .platforms import default_platform
from .problem import check_names, check_storage, core_ndim
from .reference import decode
from .select import Candidate, anything
from .spec import NO_GRADIENT

qgather_p = Primitive("eformer_qgather")


@dataclasses.dataclass(frozen=True)
class Table:
    """The static parameters of a lookup. Hashable; shapes come from the operands."""

    fmt: str
    cols: int
    block: int | None
    out_dtype: np.dtype
    preference: str


@dataclasses.dataclass(frozen=True)
class Lookup:
    """One lookup with its sizes: all that choosing an implementation may depend on."""

    table: Table
    platform: str
    rows: int
    count: int
    scale_dtype: np.dtype | None

    @property
    def fmt(self) -> str:
        return self.table.fmt

    @property
    def cols(self) -> int:
        return self.table.cols

    @property
    def block(self) -> int | None:
        return self.table.block

    @property
    def out_dtype(self) -> np.dtype:
        return self.table.out_dtype

    @property
    def preference(self) -> str:
        return self.table.preference

    def resized(self, rows: int, count: int, cols: int) -> Lookup:
        """The same lookup in a table of another size."""
        return dataclasses.replace(self, rows=rows, count=count, table=dataclasses.replace(self.table, cols=cols))


def qgather(
    codes: Any,
    scale: Any,
    indices: Any,
    *,
    fmt: str,
    cols: int,
    block: int | None = None,
    dtype: Any = jnp.float32,
    preference: str = "auto",
) -> jax.Array:
    """Rows of the decoded matrix (R, cols): indices (...) -> (..., cols). Only the rows asked for are decoded.

    Indices follow the rules of `jax.numpy` indexing: negative ones count from the end, others are clamped.

    >>> table = jnp.array([[1, 2], [3, 4]], jnp.int8)
    >>> qgather(table, jnp.full((1, 1), 10.0), jnp.array([1, 0, 1]), fmt="int8", cols=2)[:, 0]
    Array([30., 10., 30.], dtype=float32)
    """
    check_names(fmt, "dot", preference)
    codes, indices = jnp.asarray(codes), jnp.asarray(indices)
    scale = None if scale is None else _no_gradient(jnp.asarray(scale), fmt)
    block = check_storage(fmt, codes, scale, cols, block)
    if codes.ndim != core_ndim(fmt):
        raise ValueError(f"qgather takes one matrix, got codes of shape {list(codes.shape)}; use vmap for batch axes.")
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"indices must be integers, got {indices.dtype}.")
    if 0 in (*indices.shape, *codes.shape):
        return jnp.zeros((*indices.shape, cols), dtype)
    table = Table(fmt, cols, block, np.dtype(dtype), preference)
    rows = _bind(table, codes, _inside(indices.reshape(-1), codes.shape[0]), scale)
    return rows.reshape(*indices.shape, cols)


def _inside(indices: jax.Array, rows: int) -> jax.Array:
    indices = jnp.where(indices < 0, indices + rows, indices) if jnp.iinfo(indices.dtype).min else indices
    return jnp.clip(indices, 0, rows - 1)


def _no_gradient(scale: jax.Array, fmt: str) -> jax.Array:
    """The scale itself, refusing to be differentiated."""

    @jax.custom_jvp
    def identity(value: jax.Array) -> jax.Array:
        return value

    @identity.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise QuantizedGradientError(NO_GRADIENT.format(what="scale", fmt=fmt))

    del refuse
    return identity(scale)


def _bind(table: Table, codes: Any, indices: Any, scale: Any, *, announced: bool = False) -> jax.Array:
    lookup = _lookup(table, default_platform(), codes, indices, scale)
    if not announced:
        select.announce("qgather", CANDIDATES, lookup)
    operands = (codes, indices) if scale is None else (codes, indices, scale)
    rows = functools.partial(qgather_p.bind, table=table)
    out = explicit.result_sharding((indices, 0), (codes, 1))
    return rows(*agree(*operands)) if out is None else explicit.in_auto_mode(rows, out, agree(*operands))


def _lookup(table: Table, platform: str, codes: Any, indices: Any, scale: Any) -> Lookup:
    dtype = None if scale is None else np.dtype(scale.dtype)
    return Lookup(table, platform, codes.shape[0], indices.shape[0], dtype)


def _scale_of(operands: tuple[Any, ...]) -> Any:
    return operands[2] if len(operands) == 3 else None


def _decoded(lookup: Lookup, codes: jax.Array, scale: jax.Array | None, indices: jax.Array) -> jax.Array:
    """The lookup in plain JAX."""
    if scale is not None and scale.shape[0] == codes.shape[0]:
        scale = scale[indices]
    wide = jnp.promote_types(jnp.float32 if scale is None else scale.dtype, jnp.float32)  # to be rounded once
    return decode(codes[indices], scale, fmt=lookup.fmt, cols=lookup.cols, dtype=wide).astype(lookup.out_dtype)


CANDIDATES = (
    Candidate("native_cpu", "native", cpu.refuses_gather, cpu.qgather),
    Candidate("native_cuda", "native", cuda.refuses_gather, cuda.qgather),
    Candidate("pallas_tpu", "native", tpu.refuses_gather, tpu.qgather),
    Candidate("xla", "xla", anything, _decoded),
)


@qgather_p.def_abstract_eval
def _abstract(*operands: Any, table: Table) -> Any:
    codes, indices = operands[:2]
    return result_type((indices.shape[0], table.cols), table.out_dtype, codes)


def _batch(operands: tuple[Any, ...], dims: tuple[Any, ...], *, table: Table) -> tuple[Any, int]:
    """Mapped indices are more indices; mapped tables are looked up one after the other."""
    codes, indices = operands[:2]
    if all(d is None for i, d in enumerate(dims) if i != 1):
        moved = jnp.moveaxis(indices, dims[1], 0)
        rows = _bind(table, codes, moved.reshape(-1), _scale_of(operands), announced=True)
        return rows.reshape(*moved.shape, table.cols), 0
    mapped = [None if d is None else jnp.moveaxis(o, d, 0) for o, d in zip(operands, dims, strict=True)]

    def one(values: list[Any]) -> jax.Array:
        given = tuple(o if v is None else v for o, v in zip(operands, values, strict=True))
        return _bind(table, given[0], given[1], _scale_of(given), announced=True)

    return lax.map(one, mapped), 0


def _build(platform: str, split: bool, table: Table) -> Any:
    def eformer_qgather(*operands: jax.Array) -> jax.Array:
        codes, indices = operands[:2]
        scale = _scale_of(operands)
        lookup = _lookup(table, platform, codes, indices, scale)
        return split_lookup(_run, lookup, codes, scale, indices) if split else _run(lookup, codes, scale, indices)

    return jax.jit(eformer_qgather)


def _run(lookup: Lookup, codes: jax.Array, scale: Any, indices: jax.Array) -> jax.Array:
    return select.choose(CANDIDATES, lookup)[0].run(lookup, codes, scale, indices)


batching.primitive_batchers[qgather_p] = _batch
lowering.register(qgather_p, _build)
