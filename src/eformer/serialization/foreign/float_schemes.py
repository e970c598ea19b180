"""Small floats: FP8 with scales of tensors, rows or tiles, MXFP4, MXFP8 and NVFP4, as several programs name them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from eformer._formats.floating.array import ArrayFloat

from ..safetensors.header import Entry
from . import layouts
from .scheme import FLOATS, Config, Parts, Read, Scheme, expect, text_of, weight_groups, wrong

_FP8 = {"float8_e4m3fn": "fp8", "float8_e5m2": "fp8_e5m2"}
_E8M0 = ("uint8", "float8_e8m0fnu")
_BLOCKS = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}  # bits of a code, values of a block
_TILE = 128


# -- FP8 ---------------------------------------------------------------------------------------------------------------


def fp8(codes: str, suffix: str, leaf: str | None = None) -> Scheme:
    """A row for matrices, or stacks of them, `(..., out, in)`, with scales of floating point."""

    def plan(parts: Parts, config: Config, read: Read) -> dict[str, Any]:
        stored, scale = parts[codes], parts[suffix]
        *lead, rows, size = stored.shape
        tiles = (*lead, -(-rows // _TILE), -(-size // _TILE))
        one = (1,) * len(stored.shape)
        # The shapes a scale may have, and those they stand for.
        whole, outputs, inputs = (*lead, 1, 1), (*lead, rows, 1), (*lead, 1, size)
        allowed = {(*lead,): whole, (*lead, rows): outputs, whole: whole, outputs: outputs, tiles: tiles}
        allowed |= {(): one, (1,): one, one: one}
        # Experts along inputs; what ModelOpt calls FP8_PB_WO.
        allowed |= {inputs: inputs} if lead else {(tiles[0], 1, tiles[1], 1): tiles}
        if scale.shape not in allowed:
            each = " for each matrix" if lead else ""
            what = f"is {text_of(scale)}, but a weight {text_of(stored)} has one scale, {rows}, or {list(tiles)}{each}."
            raise wrong(suffix, what, "Where there are more, decode it with the program that made it.")
        shape = allowed[scale.shape]
        other = [b for b in _stated_blocks(config) if not _as_tiles(b, (rows, size))]
        if shape == tiles and shape not in (whole, outputs, inputs) and other:
            what = f"has a scale per block of {other[0]!r:.50}; only [{_TILE}, {_TILE}] is read."
            raise wrong(suffix, what, "Decode it with the program that made it, and quantize that.")
        meant = config.get("weight_scale_semantics", "")
        if suffix.endswith("_inv") and meant not in ("", "inverse"):
            raise wrong(suffix, f"is of weight_scale_semantics={meant!r:.50}, which is unknown; 'inverse' is read.")
        # The first axis may come in pieces.
        numbers = {"codes": codes, "scale": suffix, "shape": (-1, *shape[1:]), "kind": _FP8[stored.dtype.name]}
        return {**numbers, "inverse": suffix.endswith("_inv") and meant == "inverse"}

    needs = {codes: tuple(_FP8), suffix: (*FLOATS, _E8M0[1])}
    return Scheme("fp8", "fp8", needs, plan, _make_fp8, ndim=0, leaf=codes if leaf is None else leaf)


def _stated_blocks(config: Config) -> list[Any]:
    """How many (out, in) share a scale, where the configuration says that."""
    groups = [group.get("block_structure") for group in weight_groups(config)]
    return [block for block in (config.get("weight_block_size"), *groups) if block is not None]


def _as_tiles(block: Any, shape: tuple[int, int]) -> bool:
    """Do blocks of this size cut a matrix as tiles do?"""
    sizes = block.split("x") if isinstance(block, str) else block  # older compressed-tensors: "128x128"
    if not isinstance(sizes, (list, tuple)) or len(sizes) != 2 or not all(str(n).isdigit() and int(n) for n in sizes):
        return False
    pairs = zip(map(int, sizes), shape, strict=True)
    return all(n == _TILE or size <= min(n, _TILE) for n, size in pairs)


def _make_fp8(
    arrays: Any, *, codes: str, scale: str, kind: str, shape: tuple[int, ...], inverse: bool, dtype: str
) -> Any:
    factor = arrays[scale].reshape(shape)
    factor = 1 / factor.astype(jnp.float32) if inverse else factor  # what GPTQModel multiplied by before it rounded
    return ArrayFloat.from_codes(arrays[codes], factor, kind=kind, axis=-1, dtype=dtype)


# -- blocks with a scale each ------------------------------------------------------------------------------------------


def in_blocks(
    method: str, kind: str, codes: str, dtype: str, scales: str, of: tuple[str, ...], whole: str = "", ndim: int = 0
) -> Scheme:
    """A row for codes in words or bytes, `(..., in)`, with scales `(..., in / block)`; stacks may end in `in, out`."""
    bits, block = _BLOCKS[kind]
    is_word = dtype == "uint32"

    def count(stored: Entry, axis: int = -1) -> int:
        return -(-stored.shape[axis] * 8 * stored.dtype.itemsize // bits // block)

    def fits(parts: Parts) -> bool:
        """Where dtypes do not tell the kinds apart, the number of scales does."""
        return dtype in ("uint8", "int8") or parts[scales].shape[-1:] == (count(parts[codes]),)

    def plan(parts: Parts, config: Config, read: Read) -> dict[str, Any]:
        stored, lead = parts[codes], parts[codes].shape[:-2]
        turned = bool(lead) and parts[scales].shape == (*lead, count(stored, -2), stored.shape[-1])
        if not turned:
            expect(parts, scales, (*stored.shape[:-1], count(stored)), f"{kind} of {text_of(stored)}")
        if whole and parts[whole].shape not in ((), (1,), lead, (*lead, 1), (*lead, 1, 1)):
            raise wrong(whole, f"is {text_of(parts[whole])}, but {kind} has one number per tensor.")
        if "mx_int" in str(config.get("data_type")):  # MXINT4 of AutoRound has the same tensors
            what = f"is {text_of(stored)} of data_type={config['data_type']!r:.50}, integers with scales of blocks"
            raise wrong(codes, f"{what}; {kind} is read.", "Take the dense checkpoint and quantize that.")
        if is_word and config.get("mode", kind) != kind:
            raise wrong(scales, f"belongs to mode={kind!r}, but the quantization config says {config['mode']!r:.50}.")
        return {"codes": codes, "scales": scales, "whole": whole, "kind": kind, "turned": turned}

    needs = {codes: (dtype,), scales: of, **({whole: FLOATS} if whole else {})}
    return Scheme(
        f"{method} {kind}", method, needs, plan, _make_blocks, ndim=ndim, fits=fits, leaf="" if not codes else ".weight"
    )


def _make_blocks(arrays: Any, *, codes: str, scales: str, whole: str, kind: str, turned: bool, dtype: str) -> Any:
    fields, scale, tensor_scale = arrays[codes], arrays[scales], None
    if turned:
        fields, scale = fields.mT, scale.mT
    if fields.dtype.itemsize > 1 or _BLOCKS[kind][0] < 8:
        fields = layouts.word_fields(fields, _BLOCKS[kind][0])
    if kind == "nvfp4" and scale.dtype == jnp.uint8:
        scale = lax.bitcast_convert_type(scale, jnp.float8_e4m3fn)
    if whole:
        # One number, or one for each matrix of a stack.
        count, lead = arrays[whole].size, scale.shape[:-2]
        tensor_scale = arrays[whole].astype(jnp.float32).reshape((*lead, 1, 1) if count > 1 else ())
        # compressed-tensors stores what values were multiplied by before they were rounded.
        tensor_scale = 1 / tensor_scale if whole == ".weight_global_scale" else tensor_scale
    made: Any = ArrayFloat.from_codes(fields, scale, kind=kind, tensor_scale=tensor_scale, axis=-1, dtype=dtype)
    return made.mT if turned else made


def mxfp4_experts(blocks: str, scales: str) -> Scheme:
    """A row for gpt-oss: blocks `(experts, out, in / 32, 16)`."""

    def plan(parts: Parts, config: Config, read: Read) -> dict[str, Any]:
        shape = parts[blocks].shape
        if shape[-1] != 16:
            raise wrong(blocks, f"is {text_of(parts[blocks])}, but a block of MXFP4 has 16 bytes.")
        expect(parts, scales, shape[:-1], "one exponent per block")
        return {"blocks": blocks, "scales": scales}

    needs = {blocks: ("uint8",), scales: _E8M0}
    return Scheme("mxfp4 experts", "mxfp4", needs, plan, _make_mxfp4_experts, ndim=4, leaf="")


def _make_mxfp4_experts(arrays: Any, *, blocks: str, scales: str, dtype: str) -> Any:
    """Experts come out as (experts, in, out), as the model multiplies them, with blocks along `in`."""
    packed = arrays[blocks]
    codes = layouts.word_fields(packed, 4).reshape(*packed.shape[:2], -1)
    made: Any = ArrayFloat.from_codes(codes, arrays[scales], kind="mxfp4", axis=-1, dtype=dtype)
    return made.mT


_CT, _PACKED, _SCALE, _E4M3 = "compressed-tensors", ".weight_packed", ".weight_scale", ("float8_e4m3fn",)
# Of DeepSeek and compressed-tensors; of Mistral, ComfyUI and DeepSeek in files of their own. Values are code * scale.
_FP8_SCALES = (".weight_scale_inv", _SCALE, ".qscale_weight", ".scale_weight", ".scale")
SCHEMES = (
    in_blocks(_CT, "mxfp8", ".weight", "float8_e4m3fn", _SCALE, _E8M0),
    *(fp8(".weight", scale) for scale in _FP8_SCALES),
    *(fp8("", scale) for scale in ("_scale_inv", "_scale")),  # experts in one tensor
    fp8("._weight_qdata", "._weight_scale", ".weight"),  # of torchao
    in_blocks(_CT, "mxfp4", _PACKED, "uint8", _SCALE, _E8M0),
    in_blocks(_CT, "nvfp4", _PACKED, "uint8", _SCALE, _E4M3, ".weight_global_scale"),
    in_blocks("modelopt", "nvfp4", ".weight", "uint8", _SCALE, _E4M3, ".weight_scale_2"),
    in_blocks("modelopt", "nvfp4", "", "uint8", "_weight_scale", _E4M3, "_weight_scale_2", ndim=3),
    in_blocks("quark", "mxfp4", ".weight", "uint8", _SCALE, _E8M0),
    in_blocks("fp8", "mxfp4", ".weight", "int8", ".scale", _E8M0[1:]),  # experts of DeepSeek-V4
    *(in_blocks("mlx", kind, ".weight", "uint32", ".scales", ("uint8",)) for kind in _BLOCKS),
    *(mxfp4_experts(f"{dot}blocks", f"{dot}scales") for dot in "_."),
)
