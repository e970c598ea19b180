"""The header of a GGUF file (versions 2 and 3): metadata of typed values, and where each tensor lies.

All numbers are little-endian. As everywhere here, no number is used before it was checked against the size of the file.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

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
    24: BlockType("I8", 1, 1, "int8"),
    25: BlockType("I16", 1, 2, "int16"),
    26: BlockType("I32", 1, 4, "int32"),
    27: BlockType("I64", 1, 8, "int64"),
    28: BlockType("F64", 1, 8, "float64"),
    30: BlockType("BF16", 1, 2, "bfloat16"),
}


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """One tensor: its shape, slowest axis first, how it is stored, and its bytes in the file."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    start: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class GgufHeader:
    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def parse_gguf(data: Any, file: Any) -> GgufHeader:
    """Read and check a header; `data` is the whole file, or a map of it."""
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
    return GgufHeader(version, metadata, _placed(entries, first, cursor.size, alignment, file))


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
        known = ", ".join(t.name for t in TYPES.values())
        raise CheckpointError(f"is of the ggml type {code}; supported are {known}.", file=file, tensor=name)
    kind = TYPES[code]
    if math.prod(n for n in shape if n) > 1 << 60 or (shape[-1] if shape else 1) % kind.values:
        what = f"has the shape {list(shape)}, but {kind.name} holds rows of whole blocks of {kind.values} values."
        raise CheckpointError(what, file=file, tensor=name)
    return name, shape, kind, offset


def _placed(entries: Any, first: int, size: int, alignment: int, file: Any) -> dict[str, GgufTensor]:
    """The tensors, once their places are known to lie in the file, to be aligned and not to overlap."""
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in entries:
        nbytes = math.prod(shape) // kind.values * kind.nbytes
        start = first + offset
        if name in tensors:
            raise CheckpointError("appears twice.", file=file, tensor=name)
        if offset % alignment or start + nbytes > size:
            what = f"lies at bytes {start:,} to {start + nbytes:,} of a file of {size:,}, alignment {alignment}."
            raise CheckpointError(what, file=file, tensor=name, fix=_DAMAGED)
        tensors[name] = GgufTensor(name, shape, kind, start, nbytes)
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
