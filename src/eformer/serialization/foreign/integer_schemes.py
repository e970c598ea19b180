"""Integers in groups: GPTQ, AWQ, MLX, compressed-tensors.

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

from eformer._formats.int8.array import Array8B
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

_BITS = (2, 3, 4, 5, 6, 8)


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
    stated, loose = number(config, "bits", _BITS), has_patterns(config)
    fitting = [b for b in _BITS if zeros.shape[1] == -(-out * b // 32) and codes.shape[0] * 32 % b == 0]
    fitting = sorted(fitting, key=lambda b: (b != stated, out * b % 32 != 0))
    found = f"is {text_of(zeros)} for {out} outputs and codes {text_of(codes)}, which fits"
    said = f"the quantization config says bits={stated}."
    if not fitting:
        raise wrong(".qzeros", f"{found} no number of bits in {_BITS}; {said}")
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
    order = row_order(parts, ".g_idx", size, group or size, groups, read)
    version = config.get("checkpoint_format", config.get("format", "gptq"))
    if version not in ("gptq", "gptq_v2"):
        fix = "Allowed are 'gptq' (zero points stored minus 1) and 'gptq_v2' (as they are). Convert others first."
        raise wrong(".qzeros", f"is of checkpoint_format={version!r:.50}, whose layout is unknown.", fix)
    zeros_are = {"minus": 1 if version == "gptq" else 0, "assumed": not {"checkpoint_format", "format"} & set(config)}
    symmetric = config.get("sym") is True
    if symmetric and loose:  # its zero points know
        symmetric = _zero_points(read(".qzeros"), bits, out, zeros_are["minus"]) == [2 ** (bits - 1)]
    return {"bits": bits, "group": group, "symmetric": symmetric, "order": order, **zeros_are}


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


@functools.partial(jax.jit, static_argnames=("bits", "out", "minus"))
def _gptq_zeros(zeros: Any, bits: int, out: int, minus: int) -> Any:
    """z - 1 was stored. GPTQModel subtracts from whole words, where 0 borrows from the next field, but of 3 bits."""
    if minus and 32 % bits == 0:
        zeros, minus = layouts.unsigned(zeros) + np.uint32(0xFFFFFFFF // (2**bits - 1)), 0
    codes = layouts.bit_stream(zeros, bits)[:, :out]
    return (codes + np.uint8(minus)) & np.uint8(2**bits - 1)


def _zero_points(stored: Any, bits: int, out: int, minus: int) -> list[int]:
    """Those that there are, without repetition."""
    return np.unique(np.asarray(_gptq_zeros(stored, bits, out, minus))).tolist()


def _check_gptq(arrays: Mapping[str, Any], *, bits: int, minus: int, assumed: bool, symmetric: bool, **_: Any) -> None:
    if not (symmetric or assumed):
        return
    middle = 2 ** (bits - 1)
    found = _zero_points(arrays[".qzeros"], bits, arrays[".scales"].shape[1], minus)
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
    arrays: Any, *, bits: int, group: Any, minus: int, symmetric: bool, order: Any, dtype: str, **_: Any
) -> Any:
    codes, scale = layouts.along(layouts.bit_stream, arrays[".qweight"], bits, 0), arrays[".scales"]
    if order is not None:
        codes = codes[order]
    zero = None if symmetric else _gptq_zeros(arrays[".qzeros"], bits, scale.shape[1], minus).T
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
    bits, group = number(config, "bits", _BITS), number(config, "group_size", _MLX_GROUPS)
    fitting = [(b, g) for b in _BITS for g in _MLX_GROUPS if codes.shape[-1] * 32 == b * g * scales.shape[-1]]
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


# -- compressed-tensors ------------------------------------------------------------------------------------------------


def _plan_packed(parts: Parts, config: Config, read: Read) -> dict[str, Any]:
    codes, scales = parts[".weight_packed"], parts[".weight_scale"]
    rows, size = map(int, read(".weight_shape")) if parts[".weight_shape"].shape == (2,) else (0, 0)
    shape = scales.shape if len(scales.shape) == 2 else (1, 1) if scales.shape in ((), (1,)) else (0, 0)
    if rows != codes.shape[0] or shape[0] not in (1, rows) or size < 1:
        what = f"says {[rows, size]}, but the codes are {text_of(codes)} and the scales {text_of(scales)}."
        raise wrong(".weight_shape", what)

    def words(count: int, bits: int, stream: bool) -> int:
        """In newer versions codes of 3, 5 and 6 bits go on in the next word; in older ones each word has whole ones."""
        return -(-count * bits // 32) if stream else -(-count // (32 // bits))

    ways = [(b, stream) for b in _BITS for stream in (False, True) if words(size, b, stream) == codes.shape[1]]
    stated = weight_groups(config)
    numbers = [group["num_bits"] for group in stated if group.get("num_bits") is not None]
    ways = [way for way in ways if not numbers or way[0] in numbers]
    if not ways:
        what = f"is {text_of(codes)}, but rows have {size} values: no number of bits in {_BITS} fits"
        fix = "" if not numbers or set(numbers) & set(_BITS) else "Quantize the dense checkpoint with one of these."
        raise wrong(".weight_packed", f"{what}{f'; config_groups says {numbers[:8]}' * bool(numbers)}.", fix)
    (bits, stream), groups = ways[-1], shape[1]
    if ".weight_zero_point" in parts:
        unpacked = parts[".weight_zero_point"].dtype == np.int8  # as older versions have them
        lines = rows if unpacked else words(rows, bits, stream)
        expect(parts, ".weight_zero_point", (lines, groups), f"{rows} rows of {groups} zero points")
    sizes = [s for s in (g.get("group_size") for g in stated) if type(s) is int and s > 0]
    sizes = [s for s in sizes if -(-size // s) == groups] or sizes[:1]
    group = group_size(sizes[0] if sizes else None, size, groups, ".weight_scale")
    in_order = ".weight_g_idx" in parts and bool((read(".weight_g_idx") == -1).all())  # its way to say so
    order = None if in_order else row_order(parts, ".weight_g_idx", size, group or size, groups, read)
    return {"bits": bits, "stream": stream, "size": size, "group": group, "order": order}


def weight_groups(config: Config) -> list[Mapping[str, Any]]:
    """What `config_groups` says of weights."""
    groups = config.get("config_groups")
    found = [g.get("weights") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    return [weights for weights in found if isinstance(weights, dict)]


def _make_packed(arrays: Any, *, bits: int, stream: bool, size: int, group: Any, order: Any, dtype: str) -> Any:
    unpack, rows = layouts.bit_stream if stream else layouts.word_fields, arrays[".weight_packed"].shape[0]
    codes = unpack(arrays[".weight_packed"], bits)[:, :size]
    codes = codes if order is None else codes[:, order]
    zero = arrays.get(".weight_zero_point")
    if zero is not None and zero.dtype == jnp.int8:
        zero = layouts.unsigned(zero + np.int8(-(2 ** (bits - 1)))) & np.uint8(2**bits - 1)
    elif zero is not None:
        zero = layouts.along(unpack, zero, bits, 0)[:rows]
    scale = arrays[".weight_scale"]
    scale = jnp.broadcast_to(scale, (rows, scale.shape[1] if scale.ndim == 2 else 1))
    return permuted(integers(codes, scale, zero=zero, bits=bits, block_size=group, dtype=dtype), order)


def _plan_int8(parts: Parts, config: Config, read: Read) -> dict[str, Any]:
    (rows, size), scale = parts[".weight"].shape, parts[".weight_scale"]
    per_row = scale.shape in ((), (1,), (rows,)) or (len(scale.shape) == 2 and scale.shape[0] in (1, rows))
    if not per_row:
        raise wrong(".weight_scale", f"is {text_of(scale)}, which does not fit weights {[rows, size]}.")
    groups = scale.shape[1] if len(scale.shape) == 2 else 1
    expect(parts, ".weight_zero_point", scale.shape, "one for each scale")
    return {"group": group_size(config.get("group_size"), size, groups, ".weight_scale"), "groups": groups}


def _make_int8(arrays: Any, *, group: Any, groups: int, dtype: str) -> Any:
    weight, zero = arrays[".weight"], arrays.get(".weight_zero_point")
    rows = weight.shape[0]
    scale = jnp.broadcast_to(arrays[".weight_scale"].reshape(-1, groups), (rows, groups))
    if group is None and zero is None:
        return Array8B(scale, weight, dtype=jnp.dtype(dtype))
    if zero is not None:
        zero = jnp.broadcast_to(_shifted(zero).reshape(-1, groups), (rows, groups))
    return integers(_shifted(weight), scale, zero=zero, bits=8, block_size=group, dtype=dtype)


def _shifted(codes: Any) -> Any:
    return layouts.unsigned(codes) ^ np.uint8(128)


# -- bitsandbytes, LLM.int8(): the largest magnitude of every row became 127 -------------------------------------------


def _plan_llm_int8(parts: Parts, config: Config, read: Read) -> dict[str, Any]:
    expect(parts, ".SCB", parts[".weight"].shape[:1], "a weight with a number for each row")
    form = int(read(".weight_format").reshape(-1)[0]) if ".weight_format" in parts else 0
    if form != 0:
        what = f"is {form}: the tiles of some GPU. Only 0, rows, is read."
        raise wrong(".weight_format", what, "Save it again with bitsandbytes.")
    return {}


def _make_llm_int8(arrays: Any, *, dtype: str) -> Any:
    largest = arrays[".SCB"].reshape(-1, 1)
    # Dividing by a value XLA cannot turn into a factor.
    return Array8B(largest / jnp.where(largest < jnp.inf, 127, jnp.nan), arrays[".weight"], dtype=jnp.dtype(dtype))


_CT = "compressed-tensors"
_PACKED = {".weight_packed": WORDS, ".weight_scale": FLOATS, ".weight_shape": ("int32", "int64")}
_SORTED = {".weight_zero_point": (*WORDS, "int8"), ".weight_g_idx": ("int32",)}
_MLX = {".weight": ("uint32",), ".scales": FLOATS, ".biases": FLOATS}
_INT8 = {".weight": ("int8",), ".weight_scale": FLOATS}
_LLM_INT8 = {".weight": ("int8",), ".SCB": ("float32",)}

SCHEMES = (
    Scheme(
        "gptq",
        "gptq",
        _GPTQ,
        _plan_gptq,
        _make_gptq,
        {".g_idx": ("int32",)},
        fits=_fits_gptq,
        check=_check_gptq,
        rows=1,
    ),
    Scheme("awq", "awq", _GPTQ, _plan_awq, _make_awq, fits=_fits_awq, rows=1),
    Scheme("mlx", "mlx", _MLX, _plan_mlx, _make_mlx, ndim=0),
    Scheme("pack-quantized", _CT, _PACKED, _plan_packed, _make_packed, _SORTED),
    Scheme("LLM.int8", "bitsandbytes", _LLM_INT8, _plan_llm_int8, _make_llm_int8, {".weight_format": ("uint8",)}),
    Scheme("int-quantized", _CT, _INT8, _plan_int8, _make_int8, {".weight_zero_point": ("int8",)}),
)
