"""GGUF files: their metadata, and their tensors as arrays of JAX, without requantizing."""

from __future__ import annotations

import functools
import math
import mmap
import os
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

from ..safetensors.header import fits_jax
from ..safetensors.reading import aligned_empty, let_go, open_regular
from . import layouts
from .gguf_format import DECODERS, MAGIC, GgufTensor, parse_gguf

_CHUNK = 1 << 18  # values decoded at a time: temporaries stay in the cache
_COPIED = 1 << 22  # bytes copied at a time
_PIECES = 16  # that a large tensor is arranged in

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
        descriptor = open_regular(path)
        try:
            if not os.fstat(descriptor).st_size:
                raise CheckpointError("is empty.", file=self.path)
            self._map = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        self.version, self.metadata, self.tensors = parse_gguf(self._map, self.path)

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
        tensor = self._known(name)
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
        tensor, dtype = self._known(name), jnp.dtype(jnp.float32)
        rows, *rest = _blocks_of(tensor)
        count = math.gcd(rows, _PIECES) if len(rest) > 1 else 1
        size = tensor.nbytes // count
        for i in range(count):
            raw = {name: self._copied(tensor, i * size, size).reshape(rows // count, *rest)}
            yield jax.block_until_ready(_packed(raw[name], tensor.type.name, dtype))
            let_go(raw)

    def abstract(self, name: str) -> tuple[Any, dict[int, str]]:
        """What `read` gives of a type that stays packed, with shapes in place of arrays."""
        tensor = self._known(name)
        raw = jax.ShapeDtypeStruct(_blocks_of(tensor), jnp.uint8)
        return jax.eval_shape(lambda raw: _packed(raw, tensor.type.name, jnp.dtype(jnp.float32)), raw), {}

    def decode_into(self, buffer: np.ndarray, name: str, dtype: Any = np.float32) -> np.ndarray:
        """A tensor stored in blocks, decoded in memory of the caller: bytes, at least as many as it takes."""
        tensor = self._known(name)
        size = math.prod(tensor.shape)
        flat = buffer[: size * np.dtype(dtype).itemsize].view(dtype)
        for start, values in self.decoded_chunks(name):
            flat[start : start + values.size] = values
        return flat.reshape(tensor.shape)

    def decoded_chunks(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """Positions and flat f32 values of a tensor stored in blocks, a few at a time."""
        tensor = self._known(name)
        raw = self._bytes(tensor).reshape(-1, tensor.type.nbytes)
        step = _CHUNK // tensor.type.values
        for first in range(0, len(raw), step):
            with np.errstate(all="ignore"):  # a scale may be anything, infinite included
                values = DECODERS[tensor.type.name](raw[first : first + step])
            yield first * tensor.type.values, values.reshape(-1)
        self._forget(tensor.start, tensor.nbytes)

    def _known(self, name: str) -> GgufTensor:
        if name not in self.tensors:
            raise KeyError(f"{name!r} is not in {self.path}, which holds {len(self)} tensors.")
        return self.tensors[name]

    def _bytes(self, tensor: GgufTensor) -> np.ndarray:
        return np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.start) if tensor.nbytes else np.empty(0, "u1")

    def _copied(self, tensor: GgufTensor, start: int, nbytes: int) -> np.ndarray:
        """So many bytes of a tensor in memory of their own."""
        raw, copy = self._bytes(tensor)[start : start + nbytes], aligned_empty(nbytes)
        for first in range(0, nbytes, _COPIED):
            copy[first : first + _COPIED] = raw[first : first + _COPIED]
            self._forget(tensor.start + start + first, min(_COPIED, nbytes - first))
        return copy

    def _forget(self, start: int, nbytes: int) -> None:
        """Pages of the map that were read need not stay in memory; who reads them again gets them again."""
        first = start - start % mmap.PAGESIZE
        if nbytes and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, start + nbytes - first)

    def plain_view(self, name: str) -> np.ndarray:
        """A tensor that is stored as a plain array, as a view of the file."""
        tensor = self._known(name)
        return self._bytes(tensor).view(jnp.dtype(tensor.type.dtype)).reshape(tensor.shape)

    def _plain(self, tensor: GgufTensor) -> Any:
        view = self.plain_view(tensor.name)
        return jax.device_put(view) if fits_jax(view.dtype) else view


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


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Is this an ordinary file that begins like a GGUF file?"""
    if not os.path.isfile(path):
        return False
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Open a GGUF file (version 2 or 3) without reading its tensors."""
    return GgufFile(path)


def load_gguf(path: str | os.PathLike[str], *, dense: bool = False, dtype: Any = None) -> dict[str, Any]:
    """All tensors of a GGUF file by name; `dense` and `dtype` as for `GgufFile.read`.

    F32, F16, BF16 and integers come as they are; Q4_0, Q4_1, Q8_0, IQ4_NL and MXFP4 as packed arrays of the same codes
    and scales; Q5_0, Q5_1 and the K types are decoded.
    """
    file = open_gguf(path)
    return {name: file.read(name, dense=dense, dtype=dtype) for name in file}
