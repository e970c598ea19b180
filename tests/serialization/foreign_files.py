"""Checkpoints of other programs made by hand, after the equations their documentation gives, and what they decode to.

Written to be read, not to be quick: words are sums of shifted Python integers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

Made = tuple[dict[str, np.ndarray], dict[str, Any], np.ndarray]  # tensors, quantization_config, values of "m.weight"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(row: Any, bits: int) -> list[int]:
    """32-bit words whose bits, lowest first, are those of the codes one after the other."""
    whole = sum(int(code) << (bits * i) for i, code in enumerate(row))
    return [(whole >> (32 * i)) & 0xFFFFFFFF for i in range(-(-len(row) * bits // 32))]


def rows_of_words(codes: np.ndarray, bits: int, dtype: str = "<i4") -> np.ndarray:
    return np.array([words(row, bits) for row in codes], np.uint32).view(dtype)


def whole_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """The same, with as many whole codes in a word as there is room for."""
    room = 32 // bits
    found = [[words(row[i : i + room], bits)[0] for i in range(0, len(row), room)] for row in codes]
    return np.array(found, np.uint32).view("<i4")


def words_of_planes(codes: np.ndarray, bits: int) -> np.ndarray:
    """32 codes in so many words: first one of their lowest 2 or 4 bits, then what is above these."""
    low = 2 if bits == 3 else 4
    found = [
        words([code & (2**low - 1) for code in row[i : i + 32]], low)
        + words([int(code) >> low for code in row[i : i + 32]], bits - low)
        for row in codes
        for i in range(0, len(row), 32)
    ]
    return np.array(found, np.uint32).view("<i4").reshape(len(codes), -1)


def nibbles(codes: np.ndarray) -> np.ndarray:
    """Two codes a byte, the first one low."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def repeated(x: np.ndarray, group: int, size: int, axis: int = -1) -> np.ndarray:
    return np.repeat(x.astype(np.float32), group, axis).take(np.arange(size), axis)


