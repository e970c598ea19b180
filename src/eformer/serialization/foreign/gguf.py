"""GGUF files: their metadata, and their tensors as arrays of JAX, without requantizing."""

from __future__ import annotations

import functools
import math
import mmap
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eformer._formats.floating.array import ArrayFloat
from eformer._formats.integer.array import ArrayInt
from eformer.errors import CheckpointError

from ..checkpoint.index import find_checkpoint
from ..safetensors.header import fits_jax
from ..safetensors.reading import aligned_empty, let_go, open_regular
from . import layouts
from .gguf_format import DECODERS, MAGIC, GgufTensor, not_read, parse_gguf

_CHUNK = 1 << 18  # values decoded at a time: temporaries stay in the cache
_COPIED = 1 << 22  # bytes copied at a time
_PIECES = 16  # that a large tensor is arranged in
_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")

# Types that stay packed: what holds them exactly, and bytes in front of the codes.
PACKED: dict[str, tuple[str, int]] = {
    "Q4_0": ("int4", 2),
    "Q4_1": ("int4", 4),
    "Q8_0": ("int8", 2),
    "IQ4_NL": ("iq4_nl", 2),
    "MXFP4": ("mxfp4", 1),
}


class GgufFile(Mapping[str, Any]):
    """A GGUF file as a mapping from names to arrays. Opening it reads the header only.

    `metadata` holds the architecture, the tokenizer and so on: numbers, strings, NumPy arrays of numbers, lists of
    strings. Shapes are as in PyTorch, (out, in), with blocks along the last axis.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.version, self.metadata, self.tensors = _parsed(self.path)
        self.paths = _parts(self.path, self.metadata)
        if len(self.paths) > 1:
            self._join()

    def _join(self) -> None:
        """All parts of a model in several files. The first one has the metadata."""
        self.tensors = {}
        for number, path in enumerate(self.paths):
            version, metadata, tensors = _parsed(path)
            if (metadata.get("split.count"), metadata.get("split.no")) != (len(self.paths), number):
                what = f"is not part {number + 1} of {len(self.paths)} of {self.path.name}, as its name says."
                raise CheckpointError(what, file=path, fix="Fetch all files of the model again.")
            if twice := self.tensors.keys() & tensors.keys():
                raise CheckpointError("is in two files.", file=path, tensor=min(twice))
            self.tensors |= tensors
            if not number:
                self.version, self.metadata = version, metadata

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __getitem__(self, name: str) -> Any:
        return self.read(name)

    def __repr__(self) -> str:
        model = self.metadata.get("general.name") or self.metadata.get("general.architecture")
        return f"GgufFile({str(self.path)!r}, {model!r:.60}, {len(self)} tensors)"

    def read(self, name: str, *, dense: bool = False, dtype: Any = None) -> Any:
        """One tensor.

        Args:
            name: as in the file.
            dense: decode every type; otherwise Q4_0, Q4_1, Q8_0, IQ4_NL and MXFP4 stay packed.
            dtype: of values that are decoded, now or later; by default f32, in which all types are exact.
        """
        tensor = self.known(name)
        dtype = jnp.dtype(jnp.float32 if dtype is None else dtype)
        if tensor.type.dtype is not None:
            return self._plain(tensor)
        if not dense and tensor.type.name in PACKED:
            raw = {name: self._copied(tensor, 0, tensor.nbytes).reshape(_blocks_of(tensor))}
            made = jax.block_until_ready(_packed(raw[name], tensor.type.name, dtype))
            let_go(raw)
            return made
        nbytes = math.prod(tensor.shape) * dtype.itemsize
        return jax.device_put(self.decode_into(aligned_empty(nbytes), name, dtype))

    def read_rows(self, name: str) -> Iterator[Any]:
        """A tensor of a type that stays packed in pieces of its first axis, for those who need not hold all of it."""
        tensor, dtype = self.known(name), jnp.dtype(jnp.float32)
        rows, *rest = _blocks_of(tensor)
        count = math.gcd(rows, _PIECES) if len(rest) > 1 else 1
        size = tensor.nbytes // count
        for i in range(count):
            raw = {name: self._copied(tensor, i * size, size).reshape(rows // count, *rest)}
            yield jax.block_until_ready(_packed(raw[name], tensor.type.name, dtype))
            let_go(raw)

    def abstract(self, name: str) -> tuple[Any, dict[int, str]]:
        """What `read` gives of a type that stays packed, with shapes in place of arrays."""
        tensor = self.known(name)
        raw = jax.ShapeDtypeStruct(_blocks_of(tensor), jnp.uint8)
        return jax.eval_shape(lambda raw: _packed(raw, tensor.type.name, jnp.dtype(jnp.float32)), raw), {}

    def decode_into(self, buffer: np.ndarray, name: str, dtype: Any = np.float32) -> np.ndarray:
        """A tensor stored in blocks, decoded in memory of the caller: bytes, at least as many as it takes."""
        tensor = self.known(name)
        size = math.prod(tensor.shape)
        flat = buffer[: size * np.dtype(dtype).itemsize].view(dtype)
        for start, values in self.decoded_chunks(name):
            flat[start : start + values.size] = values
        return flat.reshape(tensor.shape)

    def decoded_chunks(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """Positions and flat f32 values of a tensor stored in blocks, a few at a time."""
        tensor = self.known(name)
        raw = self._bytes(tensor).reshape(-1, tensor.type.nbytes)
        step = _CHUNK // tensor.type.values
        for first in range(0, len(raw), step):
            with np.errstate(all="ignore"):  # a scale may be anything, infinite included
                values = DECODERS[tensor.type.name](raw[first : first + step])
            yield first * tensor.type.values, values.reshape(-1)
        _forget(tensor, 0, tensor.nbytes)

    def known(self, name: str) -> GgufTensor:
        """A tensor that can be read."""
        if name not in self.tensors:
            raise KeyError(f"{name!r} is not in {self.path}, which holds {len(self)} tensors.")
        tensor = self.tensors[name]
        if tensor.type.dtype is None and tensor.type.name not in DECODERS:
            raise not_read(tensor.type.name, self.path, name)
        return tensor

    def _bytes(self, tensor: GgufTensor) -> np.ndarray:
        return np.frombuffer(tensor.data, np.uint8, tensor.nbytes, tensor.start) if tensor.nbytes else np.empty(0, "u1")

    def _copied(self, tensor: GgufTensor, start: int, nbytes: int) -> np.ndarray:
        """So many bytes of a tensor in memory of their own."""
        raw, copy = self._bytes(tensor)[start : start + nbytes], aligned_empty(nbytes)
        for first in range(0, nbytes, _COPIED):
            copy[first : first + _COPIED] = raw[first : first + _COPIED]
            _forget(tensor, start + first, min(_COPIED, nbytes - first))
        return copy

    def plain_view(self, name: str) -> np.ndarray:
        """A tensor that is stored as a plain array, as a view of the file."""
        tensor = self.known(name)
        return self._bytes(tensor).view(jnp.dtype(tensor.type.dtype)).reshape(tensor.shape)

    def _plain(self, tensor: GgufTensor) -> Any:
        view = self.plain_view(tensor.name)
        return jax.device_put(view) if fits_jax(view.dtype) else view


def _forget(tensor: GgufTensor, start: int, nbytes: int) -> None:
    """Pages of the map that were read need not stay in memory; who reads them again gets them again."""
    first = (tensor.start + start) // mmap.PAGESIZE * mmap.PAGESIZE
    if nbytes and hasattr(mmap, "MADV_DONTNEED"):
        tensor.data.madvise(mmap.MADV_DONTNEED, first, tensor.start + start + nbytes - first)


def _blocks_of(tensor: GgufTensor) -> tuple[int, ...]:
    return (*tensor.shape[:-1], tensor.shape[-1] // tensor.type.values, tensor.type.nbytes)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _packed(raw: jax.Array, name: str, dtype: Any) -> Any:
    """Blocks `(..., blocks, bytes)` as an array of the same codes and scales; large ones in pieces of rows.

    Nibbles are a byte each on the way, twice the memory of the file.
    """
    arrange = functools.partial(_arranged, name=name, dtype=dtype)
    count = math.gcd(raw.shape[0], _PIECES) if raw.ndim > 2 and raw.size > _COPIED else 1
    if count == 1:
        return arrange(raw)
    shapes, tree = jax.tree.flatten(jax.eval_shape(arrange, raw))
    rows = raw.shape[0] // count

    def piece(i: jax.Array, made: list[jax.Array]) -> list[jax.Array]:
        parts = jax.tree.leaves(arrange(lax.dynamic_slice_in_dim(raw, i * rows, rows)))
        pairs = zip(made, parts, strict=True)
        return [lax.dynamic_update_slice_in_dim(whole, part, i * rows, 0) for whole, part in pairs]

    made = lax.fori_loop(0, count, piece, [jnp.zeros(shape.shape, shape.dtype) for shape in shapes])
    return jax.tree.unflatten(tree, made)


def _arranged(raw: jax.Array, name: str, dtype: Any) -> Any:
    kind, front = PACKED[name]
    codes = raw[..., front:]
    codes = codes ^ np.uint8(128) if kind == "int8" else layouts.ggml_nibbles(codes)
    codes = codes.reshape(*codes.shape[:-2], codes.shape[-2] * codes.shape[-1])
    if kind == "mxfp4":
        return ArrayFloat.from_codes(codes, raw[..., 0], kind=kind, axis=-1, dtype=dtype)
    pairs = raw[..., :front].reshape(*raw.shape[:-1], front // 2, 2)
    numbers = lax.bitcast_convert_type(pairs, jnp.float16)  # the scale, and the bias if there is one
    scale, bias = numbers[..., 0], numbers[..., 1] if front == 4 else None
    if kind == "iq4_nl":
        return ArrayFloat.from_codes(codes, scale, kind=kind, axis=-1, dtype=dtype)
    return ArrayInt.from_codes(codes, scale, bias=bias, bits=int(kind[-1]), block_size=32, axis=-1, dtype=dtype)


def _parsed(path: Path) -> tuple[int, dict[str, Any], dict[str, GgufTensor]]:
    """The version, the metadata and the tensors of one file."""
    descriptor = open_regular(path)
    try:
        if not os.fstat(descriptor).st_size:
            raise CheckpointError("is empty.", file=path)
        data = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)
    return parse_gguf(data, path)


def _parts(path: Path, metadata: Mapping[str, Any]) -> tuple[Path, ...]:
    """The files of a model, of which this is one."""
    count, match = metadata.get("split.count", 1), _PART.fullmatch(path.name)
    if type(count) is not int or count <= 1:
        return (path,)
    if match is None or int(match[2]) != count:
        what = f"is a part of a model in {count} files, but is not called NAME-00001-of-{count:05d}.gguf or so."
        raise CheckpointError(what, file=path, fix="Give all parts the names they had.")
    paths = tuple(path.with_name(f"{match[1]}-{i:05d}-of-{match[2]}.gguf") for i in range(1, count + 1))
    if lost := [part for part in paths if not part.is_file()]:
        what = f"is a part of a model in {count} files, of which {len(lost)} are missing, such as {lost[0].name}."
        raise CheckpointError(what, file=path, fix="Fetch all files of the model.")
    return paths


def gguf_at(path: str | os.PathLike[str]) -> Path | None:
    """The GGUF file that a path stands for: an ordinary file that begins like one, or the one in a folder."""
    if not os.path.isfile(found := find_checkpoint(Path(path))):
        return None
    with os.fdopen(open_regular(found), "rb") as file:
        return found if file.read(len(MAGIC)) == MAGIC else None


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Open a GGUF file (version 2 or 3), of a model in several any part, without reading its tensors."""
    return GgufFile(path)


def load_gguf(path: str | os.PathLike[str], *, dense: bool = False, dtype: Any = None) -> dict[str, Any]:
    """All tensors of a GGUF file by name; `dense` and `dtype` as for `GgufFile.read`.

    F32, F16, BF16 and integers come as they are; Q4_0, Q4_1, Q8_0, IQ4_NL and MXFP4 as packed arrays of the same codes
    and scales; Q5_0, Q5_1 and the K types are decoded.
    """
    file = open_gguf(path)
    return {name: file.read(name, dense=dense, dtype=dtype) for name in file}
