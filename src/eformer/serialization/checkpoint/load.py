"""`load`: a checkpoint back to the pytree it was, or into the structure of another one."""

from __future__ import annotations

import os
from typing import Any

import jax.tree_util as jtu

from eformer._core import ImplicitArray
from eformer.errors import CheckpointError

from ..locating import about
from ..tree.metadata import NO_STRUCTURE
from ..tree.structure import build, named_leaves
from .lazy import open_lazy
from .leaf_mapping import NamedLeaves


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
    return restore_tree(checkpoint) if like is None else restore_like(checkpoint, like, strict=strict)


def restore_tree(checkpoint: NamedLeaves) -> Any:
    """The tree as it was saved."""
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
    return f"{len(names)} leaves ({shown})" if names else "nothing"


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
