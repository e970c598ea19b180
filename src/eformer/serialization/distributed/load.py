"""Many processes read one checkpoint: each the bytes of the shards it will hold."""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from eformer._core import ImplicitArray
from eformer.errors import CheckpointError

from ..checkpoint.lazy import LazyCheckpoint
from ..checkpoint.load import restore_tree
from ..checkpoint.opening import open_set
from ..checkpoint.placement import sharding_on
from ..locating import about
from .processes import agree, digest, exchange

Specs = Mapping[str, PartitionSpec] | Iterable[tuple[str, PartitionSpec]]


def load_distributed(
    path: str | os.PathLike[str], mesh: Mesh, specs: Specs | None = None, *, timeout: float = 600.0
) -> Any:
    """Load a checkpoint onto the devices of a mesh, each process reading only the bytes its devices hold.

    All processes call it. Any checkpoint will do: of one file, of several, or of `save_distributed`.

    Args:
        path: as for `load`.
        mesh: a mesh of devices of all processes.
        specs: ordered `pattern -> PartitionSpec`, globs over names such as "layers.0.mlp.kernel" ("/" for "." is
            allowed): the first match decides, and what none matches is on every device. Specs are those of the logical
            arrays; codes and scales follow.
        timeout: as for `save_distributed`.

    >>> import tempfile, jax.numpy as jnp
    >>> from eformer.ops.quantization import quantize
    >>> from eformer.serialization import save_distributed
    >>> mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = save_distributed(f"{folder}/model.safetensors", {"up": quantize(jnp.ones((64, 32)), dtype="nf4")})
    ...     load_distributed(file, mesh, {"up": PartitionSpec(None, "model")})["up"]
    ArrayNF4(float32[64,32], nf4, 4.50 bits per weight)
    """
    pairs = _pairs(specs)
    checkpoint = _Placed(path, mesh, pairs)
    view = [sorted(mesh.shape.items()), [(p, str(s)) for p, s in pairs], checkpoint.identity()]
    agree(f"what processes load from {Path(path).name}", exchange(f"load {path}", json.dumps(view), timeout))
    return restore_tree(checkpoint)


def _pairs(specs: Any) -> list[Any]:
    """The patterns and their specs, in order."""
    if isinstance(specs, (PartitionSpec, str)):  # both would pass for a list
        raise TypeError(
            f"specs={specs!r} names no leaves; give patterns and their specs, such as {{'*.kernel': "
            f"{specs if isinstance(specs, PartitionSpec) else PartitionSpec()!r}}}."
        )
    pairs: list[Any] = list((specs.items() if isinstance(specs, Mapping) else specs) or ())
    wrong = [pair for pair in pairs if not (isinstance(pair, (tuple, list)) and len(pair) == 2)]
    if wrong:
        raise TypeError(f"specs= holds {wrong[0]!r}; allowed are pairs (pattern, PartitionSpec), or a mapping of them.")
    return pairs


class _Placed(LazyCheckpoint):
    """A checkpoint whose leaves come placed on a mesh."""

    def __init__(self, path: Any, mesh: Mesh, specs: Sequence[tuple[str, PartitionSpec]]):
        super().__init__(open_set(path))
        self._mesh = mesh
        self._specs = [(pattern.replace(".", "/"), spec) for pattern, spec in specs]
        names = [name.replace(".", "/") for name in self]
        unknown = [p for p, _ in self._specs if not fnmatch.filter(names, p)]
        if unknown:
            what = f"has no leaf that {unknown[0]!r} matches; names look like {list(self)[:3]}."
            raise CheckpointError(what, file=self.path)

    def identity(self) -> str:
        """What tells this checkpoint from another of the same name."""
        entries = [self.entry(name) for name in sorted(self._owners)]
        return digest([[entry.name, list(entry.shape), str(entry.dtype)] for entry in entries])

    def read(self, name: str, sharding: Any = None) -> Any:
        spec = next((s for p, s in self._specs if fnmatch.fnmatchcase(name.replace(".", "/"), p)), PartitionSpec())
        with about(self.path, name):
            sharding = sharding_on(self._mesh, spec)
            made: Any = super().read(name, sharding)
        if self._mesh.size > 1 or not isinstance(made, (jax.Array, ImplicitArray)):
            return made
        place: Any = getattr(made, "with_sharding", None)
        return jax.device_put(made, sharding) if place is None else place(sharding)
