"""The methods on matrices (S, K, N): codes and scales, compiled once for each shape, a few matrices at a time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import gptq
from .grids import Grid, Zero
from .search import search

WORKING_BYTES, WORKING_BYTES_OF_ACCELERATORS = 1 << 28, 1 << 32
FREE_POWER = 2.4
ZERO_MOVES = 4.0
RIDGE = 1e-3  # of least squares, in units of its diagonal


def in_parts(f: Callable[..., Any], sizes: tuple[int, int, int], *arrays: Any, **options: Any) -> Any:
    """`f` on a few matrices of a stack at a time, so that what it needs fits into memory; results are put together.

    Arrays have the stack in front, or are None. What lies on disk is read when its turn comes.
    """
    s, k, n = sizes
    room = WORKING_BYTES if jax.default_backend() == "cpu" else WORKING_BYTES_OF_ACCELERATORS
    some = max(1, min(s, room // (4 * k * (2 * k + 4 * n) + 1)))
    some = next(size for size in range(some, 0, -1) if s % size == 0)
    results = [
        f(*(None if a is None else jnp.asarray(a[at : at + some], _dtype(a)) for a in arrays), **options)
        for at in range(0, s, some)
    ]
    return results[0] if len(results) == 1 else jax.tree.map(lambda *parts: jnp.concatenate(parts), *results)


def _dtype(array: Any) -> Any:
    return getattr(array, "dtype", jnp.float32)  # numbers of inputs are f64 on disk


def importance(diagonal: jax.Array) -> jax.Array:
    """Weights of channels (..., K) from their sums of squares, of mean 1 and never 0: a silent channel may speak."""
    mean = jnp.mean(diagonal, axis=-1, keepdims=True)
    return (diagonal / jnp.where(mean > 0, mean, 1) + gptq.DAMPING) / (1 + gptq.DAMPING)


def _blocks(w: jax.Array, weights: Any, block: int, along_inputs: bool) -> tuple[jax.Array, jax.Array, int]:
    """Matrices (S, K, N) cut into blocks, the weights of their values, and the axis along which blocks run."""
    s, k, n = w.shape
    if not along_inputs:  # all values of a block have the same input, hence the same weight
        return w.reshape(s, k, n // block, block), jnp.ones((), jnp.float32), -1
    weights = jnp.ones((), jnp.float32) if weights is None else weights.reshape(s, k // block, block, 1)
    return w.reshape(s, k // block, block, n), weights, -2


@functools.partial(jax.jit, static_argnames=("grid", "block", "along_inputs"))
def scales(
    w: jax.Array, diagonal: jax.Array | None, *, grid: Grid, block: int, along_inputs: bool
) -> tuple[jax.Array, Zero]:
    """The best scales, (S, K / block, N) or (S, K, N / block), for inputs of these mean squares, (S, K) or None."""
    x, weights, axis = _blocks(w, None if diagonal is None else importance(diagonal), block, along_inputs)
    return search(grid, x, weights, axis, 2.0 if diagonal is not None else FREE_POWER)


@functools.partial(jax.jit, static_argnames=("grid", "block", "along_inputs"))
def nearest(w: jax.Array, scale: jax.Array, zero: Zero, *, grid: Grid, block: int, along_inputs: bool) -> jax.Array:
    """The codes nearest to values, for scales that are known."""
    axis = -2 if along_inputs else -1
    spread = functools.partial(jnp.repeat, repeats=block, axis=axis)
    return grid.codes(w, spread(scale), None if zero is None else spread(zero))


def _one_by_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of one matrix, for stacks: arrays have the stack in front, or are None, and keywords are static."""

    @functools.wraps(function)
    def of_stack(*arrays: Any, **static: Any) -> Any:
        return jax.vmap(functools.partial(function, **static))(*arrays)

    return jax.jit(of_stack, static_argnames=inspect.getfullargspec(function).kwonlyargs)


