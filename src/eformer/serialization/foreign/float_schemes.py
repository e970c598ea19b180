"""Small floats: FP8 with scales of tensors, rows or tiles, MXFP4, MXFP8 and NVFP4, as several programs name them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from eformer._formats.floating.array import ArrayFloat

from ..safetensors.header import Entry
from . import layouts
from .scheme import FLOATS, Config, Parts, Read, Scheme, expect, text_of, wrong

_FP8 = {"float8_e4m3fn": "fp8", "float8_e5m2": "fp8_e5m2"}
_E8M0 = ("uint8", "float8_e8m0fnu")
_BLOCKS = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}  # bits of a code, values of a block
_TILE = 128


# -- FP8 ---------------------------------------------------------------------------------------------------------------


def _plan_fp8(suffix: str) -> Any:
    def plan(parts: Parts, config: Config, read: Read) -> dict[str, Any]:
        codes, scale = parts[".weight"], parts[suffix]
        rows, size = codes.shape
        tiles = (-(-rows // _TILE), -(-size // _TILE))
        stated = config.get("weight_block_size")
        if stated not in (None, [_TILE, _TILE]) and len(scale.shape) == 2 and min(scale.shape) > 1:
            what = f"has a scale per block of {stated!r:.50}; only [{_TILE}, {_TILE}] is read."
            raise wrong(suffix, what, "Decode it with the program that made it, and quantize that.")
        allowed = ((), (1,), (1, 1), (rows,), (rows, 1), tiles)
        if scale.shape not in allowed:
            what = f"is {text_of(scale)}, but a weight {text_of(codes)} has one scale, {rows}, or {list(tiles)}."
            raise wrong(suffix, what)
        return {"scale": suffix, "kind": _FP8[codes.dtype.name]}

    return plan


def _make_fp8(arrays: Any, *, scale: str, kind: str, dtype: str) -> Any:
    codes, found = arrays[".weight"], arrays[scale]
    found = found if found.ndim == 2 else found.reshape(-1, 1)
    return ArrayFloat.from_codes(codes, found, kind=kind, axis=-1, dtype=dtype)


# -- blocks with a scale each ------------------------------------------------------------------------------------------


def in_blocks(
    method: str, kind: str, codes: str, dtype: str, scales: str, of: tuple[str, ...], whole: str = ""
) -> Scheme:
    """A row for codes in words or bytes, `(..., in)`, and scales `(..., in / block)`."""
    bits, block = _BLOCKS[kind]
    is_word = dtype == "uint32"

    def count(stored: Entry) -> int:
        return -(-stored.shape[-1] * 8 * stored.dtype.itemsize // bits // block)

    def fits(parts: Parts) -> bool:
        """MLX stores everything in words: how many scales there are tells the kinds apart."""
        return not is_word or parts[scales].shape[-1:] == (count(parts[codes]),)

    def plan(parts: Parts, config: Config, read: Read) -> dict[str, Any]:
        stored = parts[codes]
        expect(parts, scales, (*stored.shape[:-1], count(stored)), f"{kind} of {text_of(stored)}")
        if whole and parts[whole].shape not in ((), (1,)):
            raise wrong(whole, f"is {text_of(parts[whole])}, but {kind} has one number per tensor.")
        if is_word and config.get("mode", kind) != kind:
            raise wrong(scales, f"belongs to mode={kind!r}, but the quantization config says {config['mode']!r:.50}.")
        return {"codes": codes, "scales": scales, "whole": whole, "kind": kind}

    needs = {codes: (dtype,), scales: of, **({whole: FLOATS} if whole else {})}
    return Scheme(f"{method} {kind}", method, needs, plan, _make_blocks, ndim=0, fits=fits)


def _make_blocks(arrays: Any, *, codes: str, scales: str, whole: str, kind: str, dtype: str) -> Any:
    fields, scale, tensor_scale = arrays[codes], arrays[scales], None
    if fields.dtype.itemsize > 1 or _BLOCKS[kind][0] < 8:
        fields = layouts.word_fields(fields, _BLOCKS[kind][0])
    if kind == "nvfp4" and scale.dtype == jnp.uint8:
        scale = lax.bitcast_convert_type(scale, jnp.float8_e4m3fn)
    if whole:
        tensor_scale = arrays[whole].astype(jnp.float32).reshape(())
        # compressed-tensors stores what values were multiplied by before they were rounded.
        tensor_scale = 1 / tensor_scale if whole == ".weight_global_scale" else tensor_scale
    return ArrayFloat.from_codes(fields, scale, kind=kind, tensor_scale=tensor_scale, axis=-1, dtype=dtype)


def _plan_mxfp4_experts(parts: Parts, config: Config, read: Read) -> dict[str, Any]:
    shape = parts["_blocks"].shape
    if shape[-1] != 16:
        raise wrong("_blocks", f"is {text_of(parts['_blocks'])}, but a block of MXFP4 has 16 bytes.")
    expect(parts, "_scales", shape[:-1], "one exponent per block")
    return {}


def _make_mxfp4_experts(arrays: Any, *, dtype: str) -> Any:
    """Experts come out as (experts, in, out), as the model multiplies them, with blocks along `in`."""
    blocks = arrays["_blocks"]
    codes = layouts.word_fields(blocks, 4).reshape(*blocks.shape[:2], -1)
    made: Any = ArrayFloat.from_codes(codes, arrays["_scales"], kind="mxfp4", axis=-1, dtype=dtype)
    return made.mT


_CT, _PACKED, _SCALE, _E4M3 = "compressed-tensors", ".weight_packed", ".weight_scale", ("float8_e4m3fn",)
_EXPERTS = {"_blocks": ("uint8",), "_scales": _E8M0}
SCHEMES = (
    *(
        Scheme("fp8", "fp8", {".weight": tuple(_FP8), scale: (*FLOATS, _E8M0[1])}, _plan_fp8(scale), _make_fp8)
        for scale in (".weight_scale_inv", _SCALE)
    ),
    in_blocks(_CT, "mxfp4", _PACKED, "uint8", _SCALE, _E8M0),
    in_blocks(_CT, "mxfp8", ".weight", "float8_e4m3fn", _SCALE, _E8M0),
    in_blocks(_CT, "nvfp4", _PACKED, "uint8", _SCALE, _E4M3, ".weight_global_scale"),
    in_blocks("modelopt", "nvfp4", ".weight", "uint8", _SCALE, _E4M3, ".weight_scale_2"),
    *(in_blocks("mlx", kind, ".weight", "uint32", ".scales", ("uint8",)) for kind in _BLOCKS),
    Scheme("mxfp4 experts", "mxfp4", _EXPERTS, _plan_mxfp4_experts, _make_mxfp4_experts, ndim=4, leaf=""),
)
