"""The header of a safetensors file: 8 bytes of length, then JSON that says of what dtype and where each tensor is.

Nothing in a file is believed: every number is checked against the size of the file before it is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from eformer.errors import CheckpointError


@contextlib.contextmanager
def about(file: Any, tensor: str | None = None) -> Iterator[None]:
    """Adds the file and the tensor to errors that do not know them."""
    try:
        yield
    except CheckpointError as err:
        if err.file is not None and (err.tensor is not None or tensor is None):
            raise
        located = CheckpointError(err.what, file=err.file or file, tensor=err.tensor or tensor, fix=err.fix)
        raise located from err.__cause__


_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
DTYPES: dict[str, np.dtype] = {code: jnp.dtype(name) for code, name in _NAMES.items()}
CODES: dict[np.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}
# Dtypes JAX knows and the file format does not: stored as bytes, the name kept in the metadata.
_FOREIGN = (
    "complex128", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float4_e2m1fn", "int4", "uint4", "int2", "uint2",
)  # fmt: skip
FOREIGN: dict[str, np.dtype] = {name: jnp.dtype(getattr(jnp, name)) for name in _FOREIGN if hasattr(jnp, name)}


def named_dtype(name: Any) -> np.dtype:
    """The dtype of a name found in metadata; only numeric dtypes have one."""
    if isinstance(name, str):
        if name in FOREIGN:
            return FOREIGN[name]
        if name in _NAMES.values():
            return jnp.dtype(name)
    raise CheckpointError(f"{name!r:.100} is not a dtype; known are {', '.join([*_NAMES.values(), *FOREIGN])}.")


def stored_layout(shape: tuple[int, ...], dtype: np.dtype) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of the tensor that holds such an array: a dtype the format lacks is stored as bytes."""
    native = dtype.newbyteorder("=")
    if native in CODES:
        return shape, native
    if native in FOREIGN.values():
        return (shape if native.itemsize == 1 else (*shape, native.itemsize)), np.dtype(np.uint8)
    allowed = ", ".join([*_NAMES.values(), *FOREIGN])
    raise CheckpointError(f"arrays of dtype {dtype} cannot be saved; allowed are {allowed}.")


def as_stored(array: np.ndarray) -> np.ndarray:
    """`array`, or its bytes, as `stored_layout` says."""
    shape, dtype = stored_layout(array.shape, array.dtype)
    native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    return native.view(dtype).reshape(shape)


def loaded_shape(shape: tuple[int, ...], stored: np.dtype, dtype: np.dtype) -> tuple[int, ...]:
    """The shape of an array of `dtype` held by a tensor of this shape and dtype; the inverse of `stored_layout`."""
    if stored == dtype:
        return shape
    if stored == np.uint8 and dtype in FOREIGN.values():
        if dtype.itemsize == 1:
            return shape
        if shape[-1:] == (dtype.itemsize,):
            return shape[:-1]
    raise CheckpointError(f"storage {stored}{list(shape)} cannot hold values of dtype {dtype}.")


