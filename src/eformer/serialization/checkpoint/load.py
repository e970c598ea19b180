"""A checkpoint as a mapping from names to leaves, each read when it is used, and as the pytree it was, or another."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding

from eformer._core import ImplicitArray
from eformer._lora.dora import DoraArray
from eformer.errors import CheckpointError, PackedTensorsWarning

from ..safetensors.header import Entry, about, fits_jax, from_stored, loaded_shape
from ..safetensors.reading import owned
from ..tree.describe import NO_STRUCTURE, restore, tensors_of
from ..tree.structure import build, named_leaves
from .index import FileSet, open_set
from .parts import READABLE, child_specs, read_part

# Names that quantized checkpoints of other libraries have (GPTQ and AWQ, compressed-tensors, FP8), and others do not.
_PACKED = ("qweight", "weight_packed", "weight_scale_inv")
_READ_AS_STORED = (
    "{path} is a quantized checkpoint of another library ({packed}): load gives its codes and scales as the plain "
    "tensors they are stored in. For arrays that multiply, eformer.load_checkpoint(path)."
)


class NamedLeaves(Mapping[str, Any]):
    """A mapping from names to leaves, made from descriptions and the names of the tensors there are.

    A tensor that no description mentions is a leaf of its own name.
    """

    def __init__(
        self,
        path: Any,
        descriptions: Mapping[str, Any],
        tensors: Iterable[str],
        structure: Any,
        aliases: Mapping[str, str],
    ):
        self.path, self.structure, self.aliases = path, structure, aliases
        self._descriptions = descriptions
        self.tensors: dict[str, list[str]] = {}
        there = dict.fromkeys(tensors)
        used: set[str] = set()
        for name, description in descriptions.items():
            with about(path, name):
                self.tensors[name] = tensors_of(description)
            missing = [tensor for tensor in self.tensors[name] if tensor not in there]
            if missing:
                raise CheckpointError(f"needs {missing[0]!r:.100}, which is not there.", file=path, tensor=name)
            used.update(self.tensors[name])
        for tensor in there:
            if tensor not in used and tensor not in self.tensors:
                self.tensors[tensor] = [tensor]
        self.tensors = dict(sorted(self.tensors.items(), key=self._order()))

    def _order(self) -> Callable[[tuple[str, Any]], int]:
        """Leaves come in the order of the tree; those it does not mention come last."""
        mentioned: dict[str, int] = {}
        if self.structure is not NO_STRUCTURE:
            with about(self.path):
                build(self.structure, lambda name: mentioned.setdefault(name, len(mentioned)))
        return lambda item: mentioned.get(item[0], len(mentioned))

    def read(self, name: str, sharding: Any = None) -> Any:
        """The leaf of that name, placed as `sharding` says."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __contains__(self, name: object) -> bool:
        return self.aliases.get(name, name) in self.tensors if isinstance(name, str) else False

    def __getitem__(self, name: str) -> Any:
        return self.read(name)

    def known(self, name: str) -> str:
        """The name under which a leaf is stored, given that or an alias."""
        name = self.aliases.get(name, name)
        if name not in self.tensors:
            near = [other for other in self.tensors if name.rsplit(".", 1)[-1] in other][:5]
            hint = f"; similar are {near}" if near else ""
            raise KeyError(f"{name!r} is not in {self.path}, which holds {len(self)} leaves{hint}.")
        return name

    def description(self, name: str) -> Any:
        return self._descriptions.get(name, name)


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
            if isinstance(leaf, READABLE):
                return read_part(leaf, tensors, index, lambda t, i: self._on_device(self._owners[t].read(t, i)))
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

    def _fetch(self, tensor: str, dtype: Any = None, numpy: bool = False) -> Any:
        view = self._owners[tensor].view(tensor)
        return self._finish(view if dtype is None else from_stored(view, dtype), numpy)

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
        return made.with_sharding(sharding) if isinstance(made, (*READABLE, DoraArray)) else made


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


