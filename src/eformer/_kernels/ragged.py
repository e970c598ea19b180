"""Mixture of experts: consecutive groups of rows, each times its own matrix of a stack.

Declared as `qmatmul` is (spec.py): linear in x, the transpose is the other form. Without a native kernel the groups are
cut into tiles of equal height, and a scan multiplies one tile at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from eformer._jax.avals import agree, result_type, vary, varying_axes

from . import cpu, cuda, explicit, lowering, select, tpu
from .partition_groups import split_ragged
from .platforms import default_platform
from .problem import Options, Problem, Spec, as_operands, check_x, problem_of, spec_of
from .select import Candidate, anything
from .spec import bind as bind_product
from .spec import on_floats, refuse_tangents

qragged_p = Primitive("eformer_qragged_dot")


def qragged_dot(x: Any, codes: Any, scale: Any, group_sizes: Any, **options: Unpack[Options]) -> jax.Array:
    """Consecutive groups of rows of x (M, K), each times its own matrix: codes (G, R, ...), group_sizes (G,).

    The quantized counterpart of `jax.lax.ragged_dot`, with the options of `qmatmul`; rows behind the last group give
    zeros. One expert is decoded at a time, and experts without rows are not decoded at all.

    >>> codes = jnp.array([[[1]], [[2]], [[3]]], jnp.int8)
    >>> x, scale = jnp.ones((4, 1)), jnp.ones((3, 1, 1))
    >>> qragged_dot(x, codes, scale, jnp.array([2, 0, 1]), fmt="int8", form="dot", cols=1)[:, 0]
    Array([1., 1., 3., 0.], dtype=float32)
    """
    x, codes, scale = as_operands(x, codes, scale)
    sizes = jnp.asarray(group_sizes)
    spec = spec_of(x, codes, scale, **options)
    groups = _check_groups(spec, x, codes, sizes)
    if scale is not None and scale.ndim == 2:
        scale = jnp.broadcast_to(scale, (groups, *scale.shape))
    if 0 in (groups, x.shape[0]):
        return jnp.zeros((x.shape[0], _width(spec, codes)), spec.out_dtype)
    return on_floats(spec, x, lambda spec, x: _bind(spec, x, codes, scale, sizes))


def _check_groups(spec: Spec, x: Any, codes: Any, group_sizes: Any) -> int:
    rank = spec.core_ndim + 1
    if codes.ndim != rank or x.ndim != 2:
        raise ValueError(
            f"qragged_dot takes x of shape (M, K) and codes of rank {rank} with the experts in front, got "
            f"{list(x.shape)} and {list(codes.shape)}; use vmap for more axes."
        )
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer) or group_sizes.shape != codes.shape[:1]:
        raise ValueError(
            f"group_sizes must be integers of shape {codes.shape[:1]}, one per expert, got "
            f"{group_sizes.dtype}{list(group_sizes.shape)}."
        )
    check_x(spec, x, jax.ShapeDtypeStruct(codes.shape[1:], codes.dtype))
    return codes.shape[0]


def _width(spec: Spec, codes: Any) -> int:
    return codes.shape[1] if spec.form == "dot" else spec.cols


def _bind(spec: Spec, x: Any, codes: Any, scale: Any, sizes: Any, *, announced: bool = False) -> jax.Array:
    problem = problem_of(spec, default_platform(), x, codes, scale)
    if not announced:
        select.announce("qragged_dot", CANDIDATES, problem)
    operands = (x, codes, sizes) if scale is None else (x, codes, sizes, scale)
    product = functools.partial(qragged_p.bind, spec=spec)
    out = explicit.of_product(spec, x, codes)
    return product(*agree(*operands)) if out is None else explicit.in_auto_mode(product, out, agree(*operands))


def _named(operands: tuple[Any, ...]) -> tuple[Any, Any, Any, Any]:
    """x, codes, scale or None, group sizes: the operands of the primitive in the order of `qragged_dot`."""
    x, codes, sizes, *scale = operands
    return x, codes, scale[0] if scale else None, sizes


# -- the rules of the primitive ----------------------------------------------------------------------------------------


@qragged_p.def_abstract_eval
def _abstract(*operands: Any, spec: Spec) -> Any:
    x, codes = operands[:2]
    return result_type((x.shape[0], _width(spec, codes)), spec.out_dtype, x)


def _jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...], *, spec: Spec) -> tuple[Any, Any]:
    refuse_tangents(spec, **dict(zip(("codes", "group_sizes", "scale"), tangents[1:], strict=False)))
    x, codes, scale, sizes = _named(primals)
    y, t = (_bind(spec, value, codes, scale, sizes, announced=True) for value in (x, tangents[0]))
    return y, t


def _transpose(ct: Any, *operands: Any, spec: Spec) -> list[Any]:
    x, codes, scale, sizes = _named(operands)
    nothing = [None] * (len(operands) - 1)
    if isinstance(ct, ad.Zero):
        return [ad.Zero(x.aval), *nothing]
    other = dataclasses.replace(spec, form=spec.transposed, out_dtype=np.dtype(x.aval.dtype))
    return [_bind(other, ct, codes, scale, sizes), *nothing]


def _batch(operands: tuple[Any, ...], dims: tuple[Any, ...], *, spec: Spec) -> tuple[Any, int]:
    """A loop: groups of different programs do not line up."""
    mapped = [None if d is None else jnp.moveaxis(o, d, 0) for o, d in zip(operands, dims, strict=True)]

    def one(values: list[Any]) -> jax.Array:
        given = tuple(o if v is None else v for o, v in zip(operands, values, strict=True))
        return _bind(spec, *_named(given), announced=True)

    return lax.map(one, mapped), 0


def _build(platform: str, split: bool, spec: Spec) -> Any:
    def eformer_qragged_dot(*operands: jax.Array) -> jax.Array:
        x, codes, scale, sizes = _named(operands)
        problem = problem_of(spec, platform, x, codes, scale)
        if split:
            return split_ragged(_run, problem, x, codes, scale, sizes)
        return _run(problem, x, codes, scale, sizes)

    return jax.jit(eformer_qragged_dot)


def _run(problem: Problem, x: jax.Array, codes: jax.Array, scale: Any, sizes: jax.Array) -> jax.Array:
    return select.choose(CANDIDATES, problem)[0].run(problem, x, codes, scale, sizes)


ad.primitive_jvps[qragged_p] = _jvp
ad.primitive_transposes[qragged_p] = _transpose
batching.primitive_batchers[qragged_p] = _batch
lowering.register(qragged_p, _build)


# -- the tiled twin ----------------------------------------------------------------------------------------------------


def _tiled(problem: Problem, x: jax.Array, codes: jax.Array, scale: Any, group_sizes: jax.Array) -> jax.Array:
    """The product in plain JAX, one tile of one expert at a time."""
    spec = problem.spec
    group, rows = _tiles(group_sizes, x.shape[0])
    tiles = x.at[rows].get(mode="fill", fill_value=0)

    def step(_: None, tile: tuple[Any, ...]) -> tuple[None, jax.Array]:
        values, group, used = tile
        part = None if scale is None else scale[group]
        empty = jnp.zeros((values.shape[0], _width(spec, codes)), spec.out_dtype)
        return None, lax.cond(
            used,
            lambda: bind_product(spec, values, codes[group], part, announced=True),
            lambda: _as_varying(empty, values, group, codes),
        )

    _, parts = lax.scan(step, None, (tiles, group, rows[:, 0] < x.shape[0]))
    y = jnp.zeros((x.shape[0], _width(spec, codes)), spec.out_dtype)
    return y.at[rows].add(parts, mode="drop")


def _as_varying(empty: jax.Array, *like: jax.Array) -> jax.Array:
    """Both branches of a cond must vary over the same axes inside shard_map."""
    return vary(empty, frozenset[str]().union(*map(varying_axes, like)))


def _tiles(group_sizes: jax.Array, m: int) -> tuple[jax.Array, jax.Array]:
    """Cut the groups into tiles of equal height: (expert, row numbers) of each, row number m where there is none.

    Groups of unknown sizes need at most m / height + (number of groups that can be non-empty) tiles, a static number.
    """
    groups = group_sizes.shape[0]
    height = 1 << (max(m // groups, 1) - 1).bit_length()
    count = -(-m // height) + min(groups, m)
    sizes = group_sizes.astype(jnp.int32)
    tiles = -(-sizes // height)
    last_tile, last_row = jnp.cumsum(tiles), jnp.cumsum(sizes)
    number = jnp.arange(count, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(last_tile, number, side="right"), groups - 1).astype(jnp.int32)
    first = (last_row - sizes)[group] + (number - (last_tile - tiles)[group]) * height
    rows = first[:, None] + jnp.arange(height, dtype=jnp.int32)[None]
    exists = (rows < last_row[group][:, None]) & (number < last_tile[-1])[:, None]
    return group, jnp.where(exists, rows, m)


CANDIDATES = (
    Candidate("native_cpu", "native", cpu.refuses_ragged, cpu.qragged),
    Candidate("native_cuda", "native", cuda.refuses_ragged, cuda.qragged),
    Candidate("pallas_tpu", "native", tpu.refuses_ragged, tpu.qragged),
    Candidate("xla", "xla", anything, _tiled),
)