def from_stored(stored: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The inverse of `as_stored`."""
    shape = loaded_shape(stored.shape, stored.dtype, dtype)
    if stored.dtype == dtype:
        return stored
    return np.ascontiguousarray(stored).reshape(-1).view(dtype).reshape(shape)


def fits_jax(dtype: np.dtype) -> bool:
    """Can JAX hold this dtype now? (64-bit types need jax_enable_x64.)"""
    return jax.dtypes.canonicalize_dtype(dtype) == dtype


# The limits of the safetensors library, and of NumPy.
MAX_HEADER = 100_000_000
MAX_RANK = 32
_MAX_ELEMENTS = 1 << 60
TRUNCATED = "The file is truncated or not a safetensors file; fetch it again."
# How files of other kinds begin. As the length of a header each of these is more than MAX_HEADER.
_OTHERS = {
    b"GGUF": ("a GGUF file", "Read it with eformer.load_checkpoint(path)."),
    b"PK\x03\x04": (
        "a zip file, as torch.save and numpy.savez write",
        "eformer.load_checkpoint(path) reads those of torch whose names end in .bin, .pt or .pth.",
    ),
    b"version ": ("a pointer of Git LFS", "Fetch the file itself: git lfs pull"),
    b"<!DOCTYP": ("a web page", "Fetch the file itself."),
}

# JAX on the CPU takes an array without copying it if it begins at a multiple of 64 bytes.
ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor: its dtype and shape, and its bytes [start, stop) counted from the end of the header."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Header:
    """All tensors of a file by name, its metadata, and where the data begins."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    data_start: int


def read_header(descriptor: int, file: Any) -> Header:
    """Read and check the header of an open file."""
    size = os.fstat(descriptor).st_size
    if size < 8:
        raise CheckpointError(f"has {size} bytes, too few for a header.", file=file, fix=TRUNCATED)
    start = os.pread(descriptor, 8, 0)
    length = int.from_bytes(start, "little")
    for magic, (kind, fix) in _OTHERS.items():
        if start.startswith(magic):
            raise CheckpointError(f"is {kind}, not a safetensors file.", file=file, fix=fix)
    if length > MAX_HEADER or 8 + length > size:
        what = f"claims a header of {length:,} bytes, but has {size:,} bytes (allowed: up to {MAX_HEADER:,})."
        raise CheckpointError(what, file=file, fix=TRUNCATED)
    text = bytearray(length)
    read_exactly(descriptor, text, 8, file)
    return parse_header(bytes(text), size - 8 - length, file)


def parse_header(text: bytes, data_size: int, file: Any) -> Header:
    """Check the JSON of a header that is followed by `data_size` bytes of data."""
    table = parse_json(text, file)
    if not isinstance(table, dict):
        kind = "null" if table is None else type(table).__name__
        raise CheckpointError(f"has a header that is not a JSON object but {kind}.", file=file, fix=TRUNCATED)
    metadata = table.pop("__metadata__", {})
    metadata = {} if metadata is None else metadata  # as `mx.save_safetensors` writes it
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError("has __metadata__ that is not a mapping of strings to strings.", file=file)
    entries = {name: _entry(name, fields, data_size, file) for name, fields in table.items()}
    _check_cover(entries, data_size, file)
    return Header(entries, metadata, 8 + len(text))


def parse_json(text: bytes, file: Any) -> Any:
    """Strict JSON: no NaN, no name twice, no nesting beyond what Python can hold."""

    def refuse(constant: str) -> NoReturn:
        raise CheckpointError(f"holds {constant} in its JSON.", file=file)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise CheckpointError("appears twice.", file=file, tensor=name)
            found[name] = value
        return found

    try:
        return json.loads(text.decode("utf-8"), parse_constant=refuse, object_pairs_hook=unique)
    except CheckpointError:
        raise
    except RecursionError as err:
        raise CheckpointError("holds JSON that is nested too deeply.", file=file) from err
    except ValueError as err:  # bad UTF-8, bad JSON, a number of thousands of digits
        raise CheckpointError(f"holds broken JSON: {str(err)[:200]}.", file=file, fix=TRUNCATED) from err


def _entry(name: str, fields: Any, data_size: int, file: Any) -> Entry:
    def wrong(what: str) -> CheckpointError:
        return CheckpointError(what, file=file, tensor=name)

    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= set(fields):
        raise wrong("has no dtype, shape and data_offsets in the header.")
    code, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise wrong(f"has the unknown dtype {code!r:.100}; known are {', '.join(DTYPES)}.")
    dtype = DTYPES[code]
    check_shape(shape, wrong)
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(is_count, offsets))):
        raise wrong(f"has data_offsets {offsets!r:.100}, not two numbers of bytes.")
    start, stop = offsets
    if not start <= stop <= data_size:
        raise wrong(f"lies at bytes {start:,} to {stop:,}, but the file has {data_size:,} bytes of data. {TRUNCATED}")
    needed = math.prod(shape) * dtype.itemsize
    if stop - start != needed:
        raise wrong(f"has {stop - start:,} bytes, but {dtype}{shape} takes {needed:,}.")
    return Entry(name, dtype, tuple(shape), start, stop)


def check_shape(shape: Any, wrong: Any) -> None:
    """Raise unless this is a shape that NumPy can represent."""
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(is_count, shape)):
        raise wrong(f"has the shape {shape!r:.100}, not a list of up to {MAX_RANK} sizes.")
    if math.prod(n for n in shape if n) > _MAX_ELEMENTS:  # an axis of size 0 must not hide the others
        raise wrong(f"has the absurd shape {shape!r:.100}.")


def is_count(value: Any) -> bool:
    """A non-negative integer of at most 63 bits, and no bool."""
    return type(value) is int and 0 <= value < 1 << 63


def _check_cover(entries: Mapping[str, Entry], data_size: int, file: Any) -> None:
    """The tensors must fill the data without overlaps and holes, as the format demands."""
    end = 0
    for entry in sorted(entries.values(), key=lambda e: (e.start, e.stop)):
        if entry.start != end:
            what = "overlaps the tensor before it" if entry.start < end else "leaves a hole before it"
            raise CheckpointError(f"begins at byte {entry.start:,}, which {what}.", file=file, tensor=entry.name)
        end = entry.stop
    if end != data_size:
        what = f"has {data_size:,} bytes of data, but its tensors describe {end:,}."
        raise CheckpointError(what, file=file, fix=TRUNCATED)


def read_exactly(descriptor: int, target: Any, offset: int, file: Any, tensor: str | None = None) -> None:
    """Fill a buffer from a place in a file."""
    view, done = memoryview(target), 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done : done + (1 << 26)]], offset + done)
        if not count:
            raise CheckpointError("ended while it was read.", file=file, tensor=tensor, fix=TRUNCATED)
        done += count
