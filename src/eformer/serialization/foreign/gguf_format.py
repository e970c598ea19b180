"""The format of GGUF files (versions 2 and 3): metadata of typed values, where each tensor lies, and its block types.

All numbers are little-endian. As everywhere here, no number is used before it was checked against the size of the file.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from eformer._kernels.formats import FP4_CODEBOOK, IQ4_NL_CODEBOOK
from eformer.errors import CheckpointError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_STRING = 1 << 26
_MAX_NAME = 1 << 16
_MAX_RANK = 8
_MAX_NESTING = 4
_DEFAULT_ALIGNMENT = 32
_DAMAGED = "The file is truncated or damaged; fetch it again."

_SCALARS: dict[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class BlockType:
    """How ggml stores values: so many of them in so many bytes."""

    name: str
    values: int
    nbytes: int
    dtype: str | None = None  # of types that are plain arrays


TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4, "float32"),
    1: BlockType("F16", 1, 2, "float16"),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    15: BlockType("Q8_K", 256, 292),
    20: BlockType("IQ4_NL", 32, 18),
    23: BlockType("IQ4_XS", 256, 136),
    24: BlockType("I8", 1, 1, "int8"),
    25: BlockType("I16", 1, 2, "int16"),
    26: BlockType("I32", 1, 4, "int32"),
    27: BlockType("I64", 1, 8, "int64"),
    28: BlockType("F64", 1, 8, "float64"),
    30: BlockType("BF16", 1, 2, "bfloat16"),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
}
# Those of which only the size is known: they are listed, and not read.
_LISTED = {
    16: ("IQ2_XXS", 66), 17: ("IQ2_XS", 74), 18: ("IQ3_XXS", 98), 19: ("IQ1_S", 50), 21: ("IQ3_S", 110),
    22: ("IQ2_S", 82), 29: ("IQ1_M", 56),
}  # fmt: skip
TYPES |= {code: BlockType(name, 256, nbytes) for code, (name, nbytes) in _LISTED.items()}
TYPES |= {40: BlockType("NVFP4", 64, 36), 41: BlockType("Q1_0", 128, 18)}


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """One tensor: its shape, slowest axis first, how it is stored, and its bytes in the file, or in a map of it."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    start: int
    nbytes: int
    data: Any = dataclasses.field(repr=False, compare=False)


def not_read(kind: Any, file: Any, tensor: str) -> CheckpointError:
    """The error about a tensor of a type that is not read."""
    known = ", ".join(t.name for t in TYPES.values() if t.dtype or t.name in DECODERS)
    fix = "Make the file again in one of these: llama-quantize --allow-requantize OLD.gguf NEW.gguf Q4_K_M"
    return CheckpointError(f"is of the ggml type {kind}; supported are {known}.", file=file, tensor=tensor, fix=fix)


def parse_gguf(data: Any, file: Any) -> tuple[int, dict[str, Any], dict[str, GgufTensor]]:
    """Read and check a header: version, metadata and tensors; `data` is the whole file, or a map of it."""
    cursor = _Cursor(data, file)
    if cursor.take(4) != MAGIC:
        raise CheckpointError("is not a GGUF file: it does not begin with GGUF.", file=file)
    version = cursor.number("<I")
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
        what = "is a big-endian GGUF file" if swapped else f"is of GGUF version {version}"
        raise CheckpointError(f"{what}; versions 2 and 3 in little-endian are supported.", file=file)
    tensors, pairs = cursor.number("<Q"), cursor.number("<Q")
    cursor.expect(24 * tensors + 12 * pairs, f"{tensors:,} tensors and {pairs:,} pairs of metadata")
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = cursor.string(_MAX_NAME)
        if key in metadata:
            raise CheckpointError(f"has the metadata {key!r:.100} twice.", file=file)
        metadata[key] = cursor.value(cursor.number("<I"))
    entries = [_tensor_entry(cursor, file) for _ in range(tensors)]
    alignment = _alignment(metadata, file)
    first = cursor.position + -cursor.position % alignment
    return version, metadata, _placed(entries, first, data, alignment, file)


def _alignment(metadata: Mapping[str, Any], file: Any) -> int:
    found = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(found) is not int or not 8 <= found <= 1 << 20 or found % 8:
        raise CheckpointError(f"has general.alignment {found!r:.100}, not a multiple of 8 up to 2**20.", file=file)
    return found


def _tensor_entry(cursor: _Cursor, file: Any) -> tuple[str, tuple[int, ...], BlockType, int]:
    name = cursor.string(_MAX_NAME)
    rank = cursor.number("<I")
    if rank > _MAX_RANK:
        raise CheckpointError(f"claims {rank:,} axes.", file=file, tensor=name, fix=_DAMAGED)
    shape = tuple(cursor.number("<Q") for _ in range(rank))[::-1]
    code = cursor.number("<I")
    offset = cursor.number("<Q")
    if code not in TYPES:
        raise not_read(code, file, name)
    kind = TYPES[code]
    if math.prod(n for n in shape if n) > 1 << 60 or (shape[-1] if shape else 1) % kind.values:
        what = f"has the shape {list(shape)}, but {kind.name} holds rows of whole blocks of {kind.values} values."
        raise CheckpointError(what, file=file, tensor=name)
    return name, shape, kind, offset