def _factored(moment: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The order of the inputs, the most active first, the factor of the moment in it, and how often damping was raised.

    `count` is the number of tokens of the moment.
    """
    order = jnp.argsort(-jnp.diagonal(moment))
    return order, *gptq.factor(gptq.shrunk(moment, count)[order][:, order])


@_one_by_one
def propagated(
    w: jax.Array, moment: jax.Array, count: jax.Array, scale: jax.Array, zero: Zero,
    *, grid: Grid, block: int, along_inputs: bool,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """GPTQ with scales that are known: codes (K, N), and how often damping was raised.

    The most active inputs go first. Since scales stay with their blocks, nothing has to be stored of that order.
    """
    order, u, times = _factored(moment, count)
    places = order // block if along_inputs else order

    def step(x: jax.Array, k: jax.Array, size: jax.Array) -> tuple[jax.Array, jax.Array]:
        s, z = (None if a is None else a[places[k]] for a in (scale, zero))
        if not along_inputs:
            s, z = (None if a is None else jnp.repeat(a, block) for a in (s, z))
        assert s is not None
        codes = grid.codes(x, s, z)
        return codes, (x - grid.values(codes, s, z)) / size

    codes = gptq.sweep(w[order], u, step)
    return jnp.zeros_like(codes).at[order].set(codes), times


@_one_by_one
def refitted(
    w: jax.Array, moment: jax.Array, count: jax.Array, times: jax.Array, codes: jax.Array, scale: jax.Array,
    zero: Zero, *, grid: Grid, block: int,
) -> tuple[jax.Array, Zero]:  # fmt: skip
    """Scales (K / block, N), and zero points, that leave the least error of the outputs for codes that are known.

    Every output has a least squares problem of its own, with an unknown for each of its blocks, or two where what is
    added to a block is fitted as well. Scales move by less than a half, zero points by less than four codes; where the
    moment could not be factored (`times` of damping), they stay.
    """
    h = gptq.damped(gptq.shrunk(moment, count), times)
    spread = functools.partial(jnp.repeat, repeats=block, axis=0)
    units = grid.units(codes, None if zero is None else spread(zero))
    product = functools.partial(jnp.matmul, precision="highest")
    ways = jnp.stack([units, jnp.ones_like(units)] if grid.fits_zero else [units])  # what an unknown multiplies

    def per_block(a: jax.Array) -> jax.Array:
        sums = jnp.sum((ways * a).reshape(len(ways), -1, block, a.shape[-1]), axis=2)
        return sums.reshape(-1, a.shape[-1])

    def row(at: jax.Array) -> jax.Array:
        way, b = ways[at // blocks], at % blocks
        own, columns = (lax.dynamic_slice_in_dim(a, b * block, block, axis) for a, axis in ((way, 0), (h, 1)))
        return per_block(product(columns, own))

    blocks = w.shape[0] // block
    a = jnp.transpose(lax.map(row, jnp.arange(len(ways) * blocks)), (2, 0, 1))
    off = per_block(product(h, w - units * spread(scale))).T
    size = jnp.diagonal(a, axis1=1, axis2=2)
    a = a + (RIDGE * size + (size == 0))[..., None] * jnp.eye(a.shape[-1])
    change = jnp.linalg.solve(a, off[..., None])[..., 0].T.reshape(len(ways), blocks, -1)
    fine = (jnp.abs(change[0]) < 0.5 * jnp.abs(scale)) & (times < gptq.ATTEMPTS)
    if zero is None or not grid.fits_zero:
        return jnp.where(fine, grid.snap(scale + change[0]), scale), zero
    fine &= jnp.abs(change[1]) < ZERO_MOVES * jnp.abs(scale)
    moved = jnp.where(fine, grid.snap(scale + change[0]), scale)
    shifted = grid.snap_zero(moved, zero - change[1] / jnp.where(moved == 0, 1, moved))
    return moved, jax.tree.map(functools.partial(jnp.where, fine), shifted, zero)


@_one_by_one
def revisited(
    w: jax.Array, moment: jax.Array, count: jax.Array, times: jax.Array, codes: jax.Array, scale: jax.Array,
    zero: Zero, *, grid: Grid, block: int,
) -> jax.Array:  # fmt: skip
    """Codes (K, N) of which every row in turn is the best for the codes of all other rows, and scales as they are.

    With E the error of the weights, a row k moves to the value nearest to the one where `(H E)[k]` is 0. No step makes
    the error of the outputs larger. Where the moment could not be factored, codes stay.
    """
    h = gptq.damped(gptq.shrunk(moment, count), times)
    wide, from_zero = (None if a is None else jnp.repeat(a, block, axis=0) for a in (scale, zero))
    assert wide is not None
    before = grid.values(codes, wide, from_zero)

    def step(slope: jax.Array, k: jax.Array, size: jax.Array) -> tuple[jax.Array, jax.Array]:
        s, z = wide[k], None if from_zero is None else from_zero[k]
        found = grid.codes(before[k] - slope / size, s, z)
        return found, before[k] - grid.values(found, s, z)

    found = gptq.sweep(jnp.matmul(h, before - w, precision="highest"), h, step)
    return jnp.where(times < gptq.ATTEMPTS, found, codes)


@_one_by_one
def conditional(moment: jax.Array, count: jax.Array, diagonal: jax.Array) -> jax.Array:
    """What errors of channels (K,) cost where those after them, in the order of "gptq", make up for what they can."""
    order, u, times = _factored(moment, count)
    costs = jnp.zeros_like(diagonal).at[order].set(1 / jnp.square(jnp.diagonal(u)))
    return jnp.where(times < gptq.ATTEMPTS, costs, diagonal)


@jax.jit
def output_error(moment: jax.Array, difference: jax.Array) -> jax.Array:
    """`trace(Eᵀ H E)` for every matrix of a stack: the squared error of the outputs, summed over the tokens."""
    return jnp.sum(difference * jnp.matmul(moment, difference, precision="highest"), axis=(-2, -1))
