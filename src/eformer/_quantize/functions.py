"""Quantization as functions of plain arrays, with the names, the layout and the formulas of MLX.

Codes are numbers of `bits` bits, one after the other along the last axis, low bits first, in words of 32 bits. Groups
of `group_size` values along the last axis share a scale:

    affine   code * scale + bias, both in the dtype of the weights         groups of 32, 64, 128; 2, 3, 4, 5, 6, 8 bits
    mxfp4    e2m1 * 2^(scale - 127), uint8 scales; mxfp8: e4m3             groups of 32
    nvfp4    e2m1 * scale, the bytes of e4m3 scales, no scale per tensor   groups of 16
    nf4      the NF4 table * scale, float32 (not one of MLX's)             groups of 32 and more
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eformer._core import ImplicitArray
from eformer._formats import arguments as _arguments
from eformer._formats.blocks import largest, quotient
from eformer._formats.floating import codec as floating
from eformer._formats.floating.array import ArrayFloat
from eformer._formats.integer.array import ArrayInt
from eformer._formats.nf4.array import ArrayNF4
from eformer._formats.words import bit_stream, to_words
from eformer._kernels.formats import one_of, pack, unpack


@dataclasses.dataclass(frozen=True)
class Mode:
    """The sizes a mode allows, its defaults first."""

    groups: tuple[int, ...]
    bits: tuple[int, ...] = (4,)


MODES = {
    "affine": Mode((64, 32, 128), (4, 2, 3, 5, 6, 8)),
    "nf4": Mode((64, 32, 128, 256)),
    "mxfp4": Mode((32,)),
    "mxfp8": Mode((32,), (8,)),
    "nvfp4": Mode((16,)),
}
_SMALLEST = 1e-7  # of an affine scale


def quantize(
    w: jax.Array, group_size: int | None = None, bits: int | None = None, mode: str = "affine", axis: int = -1
) -> tuple[jax.Array, ...]:
    """Codes in uint32 words, scales, and for the mode "affine" biases.

    Args:
        w: floating values.
        group_size: values that share a scale, by default 64 (affine, nf4), 32 (mxfp4, mxfp8) or 16 (nvfp4).
        bits: of a code, by default 4, for mxfp8 8.
        mode: "affine", "nf4", "mxfp4", "mxfp8" or "nvfp4".
        axis: the axis groups run along, a multiple of `group_size` long. It is the last one of all results.

    >>> codes, scales, biases = quantize(jnp.arange(64.0).reshape(1, 64))
    >>> codes.shape, codes.dtype.name, scales.tolist(), biases.tolist()
    ((1, 8), 'uint32', [[-4.199999809265137]], [[63.0]])
    """
    group_size, bits = _sizes(mode, group_size, bits)
    w = _arguments.as_float(w, f"the mode {mode!r}")
    w = jnp.moveaxis(w, _arguments.checked_axis(axis, w.ndim), -1)
    if w.shape[-1] % group_size:
        raise ValueError(
            f"groups of {group_size} do not divide an axis of {w.shape[-1]} values. Choose another group_size, or use "
            "eformer.quantize, whose arrays may end in the middle of a block."
        )
    if mode == "nf4":
        q = ArrayNF4.quantize(w, group_size, axis=-1)
        return to_words(unpack(q.packed, "nf4").reshape(w.shape), bits), q.absmax
    groups = w.astype(jnp.float32).reshape(*w.shape[:-1], w.shape[-1] // group_size, group_size)
    codes, *numbers = _affine(groups, bits) if mode == "affine" else _small_floats(groups, mode)
    numbers = [n.astype(w.dtype) for n in numbers] if mode == "affine" else numbers
    return to_words(codes.reshape(w.shape), bits), *numbers


def as_array(
    w: jax.Array,
    scales: jax.Array,
    biases: jax.Array | None = None,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    dtype: Any = None,
) -> Any:
    """The quantized array of what `quantize` returned, packed along the last axis: keep this one, its products are
    quick. Nothing is rounded. `dtype` is that of its values, by default that of affine scales, else float32."""
    group_size, bits = _sizes(mode, group_size, bits)
    if (mode == "affine") != (biases is not None):
        raise ValueError(f"mode={mode!r} {'needs biases' if mode == 'affine' else 'has no biases'}.")
    w, scales = _arguments.as_array(w, "w"), _arguments.as_array(scales, "scales")
    if w.dtype != jnp.uint32 or w.ndim < 1 or w.shape[-1] * 32 % (group_size * bits):
        raise ValueError(
            f"w must be uint32 words along the last axis, {group_size * bits // 32} for every group of {group_size} "
            f"values, got {w.dtype}{list(w.shape)}."
        )
    codes = bit_stream(w, bits)
    if mode == "affine":
        how = {"bits": bits, "block_size": group_size, "axis": -1, "dtype": dtype}
        return ArrayInt.from_codes(codes, scales, bias=biases, **how)
    dtype = jnp.float32 if dtype is None else dtype
    if mode == "nf4":
        blocks = codes.reshape(*codes.shape[:-1], codes.shape[-1] // group_size, group_size)
        return ArrayNF4(pack(blocks, "nf4"), scales, group_size, axis=-1, dtype=dtype)
    own = jnp.float8_e4m3fn if mode == "nvfp4" else jnp.float8_e8m0fnu
    if scales.dtype not in (jnp.uint8, own):
        raise TypeError(f"scales of mode={mode!r} must be uint8 or {jnp.dtype(own).name}, got {scales.dtype}.")
    scales = lax.bitcast_convert_type(scales, own) if scales.dtype == jnp.uint8 else scales
    one = jnp.ones((), jnp.float32) if mode == "nvfp4" else None
    return ArrayFloat.from_codes(codes, scales, kind=mode, tensor_scale=one, axis=-1, dtype=dtype)


def dequantize(
    w: jax.Array,
    scales: jax.Array,
    biases: jax.Array | None = None,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    dtype: Any = None,
) -> jax.Array:
    """The values of what `quantize` returned, computed in float32 and rounded once.

    >>> w = jnp.arange(64.0).reshape(1, 64)
    >>> float(jnp.abs(dequantize(*quantize(w, bits=8), bits=8) - w).max()) < 0.13
    True
    """
    return as_array(w, scales, biases, group_size, bits, mode, dtype).materialize()


def quantized_matmul(
    x: jax.Array,
    w: Any,
    scales: jax.Array | None = None,
    biases: jax.Array | None = None,
    transpose: bool = True,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
) -> jax.Array:
    """`x @ w.T`, or `x @ w` with `transpose=False`, for `w` as `quantize` returns it, or an array of `as_array`.

    >>> w = jax.random.normal(jax.random.key(0), (32, 128))
    >>> quantized_matmul(jnp.ones((4, 128)), *quantize(w)).shape
    (4, 32)
    """
    q, x = w, _arguments.as_array(x, "x")
    if not isinstance(w, ImplicitArray):
        if scales is None:
            raise TypeError("scales are missing; pass what quantize returned, or an array of as_array.")
        dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else None
        q = as_array(w, scales, biases, group_size, bits, mode, dtype)
    return x @ (q.mT if transpose else q)


def _sizes(mode: str, group_size: int | None, bits: int | None) -> tuple[int, int]:
    one_of("mode", mode, MODES)
    row = MODES[mode]
    return _allowed("group_size", mode, group_size, row.groups), _allowed("bits", mode, bits, row.bits)


def _allowed(name: str, mode: str, value: Any, allowed: tuple[int, ...]) -> int:
    value = allowed[0] if value is None else _arguments.as_index(value, name)
    if value not in allowed:
        raise ValueError(
            f"{name}={value} is not allowed for mode={mode!r}: use {', '.join(map(str, sorted(allowed)))}."
        )
    return value


# -- the formulas ------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="bits")
def _affine(groups: jax.Array, bits: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The end of the larger magnitude is a code exactly, and so is 0. Codes are computed before numbers are rounded."""
    high, low = groups.max(-1), groups.min(-1)
    finite = largest(groups, -1)[..., 0] < jnp.inf
    steps = jnp.where(finite, 2**bits - 1, jnp.nan).astype(jnp.float32)  # no constant XLA would invert
    below = jnp.abs(low) > jnp.abs(high)
    step = jnp.maximum((high - low) / steps, _SMALLEST)
    step, edge = jnp.where(below, step, -step), jnp.where(below, low, high)
    places = jnp.round(edge / step)
    scale = jnp.where(places == 0, step, edge / jnp.where(places == 0, 1, places))
    bias = jnp.where(places == 0, 0, edge)
    codes = jnp.round(quotient(groups - bias[..., None], scale, -1))
    return jnp.where(jnp.isnan(codes), 0, jnp.clip(codes, 0, 2**bits - 1)).astype(jnp.uint8), scale, bias


@functools.partial(jax.jit, static_argnames="mode")
def _small_floats(groups: jax.Array, mode: str) -> tuple[jax.Array, jax.Array]:
    """No value is cut off: the scale is the next power of two that suffices, or (nvfp4) rounded to nearest."""
    row = floating.KINDS[mode]
    absmax = largest(groups, -1)[..., 0]
    wanted = absmax / jnp.where(absmax < jnp.inf, row.largest, jnp.nan).astype(jnp.float32)
    if mode == "nvfp4":
        scale = jnp.minimum(wanted, 448).astype(jnp.float8_e4m3fn)
        stored, factor = lax.bitcast_convert_type(scale, jnp.uint8), scale.astype(jnp.float32)
    else:
        part, exponent = jnp.frexp(wanted)
        exponent = jnp.clip(jnp.where(wanted == 0, 0, exponent - (part == 0.5)), -127, 127)
        stored = jnp.where(jnp.isnan(wanted), 255, exponent + 127).astype(jnp.uint8)
        factor = jnp.ldexp(jnp.ones_like(wanted), exponent)
    scaled = quotient(groups, jnp.where(factor == 0, 1, factor), -1)
    return floating.nearest(jnp.where(jnp.isnan(scaled), 0, scaled), row), stored
