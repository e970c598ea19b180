"""GGUF files made by hand: the smallest writer that can make every kind of file the reader should take."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

# type: code, values in a block, bytes of a block
BLOCKS = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34), "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210), "Q8_K": (15, 256, 292), "I8": (24, 1, 1), "I64": (27, 1, 8),
    "F64": (28, 1, 8), "BF16": (30, 1, 2), "IQ4_NL": (20, 32, 18), "MXFP4": (39, 32, 17), "IQ4_XS": (23, 256, 136),
    "TQ1_0": (34, 256, 54), "TQ2_0": (35, 256, 66),
}  # fmt: skip
SCALARS = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "?": 7, "u8": 10, "i8": 11, "f8": 12}
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "tiny",
    "llama.block_count": np.uint32(2),
    "llama.eps": np.float32(1e-5),
    "tokenizer.ggml.tokens": ["<s>", "é", "", "word"],
    "tokenizer.ggml.scores": np.arange(4, dtype=np.float32),
    "flags": np.array([True, False]),
    "nested": [[np.int8(-3), np.int8(4)], []],
    "yes": np.bool_(True),
    "big": np.uint64(2**63),
}


def string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any, typed: bool = True) -> bytes:
    """A metadata value, with its type in front."""
    if isinstance(item, (str, bytes)):
        code, body = 8, string(item)
    elif isinstance(item, np.generic):
        code, body = SCALARS[item.dtype.str.lstrip("<|").replace("b1", "?")], item.tobytes()
    else:
        inner = [value(i) for i in item] or [struct.pack("<I", 0)]
        body = inner[0][:4] + struct.pack("<Q", len(item)) + b"".join(i[4:] for i in inner if len(item))
        code = 9
    return (struct.pack("<I", code) if typed else b"") + body


def storage(kind: str, count: int, rng: np.random.Generator) -> bytes:
    """Random blocks for `count` values, with finite scales."""
    _, values, nbytes = BLOCKS[kind]
    raw = rng.integers(0, 256, (count // values, nbytes), dtype=np.uint8)
    if values > 1:  # wherever a scale may be: the exponent of an f16 is never all ones
        raw[:, 1::2] &= 0xBF
    if kind in ("F32", "F16", "F64"):
        return rng.standard_normal(count).astype(f"<f{nbytes}").tobytes()
    if kind == "MXFP4":
        raw[:, 0] = 100 + raw[:, 0] % 50  # exponents of numbers that are normal in f32
    if kind == "BF16":
        raw[:, 1] &= 0xBF
    return raw.tobytes()


def gguf_bytes(
    tensors: dict[str, tuple[str, tuple[int, ...]]] | None = None,
    metadata: dict[str, Any] | None = None,
    version: int = 3,
    alignment: int | None = None,
    seed: int = 0,
) -> bytes:
    """A file with these tensors (name to type and shape, slowest axis first) and random values."""
    rng = np.random.default_rng(seed)
    tensors = tensors if tensors is not None else {f"t.{kind}": (kind, (2, 256)) for kind in BLOCKS}
    pairs = {**METADATA, **(metadata or {})}
    if alignment is not None:
        pairs["general.alignment"] = np.uint32(alignment)
    step = alignment or 32
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs))
    head += b"".join(string(key) + value(item) for key, item in pairs.items())
    data = b""
    for name, (kind, shape) in tensors.items():
        data += b"\0" * (-len(data) % step)
        head += string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        head += struct.pack("<IQ", BLOCKS[kind][0], len(data))
        data += storage(kind, int(np.prod(shape)), rng)
    return head + b"\0" * (-len(head) % step) + data
