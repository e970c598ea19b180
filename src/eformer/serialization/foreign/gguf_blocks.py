"""Decoding the block types of ggml, each from rows of bytes to f32 values. No product or sum here rounds but once.

Each function takes uint8 `(blocks, bytes)` and returns f32 `(blocks, values)`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def _half(raw: np.ndarray, at: int) -> np.ndarray:
    """The f16 number at a byte of each block, as f32 `(blocks, 1)`."""
    return np.ascontiguousarray(raw[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(raw: np.ndarray) -> np.ndarray:
    """Low nibbles of all bytes, then high ones, `(..., 2 * bytes)`."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _bits(raw: np.ndarray, width: int) -> np.ndarray:
    """All fields of `width` bits, lowest first, as the second last axis: `(..., 8 // width, bytes)`."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)
    return (raw[..., None, :] >> shifts[:, None]) & np.uint8(2**width - 1)


def _fifth_bit(raw: np.ndarray) -> np.ndarray:
    """Bit i of a 32-bit word, at 16, for value i."""
    return np.unpackbits(raw, axis=-1, bitorder="little") << np.uint8(4)


def q4_0(raw: np.ndarray) -> np.ndarray:
    return (_nibbles(raw[:, 2:]).astype(np.float32) - 8) * _half(raw, 0)


def q4_1(raw: np.ndarray) -> np.ndarray:
    return _nibbles(raw[:, 4:]).astype(np.float32) * _half(raw, 0) + _half(raw, 2)


def q5_0(raw: np.ndarray) -> np.ndarray:
    codes = _nibbles(raw[:, 6:]) | _fifth_bit(raw[:, 2:6])
    return (codes.astype(np.float32) - 16) * _half(raw, 0)


def q5_1(raw: np.ndarray) -> np.ndarray:
    codes = _nibbles(raw[:, 8:]) | _fifth_bit(raw[:, 4:8])
    return codes.astype(np.float32) * _half(raw, 0) + _half(raw, 2)


def q8_0(raw: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(raw[:, 2:]).view(np.int8).astype(np.float32) * _half(raw, 0)


def q8_k(raw: np.ndarray) -> np.ndarray:
    scale = np.ascontiguousarray(raw[:, :4]).view("<f4")
    return np.ascontiguousarray(raw[:, 4:260]).view(np.int8).astype(np.float32) * scale


# The K types: 256 values in 8 or 16 groups, whose scales are themselves 4, 6 or 8 bits wide.


def q2_k(raw: np.ndarray) -> np.ndarray:
    scales, d, minimum = raw[:, :16], _half(raw, 80), _half(raw, 82)
    codes = _bits(raw[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    scale, low = (scales & 15).astype(np.float32) * d, (scales >> 4).astype(np.float32) * minimum
    return (codes.astype(np.float32) * scale[..., None] - low[..., None]).reshape(-1, 256)


def q3_k(raw: np.ndarray) -> np.ndarray:
    high, d = raw[:, :32], _half(raw, 108)
    codes = _bits(raw[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 8, 32).astype(np.int8)
    codes -= np.int8(4) * (1 - _bits(high, 1).astype(np.int8))  # bit i of `high` belongs to run i of 32 values
    low4 = _nibbles(raw[:, 96:104])
    high2 = _bits(raw[:, 104:108], 2).reshape(-1, 16)
    scale = ((low4 | high2 << np.uint8(4)).astype(np.float32) - 32) * d
    return (codes.reshape(-1, 16, 16).astype(np.float32) * scale[..., None]).reshape(-1, 256)


def _six_bit_pairs(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and eight minima of 6 bits in 12 bytes, as f32."""
    first, second, third = raw[:, :4], raw[:, 4:8], raw[:, 8:]
    scale = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    low = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    return scale.astype(np.float32), low.astype(np.float32)


def _scaled_runs(codes: np.ndarray, raw: np.ndarray) -> np.ndarray:
    """Eight runs of 32 codes with a scale and a minimum each; the header of Q4_K and Q5_K is the same."""
    scale, low = _six_bit_pairs(raw[:, 4:16])
    scale, low = scale * _half(raw, 0), low * _half(raw, 2)
    return (codes.astype(np.float32) * scale[..., None] - low[..., None]).reshape(-1, 256)


def q4_k(raw: np.ndarray) -> np.ndarray:
    return _scaled_runs(_nibbles(raw[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32), raw)


def q5_k(raw: np.ndarray) -> np.ndarray:
    codes = _nibbles(raw[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return _scaled_runs(codes | _bits(raw[:, 16:48], 1) << np.uint8(4), raw)


def q6_k(raw: np.ndarray) -> np.ndarray:
    low = _nibbles(raw[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    high = _bits(raw[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 8, 32)
    codes = (low | high << np.uint8(4)).astype(np.float32) - 32
    scale = np.ascontiguousarray(raw[:, 192:208]).view(np.int8).astype(np.float32) * _half(raw, 208)
    return (codes.reshape(-1, 16, 16) * scale[..., None]).reshape(-1, 256)


DECODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "Q8_K": q8_k,
}
