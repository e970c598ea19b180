"""Orbax and Flax checkpoints; each library is imported when it is used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eformer._core import ImplicitArray
from eformer.errors import CheckpointError

from ..checkpoint.state_dict import from_state_dict, to_state_dict
from ..locating import about
from ..tree.describe import described_leaf
from ..tree.saved_types import saved_classes
from ..tree.structure import named_leaves


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
