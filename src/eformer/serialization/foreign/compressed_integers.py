"""Integers of compressed-tensors, in groups or whole rows, and the INT8 of bitsandbytes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from eformer._formats.int8.array import Array8B

from . import layouts
from .integer_schemes import BITS, integers, permuted, row_order
from .scheme import FLOATS, WORDS, Config, Parts, Read, Scheme, expect, group_size, text_of, weight_groups, wrong


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

    ways = [(b, stream) for b in BITS for stream in (False, True) if words(size, b, stream) == codes.shape[1]]
    stated = weight_groups(config)
    numbers = [group["num_bits"] for group in stated if group.get("num_bits") is not None]
    ways = [way for way in ways if not numbers or way[0] in numbers]
    if not ways:
        what = f"is {text_of(codes)}, but rows have {size} values: no number of bits in {BITS} fits"
        fix = "" if not numbers or set(numbers) & set(BITS) else "Quantize the dense checkpoint with one of these."
        raise wrong(".weight_packed", f"{what}{f'; config_groups says {numbers[:8]}' * bool(numbers)}.", fix)
    (bits, stream), groups = ways[-1], shape[1]
    _check_symmetric(parts, stated, read)
    if ".weight_zero_point" in parts:
        unpacked = parts[".weight_zero_point"].dtype == np.int8  # as older versions have them, and all that of a tensor
        if not unpacked or shape[0] == rows:
            lines = rows if unpacked else words(rows, bits, stream)
            expect(parts, ".weight_zero_point", (lines, groups), f"{rows} rows of {groups} zero points")
        else:
            expect(parts, ".weight_zero_point", scales.shape, "one for each scale")
    sizes = [s for s in (g.get("group_size") for g in stated) if type(s) is int and s > 0]
    sizes = [s for s in sizes if -(-size // s) == groups] or sizes[:1]
    group = group_size(sizes[0] if sizes else None, size, groups, ".weight_scale")
    order = _group_order(parts, stated, ".weight_packed", size, group, groups, read)
    return {"bits": bits, "stream": stream, "size": size, "group": group, "order": order}


def _check_symmetric(parts: Parts, stated: list[Any], read: Read) -> None:
    """Raise if all that is stated of weights contradicts the zero points, or that there are none."""
    said, there = {group.get("symmetric") for group in stated}, ".weight_zero_point" in parts
    fix = "quantization={'config_groups': None}"
    if said == {False} and not there:
        what = "needs a weight_zero_point: the quantization config says symmetric=False."
        raise wrong(".weight_zero_point", what, f"Fetch all files, or pass {fix} if the codes are symmetric.")
    if said == {True} and there and (parts[".weight_zero_point"].dtype != np.int8 or read(".weight_zero_point").any()):
        what = "is there, but the quantization config says symmetric=True."
        raise wrong(".weight_zero_point", what, f"Pass {fix} if these zero points count.")


def _group_order(
    parts: Parts, stated: list[Any], codes: str, size: int, group: int | None, groups: int, read: Read
) -> np.ndarray | None:
    """As `row_order`. -1 everywhere is its way to say that the inputs are in order."""
    if ".weight_g_idx" not in parts:
        if group is not None and stated and all(g.get("actorder") in ("group", "dynamic", True) for g in stated):
            what = (
                "was made with actorder='group', but weight_g_idx, which says the group of every input, is not there."
            )
            fix = "Fetch all files, or pass quantization={'config_groups': None} if the inputs are in order."
            raise wrong(codes, what, fix)
        return None
    in_order = bool((read(".weight_g_idx") == -1).all())
    return None if in_order else row_order(parts, ".weight_g_idx", size, group or size, groups, read)


def _make_packed(arrays: Any, *, bits: int, stream: bool, size: int, group: Any, order: Any, dtype: str) -> Any:
    unpack, rows = layouts.bit_stream if stream else layouts.word_fields, arrays[".weight_packed"].shape[0]
    codes = unpack(arrays[".weight_packed"], bits)[:, :size]
    codes = codes if order is None else codes[:, order]
    zero = arrays.get(".weight_zero_point")
    if zero is not None and zero.dtype == jnp.int8:
        zero = layouts.unsigned(zero + np.int8(-(2 ** (bits - 1)))) & np.uint8(2**bits - 1)
        zero = jnp.broadcast_to(zero, (rows, zero.shape[1] if zero.ndim == 2 else 1))
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
    group, stated = group_size(config.get("group_size"), size, groups, ".weight_scale"), weight_groups(config)
    _check_symmetric(parts, stated, read)
    order = _group_order(parts, stated, ".weight", size, group, groups, read)
    return {"group": group, "groups": groups, "order": order}


def _make_int8(arrays: Any, *, group: Any, groups: int, order: Any, dtype: str) -> Any:
    weight, zero = arrays[".weight"], arrays.get(".weight_zero_point")
    rows, weight = weight.shape[0], weight if order is None else weight[:, order]
    scale = jnp.broadcast_to(arrays[".weight_scale"].reshape(-1, groups), (rows, groups))
    if group is None and zero is None:
        return Array8B(scale, weight, dtype=jnp.dtype(dtype))
    if zero is not None:
        zero = jnp.broadcast_to(_shifted(zero).reshape(-1, groups), (rows, groups))
    return permuted(integers(_shifted(weight), scale, zero=zero, bits=8, block_size=group, dtype=dtype), order)


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
_INT8 = {".weight": ("int8",), ".weight_scale": FLOATS}
_LLM_INT8 = {".weight": ("int8",), ".SCB": ("float32",)}

SCHEMES = (
    Scheme("pack-quantized", _CT, _PACKED, _plan_packed, _make_packed, _SORTED),
    Scheme("LLM.int8", "bitsandbytes", _LLM_INT8, _plan_llm_int8, _make_llm_int8, {".weight_format": ("uint8",)}),
    Scheme("int-quantized", _CT, _INT8, _plan_int8, _make_int8, {**_SORTED, ".weight_zero_point": ("int8",)}),
)
