"""Double quantization: the absmax of NF4 blocks, themselves quantized to 8 bits.

The mean is subtracted, then groups of 256 share an f32 scale and each value takes the nearest entry of the signed
dynamic map (sign, decimal exponent, linear fraction):

    absmax ≈ DYNAMIC_MAP[code] * scale[group] + offset

This is what bitsandbytes computes for `compress_statistics=True`, a tie taking the lower code. (Its CPU build first
rounds to a grid of 2**-15, so a code there may differ; its own portable kernel agrees.) A NaN absmax is left out of the
mean and makes the scale of its group NaN.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from eformer._formats import arguments as _arguments

GROUP = 256


def _dynamic_map() -> np.ndarray:
    """256 sorted values: 0, 1 and ± the midpoints of 2**e equal steps over [0.1, 1] times 10**(e - 6), e = 0…6.

    Every rounding to f32 is part of the format: checkpoints hold the codes, and often the table.
    """
    f32 = np.float32
    values = [f32(0), f32(1)]
    for exponent in range(7):
        steps = 2**exponent
        step = float((f32(1) - f32(0.1)) / f32(steps))
        index = np.arange(steps + 1)
        # Counted from the nearer end.
        edges = np.where(index < (steps + 1) // 2, f32(0.1) + step * index, 1.0 - step * (steps - index)).astype(f32)
        middles = f32(10.0 ** (exponent - 6)) * ((edges[:-1] + edges[1:]) / f32(2))
        values += [*middles, *-middles]
    return np.sort(np.array(values, f32))


DYNAMIC_MAP: np.ndarray = _dynamic_map()
_BOUNDS: np.ndarray = (DYNAMIC_MAP[:-1] + DYNAMIC_MAP[1:]) / np.float32(2)


@functools.partial(jax.jit, static_argnames=("core_ndim",))
def compress_absmax(absmax: jax.Array, *, core_ndim: int | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantize `absmax` to 8 bits; its last `core_ndim` axes (default: all) are flattened together.

    Returns codes of the shape of `absmax`, scales `batch + (groups,)` and offsets `batch`.

    >>> codes, scale, offset = compress_absmax(jnp.array([1.0, 2.0, 6.0]))
    >>> codes.tolist(), scale.tolist(), offset.tolist()
    ([23, 47, 255], [3.0], 3.0)
    """
    _arguments.check_float(absmax, "double quantization")
    batch, flat = _flat(absmax.astype(jnp.float32), core_ndim)
    finite = jnp.isfinite(flat)
    count = jnp.sum(finite, axis=-1, dtype=jnp.int32)
    offset = jnp.sum(jnp.where(finite, flat, 0.0), axis=-1) / jnp.maximum(count, 1).astype(jnp.float32)
    codes, scale = _compress_centred(flat - offset[..., None])
    return codes.reshape(absmax.shape), scale, offset.reshape(batch)


@functools.partial(jax.jit, static_argnames=("core_ndim",))
def expand_absmax(codes: jax.Array, scale: jax.Array, offset: jax.Array, *, core_ndim: int | None = None) -> jax.Array:
    """The f32 absmax that `compress_absmax` stored."""
    _arguments.check_storage(codes, "absmax codes")
    batch, flat = _flat(codes, core_ndim)
    groups = math.ceil(flat.shape[-1] / GROUP)
    if scale.shape != batch + (groups,) or offset.shape != batch:
        raise ValueError(
            f"absmax codes of shape {codes.shape} with core_ndim={core_ndim} need scales of shape {batch + (groups,)} "
            f"and offsets of shape {batch}, but got {scale.shape} and {offset.shape}."
        )
    scales = jnp.repeat(scale, GROUP, axis=-1)[..., : flat.shape[-1]]
    product = jnp.asarray(DYNAMIC_MAP)[flat] * scales
    # The maximum changes nothing but keeps compilers from contracting to a fused multiply-add, which rounds once where
    # the format rounds twice.
    product = jnp.maximum(product, jnp.finfo(jnp.float32).min)
    return (product + offset[..., None]).reshape(codes.shape)


def _flat(x: jax.Array, core_ndim: int | None) -> tuple[tuple[int, ...], jax.Array]:
    core = _arguments.check_core(core_ndim, x.ndim)
    batch = x.shape[: x.ndim - core]
    return batch, x.reshape(*batch, math.prod(x.shape[x.ndim - core :]))


def _compress_centred(centred: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes and scales for values `batch + (n,)` from which the offset is already taken."""
    size = centred.shape[-1]
    groups = math.ceil(size / GROUP)
    padding = [(0, 0)] * (centred.ndim - 1) + [(0, groups * GROUP - size)]
    blocks = jnp.pad(centred, padding).reshape(*centred.shape[:-1], groups, GROUP)
    scale = jnp.max(jnp.abs(blocks), axis=-1, initial=0.0)
    scale = jnp.where(jnp.isfinite(scale), scale, jnp.nan)
    scaled = blocks * (1.0 / jnp.where(scale == 0, 1.0, scale))[..., None]
    codes = jnp.searchsorted(_BOUNDS, scaled, side="left").astype(jnp.uint8)
    return codes.reshape(*centred.shape[:-1], groups * GROUP)[..., :size], scale


def compress_reference(absmax: np.ndarray, offset: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of one flat f32 `absmax` for a given `offset`, written for reading."""
    codes, scales = [], []
    for start in range(0, absmax.size, GROUP):
        group = absmax[start : start + GROUP] - offset
        scale = np.max(np.abs(group))
        scaled = group * (np.float32(1) / scale) if scale else group
        distance = np.abs(scaled[:, None].astype(np.float64) - DYNAMIC_MAP)
        codes.append(np.argmin(distance, axis=-1).astype(np.uint8))
        scales.append(scale)
    return np.concatenate(codes), np.array(scales, np.float32)