def gptq(
    rng: Any, *, bits: int = 4, group: int = 32, size: int = 96, out: int = 64, v2: bool = False, sym: bool = False,
    act_order: bool = False, config: bool = True, planes: bool = False,
) -> Made:  # fmt: skip
    """`planes`: 'gptq_p', which has zero points as in version 2."""
    groups = -(-size // group)
    codes = rng.integers(0, 2**bits, (size, out), dtype=np.uint8)
    zeros = rng.integers(0, 2**bits, (groups, out), dtype=np.uint8)
    if sym:
        zeros[:] = 2 ** (bits - 1)
    scales = rng.standard_normal((groups, out)).astype(np.float16)
    g_idx = np.arange(size) // group
    if act_order:
        g_idx = rng.permutation(g_idx)
    pack = words_of_planes if planes and bits in (3, 5, 6) else rows_of_words
    below = zeros.astype(int) - 1  # of 0, this borrows from the next one in the word; of 3 bits, each wraps alone
    first = rows_of_words(below % 8, 3) if bits == 3 else whole_words(below, bits)
    tensors = {
        "m.qweight": np.ascontiguousarray(pack(codes.T, bits).T),
        "m.qzeros": pack(zeros, bits) if v2 or planes else first,
        "m.scales": scales,
        "m.g_idx": g_idx.astype(np.int32),
        "m.bias": np.ones(out, np.float16),
    }
    stated = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": act_order}
    stated |= {"checkpoint_format": "gptq_p" if planes else "gptq_v2"} if v2 or planes else {}
    values = (codes.astype(np.float32) - zeros[g_idx].astype(np.float32)) * scales[g_idx].astype(np.float32)
    return tensors, stated if config else {}, values.T.astype(np.float16)


def awq(rng: Any, *, group: int = 32, out: int = 48, config: bool = True) -> Made:
    size = 64
    codes = rng.integers(0, 16, (size, out), dtype=np.uint8)
    zeros = rng.integers(0, 16, (size // group, out), dtype=np.uint8)
    scales = rng.standard_normal((size // group, out)).astype(np.float16)

    def packed(x: np.ndarray) -> np.ndarray:
        return rows_of_words(x.reshape(-1, 8)[:, AWQ_ORDER], 4).reshape(len(x), -1)

    tensors = {"m.qweight": packed(codes), "m.qzeros": packed(zeros), "m.scales": scales}
    stated = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    values = (codes.astype(np.float32) - repeated(zeros, group, size, 0)) * repeated(scales, group, size, 0)
    return tensors, stated if config else {}, values.T.astype(np.float16)


def mlx(rng: Any, *, bits: int = 4, group: int = 64, out: int = 6, lead: tuple[int, ...] = ()) -> Made:
    size = 2 * group
    codes = rng.integers(0, 2**bits, (*lead, out, size), dtype=np.uint8)
    scales, biases = (rng.standard_normal((*lead, out, 2)).astype(ml_dtypes.bfloat16) for _ in range(2))
    packed = rows_of_words(codes.reshape(-1, size), bits, "<u4").reshape(*lead, out, -1)
    tensors = {"m.weight": packed, "m.scales": scales, "m.biases": biases}
    stated = {"group_size": 64, "bits": 4, "m": {"group_size": group, "bits": bits}}
    values = codes.astype(np.float32) * repeated(scales, group, size) + repeated(biases, group, size)
    return tensors, stated, values.astype(ml_dtypes.bfloat16)


def exponents(rng: Any, *shape: int) -> np.ndarray:
    return rng.integers(120, 134, shape, dtype=np.uint8)


def in_blocks(kind: str) -> Callable[..., Made]:
    """MXFP4 and MXFP8 with e8m0 scales, NVFP4 with e4m3 ones; as MLX, compressed-tensors and others name them."""

    def make(rng: Any, *, by: str, out: int = 6) -> Made:
        size, block = 96, 16 if kind == "nvfp4" else 32
        if kind == "mxfp8":
            codes = rng.standard_normal((out, size)).astype(ml_dtypes.float8_e4m3fn)
            elements, raw = codes.astype(np.float32), codes.view(np.uint8)
        else:
            codes = rng.integers(0, 16, (out, size), dtype=np.uint8)
            elements, raw = E2M1[codes], nibbles(codes)
        if kind == "nvfp4":
            scale = np.abs(rng.standard_normal((out, size // block))).astype(ml_dtypes.float8_e4m3fn)
            factor, stored = scale.astype(np.float32), scale.view(np.uint8) if by == "mlx" else scale
        else:
            stored = exponents(rng, out, size // block)
            factor = np.exp2(stored.astype(np.float32) - 127)
        values = elements * repeated(factor, block, size)
        if by == "mlx":
            return (
                {"m.weight": raw.view("<u4"), "m.scales": stored},
                {"mode": kind, "bits": 4, "group_size": block},
                values,
            )
        names = {"mxfp8": "m.weight"}.get(kind, "m.weight_packed" if by == "compressed-tensors" else "m.weight")
        tensors = {names: codes if kind == "mxfp8" else raw, "m.weight_scale": stored}
        if kind == "nvfp4":
            whole = np.float32(4 if by == "compressed-tensors" else 0.25)  # a power of two: 1 / whole is exact
            tensors["m.weight_global_scale" if by == "compressed-tensors" else "m.weight_scale_2"] = np.array([whole])
            values = elements * repeated(factor * np.float32(0.25), block, size)
        return tensors, {"quant_method": by}, values

    return make


def pack_quantized(
    rng: Any, *, bits: int = 4, group: int = 32, size: int = 96, out: int = 10, zeros: bool = False,
    crossing: bool = True, act_order: bool = False, old: bool = False, tensor: bool = False,
) -> Made:  # fmt: skip
    """`old`: as the first versions did, with zero points in a byte each, and -1 for rows that are in order.

    `tensor`: one scale and one zero point, which is a byte in all versions."""
    groups = -(-size // group)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    codes = rng.integers(low, high, (out, size))
    points = rng.integers(low, high, (out, groups)) if zeros else np.zeros((out, groups), int)
    scales = rng.standard_normal((out, groups)).astype(ml_dtypes.bfloat16)
    pack = rows_of_words if crossing else whole_words
    tensors = {
        "m.weight_packed": pack(codes + high, bits),
        "m.weight_scale": scales,
        "m.weight_shape": np.array([out, size], np.int64),
    }
    if zeros:
        tensors["m.weight_zero_point"] = np.ascontiguousarray(pack(points.T + high, bits).T)
    if old:
        tensors |= {"m.weight_zero_point": points.astype(np.int8), "m.weight_g_idx": np.full(size, -1, np.int32)}
    g_idx = np.arange(size) // group
    if act_order:
        g_idx = rng.permutation(g_idx)
        tensors["m.weight_g_idx"] = g_idx.astype(np.int32)
    weights = {"num_bits": bits, "type": "int", "symmetric": not zeros, "strategy": "group", "group_size": group}
    weights |= {"actorder": "group"} if act_order else {}
    if tensor:
        scales, points = scales[:1, :1], points[:1, :1]
        g_idx = np.zeros(size, int)
        tensors |= {"m.weight_scale": scales.reshape(1), "m.weight_zero_point": points.reshape(1).astype(np.int8)}
        weights = {"num_bits": bits, "type": "int", "symmetric": False, "strategy": "tensor"}
    stated = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"a": {"weights": weights}},
    }
    values = (codes - points[:, g_idx]).astype(np.float32) * scales[:, g_idx].astype(np.float32)
    return tensors, stated, values.astype(ml_dtypes.bfloat16)


def int_quantized(rng: Any, *, zeros: bool = False, groups: int = 1, act_order: bool = False) -> Made:
    codes = rng.integers(-128, 128, (6, 64), dtype=np.int8)
    scale = np.abs(rng.standard_normal((6, groups))).astype(np.float32)
    points = rng.integers(-128, 128, (6, groups), dtype=np.int8) if zeros else np.zeros((6, groups), np.int8)
    tensors = {"m.weight": codes, "m.weight_scale": scale, **({"m.weight_zero_point": points} if zeros else {})}
    g_idx = np.arange(64) // (64 // groups)
    if act_order:
        g_idx = rng.permutation(g_idx)
        tensors["m.weight_g_idx"] = g_idx.astype(np.int32)
    values = (codes - points.astype(np.float32)[:, g_idx]) * scale[:, g_idx]
    return tensors, {"quant_method": "compressed-tensors"}, values


def llm_int8(rng: Any) -> Made:
    codes, largest = rng.integers(-127, 128, (6, 64), dtype=np.int8), np.abs(rng.standard_normal(6)).astype(np.float32)
    values = codes * (largest / np.float32(127))[:, None]
    return {"m.weight": codes, "m.SCB": largest, "m.weight_format": np.zeros(1, np.uint8)}, {}, values


def fp8(
    rng: Any, *, name: str = "weight_scale_inv", scale: tuple[int, ...] = (2, 3), out: int = 200, e5m2: bool = False,
    e8m0: bool = False, inverse: bool = False,
) -> Made:  # fmt: skip
    """`inverse`: as GPTQModel stores it, what values were multiplied by before they were rounded."""
    codes = rng.standard_normal((out, 300)).astype(ml_dtypes.float8_e5m2 if e5m2 else ml_dtypes.float8_e4m3fn)
    scales = np.asarray(np.abs(rng.standard_normal(scale)), np.float32)
    stored = scales.astype(ml_dtypes.float8_e8m0fnu) if e8m0 else scales
    scales = 1 / stored.astype(np.float32) if inverse else stored.astype(np.float32)
    spread = scales.reshape(-1, 1) if scales.ndim < 2 else scales
    if spread.shape[1:] == (3,):
        spread = repeated(repeated(spread, 128, 300), 128, out, 0)
    stated = {"quant_method": "fp8", **({"weight_scale_semantics": "inverse"} if inverse else {})}
    return {"m.weight": codes, f"m.{name}": stored}, stated, codes.astype(np.float32) * spread


def mxfp4_experts(rng: Any) -> Made:
    """Experts of gpt-oss, (experts, out, in / 32, 16); the array is (experts, in, out) and has no suffix."""
    codes, scales = rng.integers(0, 16, (3, 8, 2, 32), dtype=np.uint8), exponents(rng, 3, 8, 2)
    values = E2M1[codes] * np.exp2(scales.astype(np.float32) - 127)[..., None]
    tensors = {"m.weight_blocks": nibbles(codes), "m.weight_scales": scales}
    return tensors, {"quant_method": "mxfp4"}, np.swapaxes(values.reshape(3, 8, 64), 1, 2)


def written(folder: Path, made: Made, **model: Any) -> Path:
    """A folder with the tensors and a `config.json`."""
    folder.mkdir(exist_ok=True)
    tensors, stated, _ = made
    safetensors.numpy.save_file({**tensors, "norm.weight": np.ones(4, np.float32)}, folder / "model.safetensors")
    if stated:
        key = "quantization_config" if "quant_method" in stated else "quantization"
        (folder / "config.json").write_text(json.dumps({"model_type": "any", **model, key: stated}))
    return folder