def load(path: str | os.PathLike[str], like: Any = None, *, strict: bool = True, memory_map: bool = True) -> Any:
    """Load a checkpoint.

    Args:
        path: what `save` returned; also any safetensors file, an index of several, or a folder that holds one of them.
        like: a pytree of the structure wanted, with arrays, `jax.ShapeDtypeStruct`s or anything else as leaves. A leaf
            that is sharded over devices is read in shards. Without `like`, dicts, lists and tuples come back as they
            were saved, other nodes as dicts, and a file of another library as one dict.
        strict: with `like`, demand the same names, shapes and dtypes. False takes what the file has and keeps the
            leaves of `like` it has not. A dense leaf of `like` accepts a quantized one in either case.
        memory_map: False copies what is read, for files that may be overwritten in place.
    """
    checkpoint = open_lazy(path, memory_map=memory_map)
    if checkpoint.structure is NO_STRUCTURE:
        packed = next((name for name in checkpoint if name.rpartition(".")[2] in _PACKED), None)
        if packed is not None:
            warnings.warn(_READ_AS_STORED.format(path=checkpoint.path, packed=packed), PackedTensorsWarning, 2)
    return restore_tree(checkpoint) if like is None else restore_like(checkpoint, like, strict=strict)


def restore_tree(checkpoint: NamedLeaves) -> Any:
    if checkpoint.structure is NO_STRUCTURE:
        return {name: checkpoint[name] for name in checkpoint}
    leaves: dict[str, Any] = {}

    def leaf(name: str) -> Any:
        if name not in leaves:
            if name not in checkpoint:
                raise CheckpointError("is part of the structure, but not there.", tensor=name)
            leaves[name] = checkpoint[name]
        return leaves[name]

    with about(checkpoint.path):
        return build(checkpoint.structure, leaf)


def restore_like(checkpoint: NamedLeaves, like: Any, *, strict: bool) -> Any:
    """The leaves of the checkpoint in the structure of `like`."""
    named, treedef = named_leaves(like)
    found = {name: _lookup(checkpoint, name) for name, _ in named}
    missing = [name for name, leaf in named if found[name] is None and hasattr(leaf, "shape")]
    extra = sorted(set(checkpoint) - {checkpoint.aliases.get(n, n) for n in found.values() if n is not None})
    if strict and (missing or extra):
        raise CheckpointError(
            f"does not fit like=: it lacks {_some(missing)} and has {_some(extra)} that like= lacks.",
            file=checkpoint.path,
            fix="Pass strict=False to take what fits.",
        )
    read: dict[str, Any] = {}
    leaves = []
    for name, leaf in named:
        stored = found[name]
        if stored is None:
            leaves.append(leaf)
            continue
        stored = checkpoint.aliases.get(stored, stored)
        if stored not in read:  # tied weights stay one object
            read[stored] = checkpoint.read(stored, getattr(leaf, "sharding", None))
        with about(checkpoint.path, name):
            leaves.append(_checked(read[stored], leaf, strict))
    return jtu.tree_unflatten(treedef, leaves)


def _lookup(checkpoint: NamedLeaves, name: str) -> str | None:
    """The name of a leaf in the file, whose author may have joined paths by slashes."""
    return next((n for n in (name, name.replace(".", "/")) if n in checkpoint), None)


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
    return f"{len(names)} {'leaf' if len(names) == 1 else 'leaves'} ({shown})" if names else "nothing"


def _checked(value: Any, leaf: Any, strict: bool) -> Any:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return value
    kind, wanted = type(value).__name__, list(leaf.shape)
    if not hasattr(value, "shape"):
        what = f"is {value!r:.100} of type {kind}, but like= has an array of shape {wanted}."
        raise CheckpointError(what, fix=f"Put a Python {kind}, or anything else without a shape, in its place.")
    if list(value.shape) != wanted:
        raise CheckpointError(f"has the shape {list(value.shape)}, but like= has {wanted}.")
    if strict and value.dtype != leaf.dtype:
        what = f"has the dtype {value.dtype}, but like= has {leaf.dtype}."
        raise CheckpointError(what, fix="Pass strict=False to keep the dtype of the file.")
    if strict and isinstance(leaf, ImplicitArray) and type(value) is not type(leaf):
        what = f"is a {kind}, but like= has a {type(leaf).__name__}."
        raise CheckpointError(what, fix="Pass strict=False to accept it.")
    return value
