"""Trees as plain state: nested dicts of ordinary arrays, for checkpoint libraries that know nothing of implicit ones.

The state describes itself: `tensors` are the stored arrays by name, `eformer` is the metadata of a file, as bytes. So
it survives Orbax and Flax msgpack (both imported when used), NumPy archives, and everything else that keeps dicts of
arrays.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eformer._core import ImplicitArray
from eformer.errors import CheckpointError

from ..checkpoint.load import NamedLeaves, restore_like, restore_tree
from ..safetensors.header import CODES, about, check_shape, fits_jax, from_stored, named_dtype
from ..tree import describe
from ..tree.describe import KEY, described_leaf
from ..tree.saved_types import saved_classes
from ..tree.structure import named_leaves

_TENSORS = "tensors"


def to_state_dict(tree: Any) -> dict[str, Any]:
    """A tree as plain state: `{"tensors": {name: array}, "eformer": bytes}`. Arrays stay on their devices.

    >>> import jax.numpy as jnp
    >>> from eformer.ops.quantization import quantize
    >>> sorted(to_state_dict({"w": quantize(jnp.ones((64, 2)), dtype="nf4")})["tensors"])
    ['w.absmax', 'w.packed']
    """
    contents = describe.describe_tree(tree)
    arrays = {name: array for leaf in contents.leaves for name, array in leaf.tensors.items()}
    layouts = {t.name: [t.dtype.name, list(t.shape)] for leaf in contents.leaves for t in leaf.layout()}
    described = describe.leaves_metadata(contents.leaves) | describe.tree_metadata(contents) | {"layouts": layouts}
    # Orbax refuses arrays without entries; their layouts say all there is to know.
    kept = {name: _plain(name, array) for name, array in arrays.items() if array.size}
    return {_TENSORS: kept, KEY: np.frombuffer(describe.dumped(described).encode(), np.uint8)}


def _plain(name: str, array: Any) -> Any:
    is_plain = isinstance(array, jax.Array) and array.dtype in CODES
    return array if is_plain else describe.host(array, name)


def from_state_dict(state: Mapping[str, Any], like: Any = None, *, strict: bool = True) -> Any:
    """The tree of a state made by `to_state_dict`; `like` and `strict` as for `load`."""
    leaves = _StateLeaves(state)
    return restore_tree(leaves) if like is None else restore_like(leaves, like, strict=strict)


class _StateLeaves(NamedLeaves):
    def __init__(self, state: Mapping[str, Any]):
        if not isinstance(state, Mapping) or not isinstance(state.get(_TENSORS), Mapping) or KEY not in state:
            raise CheckpointError(f"the state has no {_TENSORS!r} and {KEY!r}.", fix="Make it with to_state_dict.")
        self._arrays = state[_TENSORS]
        raw = np.asarray(state[KEY])
        described = describe.loaded(raw.tobytes().decode("utf-8", "replace"), "the state")
        self._layouts = described.get("layouts", {})
        if raw.dtype != np.uint8 or not isinstance(self._layouts, dict):
            raise CheckpointError("the state has metadata that it should not.")
        structure = described.get("structure", describe.NO_STRUCTURE)
        super().__init__(
            "the state", described.get("leaves", {}), self._layouts, structure, described.get("aliases", {})
        )

    def read(self, name: str, sharding: Any = None) -> Any:
        name = self.known(name)
        with about(self.path, name):
            made = describe.restore(self.description(name), self._fetch)
            is_split = isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh.size > 1
            if not is_split:
                return made
            return made.with_sharding(sharding) if hasattr(made, "with_sharding") else jax.device_put(made, sharding)

    def _fetch(self, tensor: str, dtype: Any = None, numpy: bool = False) -> Any:
        array = self._array(tensor)
        if dtype is not None and dtype != array.dtype:
            array = from_stored(np.asarray(array), dtype)
        if numpy or not fits_jax(np.dtype(array.dtype)):
            return np.asarray(array)
        return array if isinstance(array, jax.Array) else jax.device_put(array)

    def _array(self, tensor: str) -> Any:
        """The stored array, checked against its layout."""
        layout = self._layouts[tensor]
        if not isinstance(layout, list) or len(layout) != 2:
            raise CheckpointError(f"has the layout {layout!r:.100}.")
        check_shape(layout[1], CheckpointError)
        shape, dtype = tuple(layout[1]), named_dtype(layout[0])
        if 0 in shape:
            return np.empty(shape, dtype)
        array = self._arrays.get(tensor)
        if array is None or not hasattr(array, "dtype"):
            raise CheckpointError(f"is not among the arrays of the state: {array!r:.100}.")
        if (tuple(array.shape), array.dtype) != (shape, dtype):
            what = f"is {array.dtype}{list(array.shape)} in the state, but was {dtype}{list(shape)} when it was made."
            raise CheckpointError(what)
        return array


def save_orbax(path: str | os.PathLike[str], tree: Any) -> Path:
    """Save a tree with Orbax, as the state `to_state_dict` makes. The folder must not exist."""
    import orbax.checkpoint as ocp

    path = Path(path).absolute()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, to_state_dict(tree))
    return path


def load_orbax(path: str | os.PathLike[str], like: Any = None, *, strict: bool = True) -> Any:
    """Load what `save_orbax` saved; `like` and `strict` as for `load`.

    Of a leaf that is split over devices in `like`, each process reads what its devices hold.
    """
    import orbax.checkpoint as ocp

    path = Path(path).absolute()
    with ocp.PyTreeCheckpointer() as checkpointer:
        saved = checkpointer.metadata(path).item_metadata
        if saved is None:
            raise CheckpointError("is not an Orbax checkpoint of one tree.", file=path)
        # As NumPy arrays: where they go is decided here, not by the devices there were when they were saved.
        plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved.tree)
        for name, sharding in _shardings(like).items():
            if name in plain.get("tensors", {}):
                plain["tensors"][name] = ocp.ArrayRestoreArgs(sharding=sharding)
        state = checkpointer.restore(path, restore_args=plain)
    with about(path):
        return from_state_dict(state, like, strict=strict)


def _shardings(like: Any) -> dict[str, Any]:
    """How the stored tensors of `like` are split, for those that are split over devices."""
    named = [] if like is None else named_leaves(like)[0]
    taken = {name for name, _ in named}
    arrays = [(n, v) for n, v in named if isinstance(v, (jax.Array, jax.ShapeDtypeStruct, ImplicitArray))]
    found = {tensor: x for name, value in arrays for tensor, x in described_leaf(name, value, taken).tensors.items()}
    shardings = {name: getattr(array, "sharding", None) for name, array in found.items()}
    return {n: s for n, s in shardings.items() if isinstance(s, jax.sharding.NamedSharding) and s.mesh.size > 1}


def to_msgpack(tree: Any) -> bytes:
    """A tree as bytes of Flax msgpack, as the state `to_state_dict` makes."""
    import flax.serialization

    return flax.serialization.msgpack_serialize(to_state_dict(tree))


def from_msgpack(data: bytes, like: Any = None, *, strict: bool = True) -> Any:
    """The tree of `to_msgpack`; `like` and `strict` as for `load`."""
    import flax.serialization
    import msgpack

    try:
        state: Any = flax.serialization.msgpack_restore(data)
    except (msgpack.UnpackException, ValueError, TypeError, LookupError, AttributeError) as err:
        raise CheckpointError(f"the bytes are not Flax msgpack: {str(err)[:200]}.") from err
    return from_state_dict(state, like, strict=strict)


def register_flax() -> None:
    """Let `flax.serialization.to_bytes` and `from_bytes` take trees with the arrays that are registered by now."""
    import flax.serialization

    for cls in saved_classes():
        flax.serialization.register_serialization_state(
            cls, to_state_dict, lambda target, state: from_state_dict(state, target, strict=False), override=True
        )
