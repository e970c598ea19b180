"""Checkpoints of other programs as packed arrays: what is stored in several tensors is one leaf, bit for bit.

Nothing is rounded again, and only what is asked for is read. `config.json` beside the file says what it is; where it is
missing, names, dtypes and shapes do.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from eformer._messages import called_otherwise
from eformer.errors import CheckpointError

from ..checkpoint.index import open_set
from ..checkpoint.load import LazyCheckpoint
from ..safetensors.header import Entry, about, fits_jax
from ..safetensors.reading import MappedFile, let_go
from ..tree.describe import NO_STRUCTURE
from . import bitsandbytes
from .configuration import READ, of_weight, read_config
from .finding import CONVERT, SCHEMES, Weight, find_weights
from .gguf import GgufFile, gguf_at, open_gguf
from .scheme import FLOATS, text_of, values_dtype

# Methods that a configuration may name although the weights were left dense.
_MAY_BE_DENSE = ("auto-round", "bitsandbytes", "compressed-tensors", "modelopt")
_NAMES = {"dtype": 'the dtype of values is quantization={{"dtype": {value}}}'}


class PackedCheckpoint(LazyCheckpoint):
    """A checkpoint of another program by the names a dense one would have; its quantized weights are packed arrays.

    Opening it reads headers and `config.json`. A weight is read and arranged when it is asked for.
    """

    def __init__(
        self, files: Any, weights: Mapping[str, Weight], config: Mapping[str, Any], *, fallback: str, memory_map: bool
    ):
        super().__init__(files, memory_map=memory_map)
        self.weights, self.quantization, self._fallback = weights, config, fallback
        leaf_of = {tensor: name for name, weight in weights.items() for tensor in weight.tensors.values()}
        names = dict.fromkeys(leaf_of.get(name, name) for name in self.tensors)
        self.tensors = {n: list(weights[n].tensors.values()) if n in weights else [n] for n in names}

    @property
    def schemes(self) -> list[str]:
        """The names of the schemes its weights are stored in."""
        return sorted({"bitsandbytes" if w.scheme is None else w.scheme.name for w in self.weights.values()})

    def read(self, name: str, sharding: Any = None) -> Any:
        weight = self.weights.get(name)
        if weight is None:
            return super().read(name, sharding)
        with self._about(weight):
            if weight.scheme is None:
                made = self._nf4(weight, {n: self._stored(n) for n in weight.tensors})
            else:
                arrays = {suffix: self._stored(weight.tensors[suffix]) for suffix in self._operands(weight)}
                made = self._arranged(weight, self._numbers(weight), arrays)
                let_go(arrays)
        is_split = isinstance(sharding, NamedSharding) and sharding.mesh.size > 1
        return made.with_sharding(sharding) if is_split and hasattr(made, "with_sharding") else made

    def read_rows(self, name: str) -> Iterator[Any]:
        """A quantized weight in pieces of its first axis, for those who need not hold all of it."""
        weight = self.weights[name]
        if weight.scheme is None:  # nothing is arranged
            yield self.read(name)
            return
        with self._about(weight):
            numbers, operands, axis = self._numbers(weight), self._operands(weight), weight.scheme.rows
            count, cut = weight.scheme.pieces(operands, self.abstract(name)[0].shape[0])
            # Pieces of another axis than the first do not lie together in the file.
            whole = {s: self._stored(weight.tensors[s]) for s in operands if axis or s not in cut}
            for i in range(count):
                read = {s: self._stored(weight.tensors[s], i, count) for s in cut if s not in whole}
                views = {s: np.split(whole[s], count, axis)[i] for s in cut if s in whole}
                made = self._arranged(weight, numbers, {**whole, **views, **read})
                views.clear()
                let_go(read)
                yield made
            let_go(whole)

    def _arranged(self, weight: Weight, numbers: Any, arrays: Mapping[str, np.ndarray]) -> Any:
        """The array that tensors make. Waited for: else the next ones are read while these are still needed."""
        assert weight.scheme is not None
        weight.scheme.check(arrays, **numbers)
        return jax.block_until_ready(_made(weight.scheme.make, *_split(numbers, arrays)))

    def read_slice(self, name: str, index: Any) -> Any:
        return self.read(name)[index] if name in self.weights else super().read_slice(name, index)

    def abstract(self, name: str) -> tuple[Any, dict[int, str]]:
        weight = self.weights.get(name)
        if weight is None:
            return super().abstract(name)
        with self._about(weight):
            shapes = {s: jax.ShapeDtypeStruct(e.shape, e.dtype) for s, e in self._operands(weight).items()}
            if weight.scheme is not None:
                static, dynamic = _split(self._numbers(weight), shapes)
                return jax.eval_shape(functools.partial(_made, weight.scheme.make, static), dynamic), {}
            # What the array is, its small parts tell; memory of zeros costs nothing until it is touched.
            small = [n for n in shapes if n.endswith("quant_map") or bitsandbytes.STATE in n]
            arrays = {n: self._stored(n) if n in small else np.zeros(s.shape, s.dtype) for n, s in shapes.items()}
            return jax.eval_shape(lambda: self._nf4(weight, arrays)), {}

    def _operands(self, weight: Weight) -> dict[str, Entry]:
        """The tensors `make` takes: a shape of 64-bit numbers is none, and JAX would cut it."""
        entries = {suffix: self.entry(tensor) for suffix, tensor in weight.tensors.items()}
        return {suffix: entry for suffix, entry in entries.items() if fits_jax(entry.dtype)}

    def _nf4(self, weight: Weight, arrays: Mapping[str, np.ndarray]) -> Any:
        state = next(name for name in arrays if bitsandbytes.STATE in name)
        return bitsandbytes.StoredWeight(arrays, weight.stem, state).restored(self._fallback)

    def _numbers(self, weight: Weight) -> dict[str, Any]:
        """What `make` of the scheme needs to know."""
        assert weight.scheme is not None
        config = of_weight(self.quantization, weight.stem)
        parts = {suffix: self.entry(tensor) for suffix, tensor in weight.tensors.items()}
        numbers = weight.scheme.plan(parts, config, lambda suffix: self._stored(weight.tensors[suffix]))
        return {**numbers, "dtype": values_dtype(config, parts)}

    def _stored(self, tensor: str, piece: int = 0, count: int = 1) -> np.ndarray:
        """A copy of a stored tensor, or of a piece of its first axis: pages of a map would stay in memory."""
        owner = self._owners[tensor]
        if not isinstance(owner, MappedFile):
            return np.split(owner.read(tensor), count)[piece] if count > 1 else owner.read(tensor)
        gc.collect(0)  # which is when JAX gives back the memory of arrays that nobody holds any more
        return owner.read_piece(tensor, piece, count)

    @contextlib.contextmanager
    def _about(self, weight: Weight) -> Iterator[None]:
        """Errors name the tensor; what array classes refuse is an error of the file."""
        try:
            yield
        except CheckpointError as err:
            tensor = weight.tensors.get(err.tensor or "", next(iter(weight.tensors.values())))
            raise CheckpointError(err.what, file=self.path, tensor=tensor, fix=err.fix) from err.__cause__
        except (TypeError, ValueError) as err:
            tensor = next(iter(weight.tensors.values()))
            raise CheckpointError(f"does not make an array: {str(err)[:500]}", file=self.path, tensor=tensor) from err


def _split(numbers: Mapping[str, Any], arrays: Mapping[str, Any]) -> tuple[tuple[tuple[str, Any], ...], Any]:
    """What compiled code depends on, and what it is given."""
    static = tuple((k, v) for k, v in sorted(numbers.items()) if not isinstance(v, np.ndarray))
    return static, (dict(arrays), {k: v for k, v in numbers.items() if isinstance(v, np.ndarray)})


@functools.partial(jax.jit, static_argnums=(0, 1))
def _made(make: Any, static: tuple[tuple[str, Any], ...], dynamic: Any) -> Any:
    arrays, more = dynamic
    return make(arrays, **dict(static), **more)


@called_otherwise(**_NAMES)
def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    quantization: Mapping[str, Any] | None = None,
    fallback: str = "error",
    memory_map: bool = True,
) -> LazyCheckpoint | GgufFile:
    """A checkpoint of any kind as a mapping from names to arrays, packed where the file is. Opening reads headers only.

    Args:
        path: a GGUF file, a safetensors file, an index of several, or a folder that holds one of them.
        quantization: what to add to, or change in, the `quantization_config` of the `config.json` beside the file, such
            as {"bits": 4, "group_size": 64}; "dtype" is the dtype of the values.
        fallback: "dense" decodes weights of bitsandbytes that cannot stay packed; "error" refuses them.
        memory_map: False copies what is read, for files that may be overwritten in place.
    """
    if fallback not in ("error", "dense"):
        raise ValueError(f"{fallback=} is unknown; allowed are 'error' and 'dense'.")
    if not isinstance(quantization, Mapping | None):
        raise TypeError(f"{quantization=} is a {type(quantization).__name__}, but must be a dict, as in config.json.")
    if quantization and not any(key in READ or isinstance(found, Mapping) for key, found in quantization.items()):
        raise ValueError(f"{quantization=} has none of the keys that are read: {', '.join(READ)}.")
    if (gguf := gguf_at(path)) is not None:
        return open_gguf(gguf)
    files = open_set(path)
    if files.leaves or files.structure is not NO_STRUCTURE:  # ours
        return LazyCheckpoint(files, memory_map=memory_map)
    broken: CheckpointError | None = None
    try:
        folder = files.path if files.path.is_dir() else files.path.parent
        config = {**read_config(folder), **(quantization or {})}
    except CheckpointError as err:
        config, broken = {}, err
    entries = {name: owner.entry(name) for name, owner in files.owners.items()}
    with about(files.path):
        weights = find_weights(entries, config)
    if weights and broken is not None:
        raise broken
    method = config.get("quant_method")
    if not weights and method not in (None, "eformer", *_MAY_BE_DENSE):
        raise _unknown(files.path, method, entries)
    if not weights:
        return LazyCheckpoint(files, memory_map=memory_map)
    return PackedCheckpoint(files, weights, config, fallback=fallback, memory_map=memory_map)


def _unknown(path: Any, method: Any, entries: Mapping[str, Entry]) -> CheckpointError:
    """The error of a file whose configuration names a method, but which has no weight that is known."""
    known = ", ".join(sorted({"bitsandbytes", *(scheme.method for scheme in SCHEMES)}))
    odd = next((n for n, e in entries.items() if e.dtype.name not in FLOATS and e.shape), None)
    example = "" if odd is None else f", such as {odd!r} {text_of(entries[odd])}"
    what = f"is quantized by {method!r:.50}, as its config.json says, but no tensors here make a weight of what is read"
    return CheckpointError(f"{what} ({known}){example}.", file=path, fix=CONVERT)


@called_otherwise(**_NAMES)
def load_checkpoint(path: str | os.PathLike[str], **options: Any) -> dict[str, Any]:
    """All arrays of a checkpoint by name, packed where the file is; arguments as for `open_checkpoint`.

    GPTQ, AWQ, MLX, compressed-tensors, FP8, MXFP4, NVFP4, bitsandbytes and GGUF files keep their codes and scales, so
    nothing is rounded again. Names and shapes are those of the dense model: (out, in) for a `weight`.

    >>> import tempfile, numpy as np, safetensors.numpy
    >>> ones = np.ones((2, 1), "f2")
    >>> stored = {"q.weight": np.zeros((2, 8), "u4"), "q.scales": ones, "q.biases": ones}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     safetensors.numpy.save_file(stored, f"{folder}/model.safetensors")
    ...     load_checkpoint(folder, quantization={"bits": 4})["q.weight"]
    ArrayInt(float16[2,64], int4, 4.50 bits per weight)
    """
    opened = open_checkpoint(path, **options)
    found = {name: opened[name] for name in opened}
    return found | {name: found[stored] for name, stored in getattr(opened, "aliases", {}).items()}