def _placed(entries: Any, first: int, data: Any, alignment: int, file: Any) -> dict[str, GgufTensor]:
    """The tensors, once their places are known to lie in the file, to be aligned and not to overlap."""
    tensors: dict[str, GgufTensor] = {}
    size = len(data)
    for name, shape, kind, offset in entries:
        nbytes = math.prod(shape) // kind.values * kind.nbytes
        start = first + offset
        if name in tensors:
            raise CheckpointError("appears twice.", file=file, tensor=name)
        if offset % alignment or start + nbytes > size:
            what = f"lies at bytes {start:,} to {start + nbytes:,} of a file of {size:,}, alignment {alignment}."
            raise CheckpointError(what, file=file, tensor=name, fix=_DAMAGED)
        tensors[name] = GgufTensor(name, shape, kind, start, nbytes, data)
    end = 0
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.nbytes)):
        if tensor.start < end:
            raise CheckpointError("overlaps the tensor before it.", file=file, tensor=tensor.name, fix=_DAMAGED)
        end = tensor.start + tensor.nbytes
    return tensors


class _Cursor:
    """Reads one thing after the other, and nothing beyond the end."""

    def __init__(self, data: Any, file: Any):
        self.data, self.file, self.size, self.position = data, file, len(data), 0

    def expect(self, nbytes: int, what: str) -> None:
        if nbytes > self.size - self.position:
            claim = f"claims {what} at byte {self.position:,}, but has {self.size:,} bytes."
            raise CheckpointError(claim, file=self.file, fix=_DAMAGED)

    def take(self, nbytes: int) -> bytes:
        self.expect(nbytes, f"{nbytes:,} bytes")
        found = bytes(self.data[self.position : self.position + nbytes])
        self.position += nbytes
        return found

    def number(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self, limit: int = _MAX_STRING) -> str:
        length = self.number("<Q")
        if length > limit:
            raise CheckpointError(f"claims a string of {length:,} bytes.", file=self.file, fix=_DAMAGED)
        # Tokens may be any bytes: those that are not UTF-8 survive the round trip.
        return self.take(length).decode("utf-8", "surrogateescape")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._numbers(kind, 1)[0].item()
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth >= _MAX_NESTING:
            raise CheckpointError(
                f"has metadata of the type {kind}, nested {depth} deep.", file=self.file, fix=_DAMAGED
            )
        inner, count = self.number("<I"), self.number("<Q")
        if inner in _SCALARS:
            return self._numbers(inner, count)
        self.expect(8 * count, f"an array of {count:,} entries")
        if inner == _STRING:
            return self._strings(count)
        return [self.value(inner, depth + 1) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """`string`, many times: a vocabulary has a hundred thousand."""
        data, size, position, found = self.data, self.size, self.position, []
        for _ in range(count):
            begin = position + 8
            position = begin + int.from_bytes(data[begin - 8 : begin], "little")
            if position > size or begin > size:
                self.position = begin - 8
                self.expect(size + 1, "a string beyond the end")
            found.append(data[begin:position].decode("utf-8", "surrogateescape"))
        self.position = position
        return found

    def _numbers(self, kind: int, count: int) -> np.ndarray:
        dtype = np.dtype(_SCALARS[kind])
        raw = self.take(count * dtype.itemsize)
        return np.frombuffer(raw, np.uint8) != 0 if dtype == np.bool_ else np.frombuffer(raw, dtype)


# -- decoding ----------------------------------------------------------------------------------------------------------
# Each function takes the bytes of blocks, uint8 `(blocks, bytes)`, and returns f32 `(blocks, values)`. No product or
# sum here rounds but once.


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


def iq4_nl(raw: np.ndarray) -> np.ndarray:
    return IQ4_NL_CODEBOOK[_nibbles(raw[:, 2:])] * _half(raw, 0)


def mxfp4(raw: np.ndarray) -> np.ndarray:
    exponent = raw[:, :1].astype(np.int32) - 127
    scale = np.where(exponent == 128, np.float32(np.nan), np.ldexp(np.float32(1), exponent))
    return FP4_CODEBOOK[_nibbles(raw[:, 1:])] * scale


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


def iq4_xs(raw: np.ndarray) -> np.ndarray:
    """Eight runs of 32 codes of IQ4_NL; a run's scale has its 2 high bits in bytes 2 and 3, its low ones from 4 on."""
    high = _bits(raw[:, 2:4], 2).swapaxes(1, 2).reshape(-1, 8)
    low = _bits(raw[:, 4:8], 4).swapaxes(1, 2).reshape(-1, 8)
    scale = ((low | high << np.uint8(4)).astype(np.float32) - 32) * _half(raw, 0)
    codes = _nibbles(raw[:, 8:].reshape(-1, 8, 16))
    return (IQ4_NL_CODEBOOK[codes] * scale[..., None]).reshape(-1, 256)


# Ternary types: digits 0 to 2 stand for -1 to 1.


def tq1_0(raw: np.ndarray) -> np.ndarray:
    """A byte is 256 / 243 of a fraction of five digits to the base 3; the last four bytes have four."""
    runs = []
    for first, end, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        left = raw[:, None, first:end] * np.array([3**i for i in range(count)], np.uint8)[:, None]  # modulo 256
        runs.append((left.astype(np.uint16) * 3 >> 8).reshape(len(raw), -1))
    return (np.concatenate(runs, axis=-1).astype(np.float32) - 1) * _half(raw, 52)


def tq2_0(raw: np.ndarray) -> np.ndarray:
    codes = _bits(raw[:, :64].reshape(-1, 2, 32), 2).reshape(-1, 256)
    return (codes.astype(np.float32) - 1) * _half(raw, 64)


_DECODERS = (
    q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl, mxfp4, q2_k, q3_k, q4_k, q5_k, q6_k, q8_k, iq4_xs, tq1_0, tq2_0
)  # fmt: skip
DECODERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {decode.__name__.upper(): decode for decode in _DECODERS}
