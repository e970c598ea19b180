"""Small floats: FP8, the OCP microscaling formats, NVFP4, and IQ4_NL, which has a table instead of a float.

A value decodes to `element[code] * scale`, in f32. The kinds differ in what an element and a scale are:

    kind         element  largest  values per scale               scale, and how it is chosen
    fp8          e4m3     448      row, tensor, or 128 × 128      f32, amax / 448
    fp8_e5m2     e5m2     57344    row, tensor, or 128 × 128      f32, amax / 57344
    mxfp4        e2m1     6        32                             e8m0, 2**(floor(log2(amax)) - 2)
    mxfp8        e4m3     448      32                             e8m0, 2**(floor(log2(amax)) - 8)
    mxfp8_e5m2   e5m2     57344    32                             e8m0, 2**(floor(log2(amax)) - 15)
    nvfp4        e2m1     6        16                             e4m3, amax / 6, times one f32 scale of the tensor
    iq4_nl       table    -127     32                             f16, by least squares

Elements are rounded to the nearest, a tie to the even code, and beyond the largest one to that. Corner cases:

- Arithmetic is f32: bf16 and f16 are exact in it, f64 is rounded first. Results below 2**-126 may be flushed to zero.
- fp8: NaN stays NaN, alone. An infinity is one in e5m2; e4m3 has none, there it is NaN. Neither counts in amax.
- The other kinds: NaN or an infinity anywhere in a block makes its scale NaN (255 in e8m0): all of it decodes to NaN.
- Where all values are 0 they decode to 0, a negative one to -0 (but IQ4_NL has no -0).
- e8m0 has the values 2**-127 to 2**127 and NaN. A code of -1 to 1 times 2**-127 is no normal f32 and may decode to 0;
  products and lookups by kernels may take that scale for 0.
- An f32 scale below 2**-126 is 0, an f16 one saturates at 65504, and an e4m3 one at 448.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from eformer._formats import arguments as _arguments
from eformer._formats import blocks as _blocks
from eformer._kernels.formats import FORMATS, IQ4_NL_CODEBOOK, entries

TILE = 128  # values, in both directions, that share a scale of `fp8` in blocks
_TINY = np.finfo(np.float32).tiny
_E4M3 = jnp.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Kind:
    """One row of the table above. `element` is the row of the table of kernels that has the same codes."""

    element: str
    largest: float
    scale: str
    block: int | None = None

    @property
    def per_byte(self) -> int:
        return FORMATS[self.element].per_code

    @property
    def exponent(self) -> int:
        """That of the largest element, `emax` in the specification."""
        return int(np.floor(np.log2(self.largest)))


KINDS = {
    "fp8": Kind("fp8_e4m3", 448, "f32"),
    "fp8_e5m2": Kind("fp8_e5m2", 57344, "f32"),
    "mxfp4": Kind("fp4", 6, "e8m0", 32),
    "mxfp8": Kind("fp8_e4m3", 448, "e8m0", 32),
    "mxfp8_e5m2": Kind("fp8_e5m2", 57344, "e8m0", 32),
    "nvfp4": Kind("fp4", 6, "e4m3", 16),
    "iq4_nl": Kind("iq4_nl", 127, "f16", 32),
}


def check_block_size(size: Any, kind: str) -> int | None:
    """Return the values that share a scale, or raise unless the kind can have so many; None is no blocks."""
    own = KINDS[kind].block
    if size is None and own is None:
        return None
    size, fixed = None if size is None else _arguments.as_index(size, "block_size"), own or TILE
    if size != fixed:
        has = f"blocks of {own}" if own else f"no blocks, or blocks of {TILE} × {TILE}"
        raise ValueError(f"block_size={size} is not allowed for {kind}, which has {has}. Leave it out, or use {fixed}.")
    return size


# -- decoding ----------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("element", "axis", "size", "dtype"))
def decode(
    codes: jax.Array, scale: jax.Array, *, element: str, axis: int | None, size: int, dtype: DTypeLike
) -> jax.Array:
    """The dense array of codes `(free axes..., blocks, bytes)` and scales `(free axes..., blocks)`.

    Without an axis the codes have the logical shape, and the scale broadcasts to it.

    >>> packed = jnp.array([[0x01, 0x7F]], jnp.uint8)  # 0, 0.5, 6 and -6
    >>> decode(packed, jnp.array([2.0]), element="fp4", axis=-1, size=4, dtype=jnp.float32).tolist()
    [0.0, 1.0, 12.0, -12.0]
    """
    if axis is None:
        return _times(element_values(codes, element), scale).astype(dtype)
    at = codes.ndim - 1 + axis
    codes = _blocks.group_at(codes, at, 1)
    codes = _blocks.unpacked(codes, at + 1, FORMATS[element].bits)
    codes = codes.reshape(*codes.shape[: at + 1], codes.shape[at + 1] * codes.shape[at + 2], *codes.shape[at + 3 :])
    values = element_values(codes, element)
    values = _times(values, jnp.expand_dims(_blocks.group_at(scale, at, 0), at + 1)).astype(dtype)
    dense = values.reshape(*values.shape[:at], values.shape[at] * values.shape[at + 1], *values.shape[at + 2 :])
    return lax.slice_in_dim(dense, 0, size, axis=at)


def element_values(codes: jax.Array, element: str) -> jax.Array:
    """What separate codes stand for, in f32."""
    row = FORMATS[element]
    return row.values(codes, jnp.float32) if row.table is None else entries(row.table, codes, jnp.float32)


def _times(values: jax.Array, scale: jax.Array) -> jax.Array:
    """`values * scale`, for scales of 2**-127 too, which are not normal: processors take them for zero."""
    wide = _blocks.wide(scale.dtype)
    scale = scale.astype(wide)
    if wide != jnp.float32:
        return values.astype(wide) * scale
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    smallest = bits == jnp.uint32(0x00400000)
    return values * jnp.where(smallest, 0.5, 1.0) * jnp.where(smallest, _TINY, scale)


def pack(codes: jax.Array, *, axis: int, block: int, per_byte: int) -> jax.Array:
    """Codes of the logical shape as storage `(free axes..., blocks, block / per_byte)`, padded with zeros."""
    at = codes.ndim + axis
    pieces = [_blocks.packed(piece, at + 1, 8 // per_byte) for piece in _blocks.grouped(codes, axis, block)]
    return _blocks.group_last(_blocks.joined(pieces, at), at, 1)


# -- encoding ----------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("kind", "axis"))
def encode(w: jax.Array, *, kind: str, axis: int) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Quantize blocks along `axis`: codes, scales as they are stored, and the scale of the tensor (NVFP4) or None.

    >>> codes, scale, _ = encode(jnp.array([0.0, 0.5, -1.0, 7.0]), kind="mxfp4", axis=-1)
    >>> codes[0, :2].tolist(), scale.tolist()
    ([1, 167], [127])
    """
    row, at = KINDS[kind], w.ndim + _arguments.check_axis(axis, w.ndim)
    _arguments.check_float(w, kind)
    assert row.block is not None
    pieces = [piece.astype(jnp.float32) for piece in _blocks.grouped(w, axis, row.block)]
    absmax = [_blocks.absmax_within(piece, at + 1) for piece in pieces]
    whole = None
    if row.scale == "e4m3":  # one scale for all values behind the axes that number matrices
        shared = tuple(range(min(at, max(w.ndim - 2, 0)), w.ndim))
        largest = [jnp.max(jnp.where(a < jnp.inf, a, 0), axis=shared, keepdims=True, initial=0) for a in absmax]
        whole = _divided(functools.reduce(jnp.maximum, largest), row.largest * 448)
        whole = jnp.where(whole == 0, _TINY, whole)
    results = [_encode_blocks(p, a, whole, row, at) for p, a in zip(pieces, absmax, strict=True)]
    codes = _blocks.group_last(_blocks.joined([codes for codes, _ in results], at), at, 1)
    scale = _blocks.group_last(_blocks.joined([scale for _, scale in results], at), at, 0)
    return codes, scale, None if whole is None else _blocks.group_last(whole, at, 0)


