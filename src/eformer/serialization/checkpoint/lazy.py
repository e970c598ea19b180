"""`open_lazy`: a checkpoint as a mapping from names to leaves, each read when it is used."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from eformer._core import ImplicitArray
from eformer._formats.base import QuantizedArray
from eformer._lora.array import LoraArray
from eformer.errors import CheckpointError

from ..locating import about
from ..safetensors.dtypes import fits_jax, from_stored, loaded_shape
from ..safetensors.header import Entry
from ..safetensors.reading import owned
from ..tree.restore import restore
from . import slices
from .leaf_mapping import NamedLeaves
from .opening import FileSet, open_set
from .placement import child_specs


@dataclasses.dataclass(frozen=True)
class LeafInfo:
    """What is known of a leaf without reading it."""

    name: str
    format: str
    shape: tuple[int, ...]
    dtype: np.dtype | None
    nbytes: int
    tensors: tuple[str, ...]


class LazyCheckpoint(NamedLeaves):
    """The leaves of a checkpoint by name. Opening it reads headers only.

    On the CPU dense and packed arrays are memory maps: they cost no time and no memory until they are used.
    `metadata` holds the strings that were saved with it, `aliases` the further names of tied leaves.
    """

    def __init__(self, files: FileSet, *, memory_map: bool = True):
        super().__init__(files.path, files.leaves, files.owners, files.structure, files.aliases)
        self.files, self.metadata = files, files.metadata
        self._owners = files.owners
        self._memory_map = memory_map

    def __repr__(self) -> str:
        size = sum(self.entry(tensor).nbytes for tensor in self._owners)
        return f"LazyCheckpoint({str(self.path)!r}, {len(self)} leaves, {size:,} bytes)"

    def read(self, name: str, sharding: Any = None) -> Any:
        """The leaf of that name; with a sharding over several devices, each process reads only what it holds."""
        name = self.known(name)
        with about(self.path, name):
            if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
                return self._read_sharded(name, sharding)
            return restore(self.description(name), self._fetch)

    def read_slice(self, name: str, index: Any) -> Any:
        """Part of a leaf, or of a stored tensor by its own name: only the bytes it needs are read.

        `index` is what NumPy takes. Quantized arrays take one slice per axis, of step 1 and along the blocked axis from
        block to block, and stay quantized.
        """
        if name in self._owners and self.description(name) == name:
            return self._finish(self._owners[name].read(name, index))
        name = self.known(name)
        with about(self.path, name):
            leaf, tensors = self.abstract(name)
            if isinstance(leaf, (QuantizedArray, LoraArray)):
                read: Any = slices.read if isinstance(leaf, QuantizedArray) else slices.read_lora
                return read(leaf, tensors, index, lambda t, i: self._on_device(self._owners[t].read(t, i)))
            raise CheckpointError(
                f"is of type {type(leaf).__name__}, of which no slices can be read.",
                fix=f"Read slices of its tensors by their own names: {', '.join(map(repr, self.tensors[name]))}.",
            )

    def info(self, name: str) -> LeafInfo:
        """Format, shape, dtype and size of a leaf."""
        name = self.known(name)
        leaf, _ = self.abstract(name)
        tensors = tuple(self.tensors[name])
        nbytes = sum(self.entry(tensor).nbytes for tensor in tensors)
        if not hasattr(leaf, "shape"):
            return LeafInfo(name, type(leaf).__name__, (), None, nbytes, tensors)
        kind = getattr(leaf, "format", type(leaf).__name__) if isinstance(leaf, ImplicitArray) else "dense"
        return LeafInfo(name, kind, tuple(leaf.shape), leaf.dtype, nbytes, tensors)

    def entry(self, tensor: str) -> Entry:
        """Where a stored tensor lies."""
        if tensor not in self._owners:
            raise CheckpointError("is not in the checkpoint.", file=self.path, tensor=tensor)
        return self._owners[tensor].entry(tensor)

    def abstract(self, name: str) -> tuple[Any, dict[int, str]]:
        """The leaf with shapes in place of arrays, and which tensor each of these (by id) stands for."""
        tensors: dict[int, str] = {}

        def fetch(tensor: str, dtype: Any = None, numpy: bool = False) -> jax.ShapeDtypeStruct:
            del numpy
            entry = self.entry(tensor)
            dtype = entry.dtype if dtype is None else dtype
            made = jax.ShapeDtypeStruct(loaded_shape(entry.shape, entry.dtype, dtype), dtype)
            tensors[id(made)] = tensor
            return made

        with about(self.path, name):
            return restore(self.description(name), fetch), tensors

    # -- reading -------------------------------------------------------------------------------------------------------

    def _view(self, tensor: str, dtype: Any) -> np.ndarray:
        view = self._owners[tensor].view(tensor)
        return view if dtype is None else from_stored(view, dtype)

    def _fetch(self, tensor: str, dtype: Any = None, numpy: bool = False) -> Any:
        return self._finish(self._view(tensor, dtype), numpy)

    def _finish(self, array: np.ndarray, numpy: bool = False) -> Any:
        if numpy or not fits_jax(array.dtype):  # without x64, JAX would drop half of the bits
            return array if self._memory_map else np.array(array)
        return self._on_device(array)

    def _on_device(self, array: np.ndarray) -> jax.Array:
        # On the CPU JAX keeps using the memory it is given (also with may_alias=False), so a copy is made here.
        return jax.device_put(array if self._memory_map and array.flags.aligned else owned(array))

    def _read_sharded(self, name: str, sharding: NamedSharding) -> Any:
        leaf, tensors = self.abstract(name)
        by_tensor = child_specs(leaf, tensors, sharding)
        if by_tensor is None:  # no array
            return restore(self.description(name), self._fetch)

        def fetch(tensor: str, dtype: Any = None, numpy: bool = False) -> Any:
            if numpy:
                return self._fetch(tensor, dtype, numpy)
            owner, held = self._owners[tensor], {}
            stored = self.entry(tensor)
            shape = stored.shape if dtype is None else loaded_shape(stored.shape, stored.dtype, dtype)

            def part(index: Any) -> np.ndarray:
                key = tuple((cut.start, cut.stop) for cut in index)
                if key not in held:  # devices with copies of one shard share what was read
                    read = owner.read(tensor, index)
                    held[key] = read if dtype is None else from_stored(read, dtype)
                return held[key]

            return jax.make_array_from_callback(shape, NamedSharding(sharding.mesh, by_tensor[tensor]), part)

        made = restore(self.description(name), fetch)
        return made.with_sharding(sharding) if isinstance(made, (QuantizedArray, LoraArray)) else made


def open_lazy(path: str | os.PathLike[str], *, memory_map: bool = True) -> LazyCheckpoint:
    """Open a checkpoint without reading its tensors.

    Args:
        path: a safetensors file, an index of several, the name both would have, or a folder that holds one of them.
        memory_map: False copies what is read, for files that may be overwritten in place.

    >>> import tempfile, jax.numpy as jnp
    >>> from eformer.serialization import save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/m.safetensors", {"w": jnp.arange(6.0).reshape(2, 3)}).name
    ...     open_lazy(f"{folder}/m.safetensors").read_slice("w", (slice(1, 2), slice(0, 2)))
    'm.safetensors'
    Array([[3., 4.]], dtype=float32)
    """
    return LazyCheckpoint(open_set(path), memory_map=memory_map)
