"""Integers in groups: GPTQ, AWQ, MLX.

Facts of the layouts were taken from the programs that write them; `tests/serialization/test_foreign.py` has each as an
equation in NumPy.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eformer._formats.integer import codec
from eformer._formats.integer.array import ArrayInt
from eformer._formats.permuted.array import PermutedArray

from . import layouts
from .scheme import (
    FLOATS,
    WORDS,
    Config,
    Parts,
    Read,
    Scheme,
    check_method,
    expect,
    group_size,
    has_patterns,
    number,
    text_of,
    wrong,
)

BITS = (2, 3, 4, 5, 6, 8)


def integers(codes: Any, scale: Any, **more: Any) -> Any:
    """An array of integers (out, in); `block_size` None is whole rows."""
    return ArrayInt.from_codes(codes, scale, axis=-1, **more)


def permuted(array: Any, order: Any) -> Any:
    return array if order is None else PermutedArray(array, order, axis=-1)


# -- GPTQ and AWQ: words of codes (in, out), scales (groups, out) ------------------------------------------------------

_GPTQ = {".qweight": WORDS, ".qzeros": WORDS, ".scales": FLOATS}


def _fits_gptq(parts: Parts) -> bool:
    codes, zeros, scales = (parts[suffix].shape for suffix in _GPTQ)
    return codes[1:] == scales[1:] and zeros[:1] == scales[:1] and len(zeros) == 2


def _plan_gptq(parts: Parts, config: Config, read: Read) -> dict[str, Any]:
    codes, zeros, (groups, out) = parts[".qweight"], parts[".qzeros"], parts[".scales"].shape
    check_method(config, "gptq")
    stated, loose = number(config, "bits", BITS), has_patterns(config)
    fitting = [b for b in BITS if zeros.shape[1] == -(-out * b // 32) and codes.shape[0] * 32 % b == 0]
    fitting = sorted(fitting, key=lambda b: (b != stated, out * b % 32 != 0))
    found = f"is {text_of(zeros)} for {out} outputs and codes {text_of(codes)}, which fits"
    said = f"the quantization config says bits={stated}."
    if not fitting:
        raise wrong(".qzeros", f"{found} no number of bits in {BITS}; {said}")
    if stated not in (None, fitting[0]) and not loose:
        fix = f"Pass quantization={{'bits': {fitting[0]}}} if that is what it is, or, for this weight alone, "
        fix += f"{{'NAME': {{'bits': {fitting[0]}}}}} with its name before .qzeros."
        raise wrong(".qzeros", f"{found} bits={fitting[0]}, but {said}", fix)
    bits = fitting[0]
    size = codes.shape[0] * 32 // bits
    group = group_size(config.get("group_size"), size, groups, ".scales", loose)
    if config.get("desc_act") is True and group is not None and ".g_idx" not in parts:
        what = "was made with desc_act=True, but g_idx, which says the group of every row, is not there."
        raise wrong(".qweight", what, "Fetch all files, or pass quantization={'desc_act': False} if rows are in order.")
    # GPTQ-for-LLaMa left zeros where it did not sort.
    unset = config.get("desc_act") is False and ".g_idx" in parts and not read(".g_idx").any()
    order = None if unset else row_order(parts, ".g_idx", size, group or size, groups, read)
    version = config.get("checkpoint_format", config.get("format", "gptq"))
    if version not in ("gptq", "gptq_v2", "gptq_p"):
        fix = "Allowed are 'gptq' (zero points stored minus 1), 'gptq_v2' (as they are) and 'gptq_p' (so, and codes in "
        raise wrong(
            ".qzeros",
            f"is of checkpoint_format={version!r:.50}, whose layout is unknown.",
            f"{fix}planes of bits). Convert others first.",
        )
    if bits in (5, 6) and not {"checkpoint_format", "format", "quant_method", "method"} & set(config):
        what = f"has codes of {bits} bits, which AutoRound packs one after the other and GPTQModel in planes of bits."
        fix = "Pass quantization={'checkpoint_format': 'gptq'}, 'gptq_v2' or 'gptq_p': as its quantization config says."
        raise wrong(".qweight", what, fix)
    planes = version == "gptq_p" and bits in layouts.PLANES
    if planes and (size % 32 or out % 32):
        what = f"is of checkpoint_format='gptq_p', bits={bits}, with {size} inputs and {out} outputs"
        raise wrong(".qweight", f"{what}; both must be multiples of 32.")
    zeros_are = {"minus": 1 if version == "gptq" else 0, "assumed": not {"checkpoint_format", "format"} & set(config)}
    symmetric = config.get("sym") is True
    if symmetric and loose:  # its zero points know
        symmetric = _zero_points(read(".qzeros"), bits, out, zeros_are["minus"], planes) == [2 ** (bits - 1)]
    return {"bits": bits, "group": group, "symmetric": symmetric, "order": order, "planes": planes, **zeros_are}


def row_order(parts: Parts, suffix: str, size: int, group: int, groups: int, read: Read) -> np.ndarray | None:
    """Which row belongs at which place for groups to be contiguous; None if they are already."""
    if suffix not in parts:
        return None
    expect(parts, suffix, (size,), f"a weight with {size} inputs")
    found = read(suffix)
    if found.size and (found.min() < 0 or found.max() >= groups):
        what = f"names the groups {found.min()} to {found.max()}, but there are only {groups} (0 to {groups - 1})."
        raise wrong(suffix, what)
    natural = np.arange(size) // group
    if np.array_equal(found, natural):
        return None
    order = np.argsort(found, kind="stable").astype(np.int32)
    if not np.array_equal(found[order], natural):
        counts = np.bincount(found, minlength=groups)
        what = f"puts {counts.min()} to {counts.max()} rows into a group of {group}."
        raise wrong(
            suffix, what, "Groups of different sizes cannot stay packed: decode it with the program that made it."
        )
    return order


@functools.partial(jax.jit, static_argnames=("bits", "out", "minus", "planes"))
def _gptq_zeros(zeros: Any, bits: int, out: int, minus: int, planes: bool) -> Any:
    """z - 1 was stored. GPTQModel subtracts from whole words, where 0 borrows from the next field, but of 3 bits."""
    if minus and 32 % bits == 0:
        zeros, minus = layouts.unsigned(zeros) + np.uint32(0xFFFFFFFF // (2**bits - 1)), 0
    codes = _gptq_codes(planes)(zeros, bits)[:, :out]
    return (codes + np.uint8(minus)) & np.uint8(2**bits - 1)


def _gptq_codes(planes: bool) -> Any:
    return layouts.bit_planes if planes else layouts.bit_stream


def _zero_points(stored: Any, bits: int, out: int, minus: int, planes: bool) -> list[int]:
    """Those that there are, without repetition."""
    return np.unique(np.asarray(_gptq_zeros(stored, bits, out, minus, planes))).tolist()


def _check_gptq(
    arrays: Mapping[str, Any], *, bits: int, minus: int, planes: bool, assumed: bool, symmetric: bool, **_: Any
) -> None:
    if not (symmetric or assumed):
        return
    middle = 2 ** (bits - 1)
    found = _zero_points(arrays[".qzeros"], bits, arrays[".scales"].shape[1], minus, planes)
    if not symmetric and found == [middle + 1]:
        raise wrong(
            ".qzeros",
            f"holds {middle} everywhere, as symmetric weights have it that store zero points as they are ('gptq_v2'). "
            f"By default they are stored minus 1 ('gptq'), and this would stand for {middle + 1}.",
            "Pass quantization={'checkpoint_format': 'gptq_v2'}, or 'gptq' if that is what it is.",
        )
    if symmetric and found not in ([], [middle]):
        raise wrong(
            ".qzeros",
            f"holds the zero points {found[:4]}, but sym=True means {middle} everywhere.",
            "Pass quantization={'sym': False} to take them as they are, or 'checkpoint_format': 'gptq_v2' if they were "
            "stored without subtracting 1.",
        )


def _make_gptq(
    arrays: Any, *, bits: int, group: Any, minus: int, planes: bool, symmetric: bool, order: Any, dtype: str, **_: Any
) -> Any:
    codes, scale = layouts.along(_gptq_codes(planes), arrays[".qweight"], bits, 0), arrays[".scales"]
    if order is not None:
        codes = codes[order]
    zero = None if symmetric else _gptq_zeros(arrays[".qzeros"], bits, scale.shape[1], minus, planes).T
    made = integers(codes.T, scale.T, zero=zero, bits=bits, block_size=group, dtype=dtype)
    return permuted(made, order)


def _fits_awq(parts: Parts) -> bool:
    codes, zeros, scales = (parts[suffix].shape for suffix in _GPTQ)
    return len(scales) == 2 and zeros == (scales[0], codes[1]) and codes[1] * 8 == scales[1]


def _plan_awq(parts: Parts, config: Config, read: Read) -> dict[str, Any]:
    check_method(config, "awq")
    version, bits = str(config.get("version", "gemm")).lower(), config.get("bits", config.get("w_bit", 4))
    if version != "gemm" or bits != 4:
        what = f"is of AWQ version={version!r:.50}, bits={bits!r:.50}; 4 bits of version 'gemm' are read."
        raise wrong(".qweight", what, "Convert it to that version with AutoAWQ.")
    size, groups = parts[".qweight"].shape[0], parts[".scales"].shape[0]
    return {"group": group_size(config.get("group_size", config.get("q_group_size")), size, groups, ".scales")}


def _make_awq(arrays: Any, *, group: Any, dtype: str) -> Any:
    words, scale = arrays[".qweight"], arrays[".scales"].T
    zero, (size, width) = layouts.awq_columns(arrays[".qzeros"], 4).T, words.shape
    if group is None or size % group:
        return integers(layouts.awq_columns(words, 4).T, scale, zero=zero, bits=4, block_size=group, dtype=dtype)

    # Turned group by group, each written to its place: as a whole, values of a row come from as many pages of memory as
    # there are rows, which is three times as slow.
    def one(number: Any, packed: Any) -> Any:
        codes = layouts.awq_columns(lax.dynamic_slice_in_dim(words, number * group, group), 4).T
        return lax.dynamic_update_slice_in_dim(packed, codec.packed_codes(codes, 4)[:, None], number, 1)

    packed = lax.fori_loop(0, size // group, one, jnp.zeros((8 * width, size // group, group // 2), jnp.uint8))
    return ArrayInt(packed, scale, zero, bits=4, block_size=group, axis=-1, dtype=jnp.dtype(dtype))


# -- MLX: words of codes (out, in), scales and biases (out, groups) ----------------------------------------------------

_MLX_GROUPS = (32, 64, 128)


def _plan_mlx(parts: Parts, config: Config, read: Read) -> dict[str, Any]:
    codes, scales = parts[".weight"], parts[".scales"]
    expect(parts, ".biases", scales.shape, "as many as scales there are")
    if config.get("mode", "affine") != "affine" or codes.shape[:-1] != scales.shape[:-1]:
        what = f"is {text_of(scales)} and belongs to mode='affine' of {text_of(codes)}"
        raise wrong(".scales", f"{what}, which has other rows or mode={config.get('mode')!r:.50}.")
    bits, group = number(config, "bits", BITS), number(config, "group_size", _MLX_GROUPS)
    fitting = [(b, g) for b in BITS for g in _MLX_GROUPS if codes.shape[-1] * 32 == b * g * scales.shape[-1]]
    fitting = [(b, g) for b, g in fitting if bits in (None, b) and group in (None, g)]
    if len(fitting) != 1:
        what = (
            f"is {text_of(codes)} with scales {text_of(scales)} and the configuration bits={bits}, group_size={group}"
        )
        fix = "Pass quantization={'bits': ..., 'group_size': ...}."
        raise wrong(".weight", f"{what}: as (bits, group_size) {fitting or 'nothing'} would fit.", fix)
    return {"bits": fitting[0][0], "group": fitting[0][1]}


def _make_mlx(arrays: Any, *, bits: int, group: int, dtype: str) -> Any:
    codes = layouts.bit_stream(arrays[".weight"], bits)
    more = {"bias": arrays[".biases"], "bits": bits, "block_size": group, "dtype": dtype}
    return integers(codes, arrays[".scales"], **more)


_G_IDX = {".g_idx": ("int32",)}
_MLX = {".weight": ("uint32",), ".scales": FLOATS, ".biases": FLOATS}

SCHEMES = (
    Scheme("gptq", "gptq", _GPTQ, _plan_gptq, _make_gptq, _G_IDX, fits=_fits_gptq, check=_check_gptq, rows=1),
    Scheme("awq", "awq", _GPTQ, _plan_awq, _make_awq, fits=_fits_awq, rows=1),
    Scheme("mlx", "mlx", _MLX, _plan_mlx, _make_mlx, ndim=0),
)