def _encode_blocks(blocks: jax.Array, absmax: jax.Array, whole: Any, row: Kind, at: int) -> tuple[jax.Array, jax.Array]:
    """Codes and scales of `lead + (blocks, block) + trail`, the blocks being at axis `at`; keeps that layout."""
    finite = absmax < jnp.inf
    blocks = jnp.where(jnp.expand_dims(finite, at + 1), blocks, 0)
    if row.scale == "e8m0":
        biased = (lax.bitcast_convert_type(absmax, jnp.uint32) >> 23).astype(jnp.int32)
        exponent = jnp.maximum(biased - row.exponent, 0)
        scale = jnp.where(finite, exponent, 255).astype(jnp.uint8)
        inverse = lax.bitcast_convert_type((254 - jnp.where(finite, exponent, 127)) << 23, jnp.float32)
        scaled = blocks * jnp.expand_dims(inverse, at + 1)
    elif row.scale == "e4m3":
        scale = jnp.minimum(_blocks.quotient(_divided(absmax, row.largest), whole), 448).astype(_E4M3)
        scale = jnp.where(finite, scale, jnp.array(jnp.nan, _E4M3))
        scaled = _unscaled(blocks, jnp.where(finite, scale.astype(jnp.float32) * whole, 0), at + 1)
    else:
        scale = jnp.where(finite, searched(blocks, jnp.where(finite, absmax, 0), at), jnp.nan).astype(jnp.float16)
        scaled = _unscaled(blocks, jnp.where(finite, scale, 0).astype(jnp.float32), at + 1)
    return _blocks.packed(nearest(scaled, row), at + 1, 8 // row.per_byte), scale


def _unscaled(values: jax.Array, scale: jax.Array, at: int) -> jax.Array:
    """`values / scale`; 0 where the scale is."""
    inverse = jnp.expand_dims(scale, at)
    return jnp.where(inverse == 0, 0 * values, _blocks.quotient(values, jnp.where(scale == 0, 1, scale), at))


def _divided(absmax: jax.Array, largest: float) -> jax.Array:
    """`absmax / largest`, 0 where that is not normal, and never so large that `largest` times it overflows."""
    # Dividing by a value XLA cannot fold: it would turn `/ 448` into `* (1 / 448)`, which is one ulp off at times.
    scale = absmax / jnp.where(absmax < jnp.inf, largest, jnp.nan).astype(jnp.float32)
    highest = np.nextafter(np.finfo(np.float32).max / np.float32(largest), np.float32(0))
    return jnp.where(scale < _TINY, 0, jnp.minimum(scale, highest))


def nearest(x: jax.Array, row: Kind) -> jax.Array:
    """The nearest codes, as bytes."""
    if row.element == "iq4_nl":
        return _nearest_entry(x)
    dtype = FORMATS[row.element].bits_of
    if dtype is not None:
        return lax.bitcast_convert_type(jnp.clip(x, -row.largest, row.largest).astype(dtype), jnp.uint8)
    # e2m1: steps of 1/2 up to 2, of 1 up to 4, of 2 up to 6. Even multiples of a step have even codes.
    size = jnp.minimum(jnp.abs(x), row.largest)
    code = jnp.where(size < 2, jnp.round(size * 2), jnp.where(size < 4, jnp.round(size) + 2, jnp.round(size * 0.5) + 4))
    return code.astype(jnp.uint8) | jnp.where(jnp.signbit(x), 8, 0).astype(jnp.uint8)


_BOUNDS = (IQ4_NL_CODEBOOK[:-1] + IQ4_NL_CODEBOOK[1:]) / np.float32(2)


def _nearest_entry(x: jax.Array) -> jax.Array:
    """The nearest entry of IQ4_NL's table, a tie taking the higher one: how many bounds are reached."""
    return functools.reduce(jnp.add, [(x >= bound).astype(jnp.uint8) for bound in _BOUNDS])


# Where the extreme value of a block may go in the table of IQ4_NL: near one end or the other, whatever its sign. On
# N(0, 1) the error is 0.0733; with the 15 places around the end on its own side (llama.cpp) 0.0750, with 40 0.0732.
_PLACES = np.outer((IQ4_NL_CODEBOOK[0], IQ4_NL_CODEBOOK[-1]), np.linspace(0.82, 1.13, 8)).ravel().astype(np.float32)


def searched(blocks: jax.Array, absmax: jax.Array, at: int) -> jax.Array:
    """The scale of IQ4_NL: of 16 that take the extreme value to the ends of the table, the best.

    For given codes the best scale is a quotient of sums; it removes `products**2 / squares` of the squared error.
    """
    lowest = jnp.min(blocks, axis=at + 1)
    extreme = jnp.where(-lowest >= absmax, lowest, absmax)  # with its sign
    safe = jnp.where(extreme == 0, 1, extreme)

    def attempt(i: jax.Array, best: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        inverse = jnp.expand_dims(places[i] / safe, at + 1)
        unit = jnp.expand_dims(1 / safe, at + 1)
        values = element_values(_nearest_entry(blocks * inverse), "iq4_nl")
        products = jnp.sum(blocks * unit * values, axis=at + 1)
        squares = jnp.sum(values * values, axis=at + 1)
        gain = products * products / squares
        better = gain > best[0]
        return jnp.where(better, gain, best[0]), jnp.where(better, products / squares * safe, best[1])

    zero, places = jnp.zeros_like(extreme), jnp.asarray(_PLACES)
    scale = lax.fori_loop(0, len(_PLACES), attempt, (zero - 1, zero))[1]
    return jnp.clip(jnp.where(extreme == 0, 0, scale), -65504, 65504)


@functools.partial(jax.jit, static_argnames=("kind", "axes"))
def encode_whole(w: jax.Array, *, kind: str, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """FP8 with one scale per position of the other axes: codes in the logical shape, scales with size 1 along `axes`.

    >>> codes, scale = encode_whole(jnp.array([[1.0, -448.0]]), kind="fp8", axes=(-1,))
    >>> codes.tolist(), scale.tolist()
    ([[56, 254]], [[1.0]])
    """
    row, values = KINDS[kind], w.astype(jnp.float32)
    axes = _arguments.check_axes(axes, w.ndim)
    absmax = _blocks.absmax_along(jnp.where(jnp.isfinite(values), values, 0), axes[-1])
    scale = _divided(jnp.max(absmax, axis=axes, keepdims=True, initial=0), row.largest)
    return _fp8(values, scale, row), scale


@functools.partial(jax.jit, static_argnames=("kind", "axis"))
def encode_tiles(w: jax.Array, *, kind: str, axis: int) -> tuple[jax.Array, jax.Array]:
    """FP8 in blocks of 128 along `axis` and along the last of the other axes.

    Returns codes `(free axes..., blocks, 128)` and scales `(free axes..., blocks)`, the last free axis cut into tiles.
    """
    row, at = KINDS[kind], w.ndim + _arguments.check_axis(axis, w.ndim)
    moved = jnp.moveaxis(w.astype(jnp.float32), at, -1)
    lines = _padded(moved, -1)
    lines = lines.reshape(*moved.shape[:-1], lines.shape[-1] // TILE, TILE)
    absmax = _blocks.absmax_within(jnp.where(jnp.isfinite(lines), lines, 0), lines.ndim - 1)
    if w.ndim > 1:
        tall = _padded(absmax, -2)
        absmax = jnp.max(tall.reshape(*tall.shape[:-2], tall.shape[-2] // TILE, TILE, tall.shape[-1]), axis=-2)
    scale = _divided(absmax, row.largest)
    full = scale if w.ndim == 1 else spread(scale, -2, moved.shape[-2])
    return _fp8(lines, full[..., None], row), scale


def spread(tiles: jax.Array, axis: int, size: int) -> jax.Array:
    """One entry per position of an axis that holds one per tile."""
    axis %= tiles.ndim
    shape = (*tiles.shape[: axis + 1], TILE, *tiles.shape[axis + 1 :])
    each = jnp.broadcast_to(jnp.expand_dims(tiles, axis + 1), shape)
    return lax.slice_in_dim(lax.collapse(each, axis, axis + 2), 0, size, axis=axis)


def _padded(x: jax.Array, axis: int) -> jax.Array:
    """`x` with zeros behind it, up to whole tiles."""
    amount = -x.shape[axis] % TILE
    return jnp.pad(x, [(0, amount if i == x.ndim + axis else 0) for i in range(x.ndim)]) if amount else x


def _fp8(values: jax.Array, scale: jax.Array, row: Kind) -> jax.Array:
    scaled = _blocks.quotient(values, jnp.where(scale == 0, 1, scale))
    dtype = FORMATS[row.element].bits_of
    small = jnp.clip(scaled, -row.largest, row.largest)  # NaN stays
    infinite = jnp.isinf(values)
    special = jnp.where(infinite, values, small) if dtype == jnp.float8_e5m2 else jnp.where(infinite, jnp.nan, small)
    return lax.bitcast_convert_type(special.astype(dtype), jnp.uint8)
