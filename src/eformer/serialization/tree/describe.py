"""Describing trees, and restoring them: JSON that, together with named tensors, gives back exactly what was saved.

A plain array is described by the name of its tensor. Everything else is a mapping with a `type`: an implicit array with
its parts (described in the same way) and fields, a NumPy array, a random key, a Python number, a container. A file
keeps the descriptions of its leaves and of the structure of the tree as one string of metadata.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer._core import ImplicitArray
from eformer._jax import traces
from eformer.errors import CheckpointError, UninitializedAval

from ..safetensors.header import CODES, about, as_stored, check_shape, fits_jax, named_dtype, parse_json, stored_layout
from ..safetensors.writing import Tensor
from .saved_types import type_named, type_of
from .structure import MAX_DEPTH, decode_plain, describe_structure, encode_plain, named_leaves, unused

Emit = Callable[[str, Any], str]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf to be saved: its description and, for each of its tensors, the array to take the values from."""

    name: str
    description: Any
    tensors: Mapping[str, Any]

    @property
    def is_plain(self) -> bool:
        """Is the leaf one plain tensor of its own name?"""
        return self.description == self.name

    def layout(self) -> list[Tensor]:
        """The tensors as a header lists them."""
        stored = {name: stored_layout(tuple(x.shape), np.dtype(x.dtype)) for name, x in self.tensors.items()}
        return [Tensor(name, dtype, shape) for name, (shape, dtype) in stored.items()]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.layout())


@dataclasses.dataclass(frozen=True)
class DescribedTree:
    """A tree ready to be written. Leaves that are one object are saved once; `aliases` are their other names."""

    leaves: Sequence[Leaf]
    structure: Any
    aliases: Mapping[str, str]


def describe_tree(tree: Any) -> DescribedTree:
    """Describe a tree; no array is copied yet."""
    named, _ = named_leaves(tree)
    taken = {name for name, _ in named}
    leaves, aliases, first = [], {}, {}
    for name, value in named:
        shareable = isinstance(value, (jax.Array, np.ndarray, ImplicitArray))
        if shareable and id(value) in first:
            aliases[name] = first[id(value)]
            continue
        if shareable:
            first[id(value)] = name
        leaves.append(described_leaf(name, value, taken))
    names = [aliases.get(name, name) for name, _ in named]
    return DescribedTree(leaves, describe_structure(tree, names), aliases)


def described_leaf(name: str, value: Any, taken: set[str]) -> Leaf:
    """A leaf and its tensors, whose names are those of the leaf, or begin with it; `taken` holds the names in use."""
    tensors: dict[str, Any] = {}

    def emit(tensor: str, array: Any) -> str:
        unique = name if tensor == name else unused(tensor, taken)
        tensors[unique] = array
        return unique

    with about(None, name):
        leaf = Leaf(name, describe(value, name, emit), tensors)
        leaf.layout()  # refuses dtypes that have no place in a file
    return leaf


def host(array: Any, name: str) -> np.ndarray:
    """The values in the memory of the host, as they are stored."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        raise CheckpointError(
            "is spread over several processes, and this one does not see all of it.",
            tensor=name,
            fix="Gather it first (jax.experimental.multihost_utils.process_allgather), or save with Orbax.",
        )
    return as_stored(np.asarray(array))


def describe(value: Any, name: str, emit: Emit) -> Any:
    """The description of a leaf (or of a part of one). `emit(name, array)` takes each tensor and returns its name."""
    if isinstance(value, ImplicitArray):
        return _describe_implicit(value, name, emit)
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):  # a shape: for files whose tensors come later
        return _describe_array(value, name, emit)
    if isinstance(value, (np.ndarray, np.generic)):
        scalar = {"scalar": True} if isinstance(value, np.generic) else {}
        return {"type": "numpy", "tensor": emit(name, value), "dtype": value.dtype.name, **scalar}
    if isinstance(value, (bool, int, float, complex, str)):
        return {"type": "scalar", "value": encode_plain(value)}
    if value is None:
        return {"type": "none"}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        items = [describe(item, f"{name}.{i}", emit) for i, item in enumerate(value)]
        return {"type": type(value).__name__, "items": items}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"type": "dict", "items": {key: describe(item, f"{name}.{key}", emit) for key, item in value.items()}}
    raise CheckpointError(
        f"{value!r:.100} of type {type(value).__name__} is not an array and cannot be saved.",
        tensor=name,
        fix="Leave it out (for Equinox: eqx.filter(tree, eqx.is_array)) and pass like= to load.",
    )


def _describe_implicit(array: ImplicitArray, name: str, emit: Emit) -> dict[str, Any]:
    saved = type_of(array)
    parts, fields = saved.pack(array)
    kind = getattr(array, "format", None)  # for human readers of the file; nothing here reads it
    return {
        "type": saved.name,
        **({"format": kind} if isinstance(kind, str) else {}),
        "shape": list(array.shape),
        "dtype": jnp.dtype(array.dtype).name,
        "fields": {key: encode_plain(value, f"field {key!r} of {name}") for key, value in fields.items()},
        "parts": {key: describe(part, f"{name}.{key}", emit) for key, part in parts.items()},
    }


def _describe_array(array: Any, name: str, emit: Emit) -> Any:
    if isinstance(array, traces.Tracer):
        raise CheckpointError("is a tracer: saving happens outside jit, vmap and grad.", tensor=name)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        tensor = emit(name, jax.random.key_data(array))
        return {"type": "key", "tensor": tensor, "impl": str(jax.random.key_impl(array))}
    if array.dtype in CODES:
        return emit(name, array)
    return {"type": "array", "tensor": emit(name, array), "dtype": array.dtype.name}


VERSION = 1
KEY = "eformer"  # of the metadata
NO_STRUCTURE: Any = object()  # of a file from another program: its leaves are one dict


def leaves_metadata(leaves: Sequence[Leaf]) -> dict[str, Any]:
    """The part of the metadata that goes with the tensors of these leaves."""
    return {"version": VERSION, "leaves": {leaf.name: leaf.description for leaf in leaves if not leaf.is_plain}}


def tree_metadata(contents: DescribedTree) -> dict[str, Any]:
    """The part of the metadata that there is once in a checkpoint."""
    structure = {} if contents.structure is NO_STRUCTURE else {"structure": contents.structure}
    return {"version": VERSION, **structure, "aliases": dict(contents.aliases)}


def dumped(metadata: Mapping[str, Any]) -> str:
    return json.dumps(metadata, separators=(",", ":"), allow_nan=False)


def loaded(text: str | None, file: Any) -> dict[str, Any]:
    """Metadata of this library in a file, checked for its outer shape; empty if there is none."""
    if text is None:
        return {}
    found = parse_json(text.encode("utf-8", "surrogatepass"), file)
    if not isinstance(found, dict) or type(found.get("version")) is not int:
        raise CheckpointError(f"has metadata under {KEY!r} that it should not: {text[:100]!r}.", file=file)
    if found["version"] > VERSION:
        raise CheckpointError(
            f"was written in version {found['version']} of the format; this library reads up to {VERSION}.",
            file=file,
            fix="Install a newer eformer.",
        )
    for key in ("leaves", "aliases"):
        if not isinstance(found.get(key, {}), dict):
            raise CheckpointError(f"has {key} in its metadata that are not a mapping.", file=file)
    if not all(isinstance(name, str) for name in found.get("aliases", {}).values()):
        raise CheckpointError("has aliases that are not names.", file=file)
    return found


# What classes of arrays say to parts and fields that do not fit.
_REFUSALS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError, UninitializedAval)

Fetch = Callable[..., Any]


def tensors_of(description: Any, depth: int = 0) -> list[str]:
    """The names of all tensors a description mentions; raises if it is not a description."""
    if depth > MAX_DEPTH:
        raise CheckpointError(f"has a description nested more than {MAX_DEPTH} deep.")
    if isinstance(description, str):
        return [description]
    if not isinstance(description, dict):
        raise CheckpointError(f"has the description {description!r:.100}, which is neither a name nor a mapping.")
    if "tensor" in description:
        if not isinstance(description["tensor"], str):
            raise CheckpointError(f"has the tensor name {description['tensor']!r:.100}.")
        return [description["tensor"]]
    inner = description.get("parts", description.get("items", []))
    if not isinstance(inner, (dict, list)):
        raise CheckpointError(f"has parts {inner!r:.100} that are neither a mapping nor a list.")
    items = inner.values() if isinstance(inner, dict) else inner
    return [name for item in items for name in tensors_of(item, depth + 1)]


def restore(description: Any, fetch: Fetch) -> Any:
    """What was described. `fetch(tensor, dtype=None, numpy=False)` gives the array of a tensor.

    Expects what `tensors_of` has accepted.
    """
    if isinstance(description, str):
        return fetch(description)
    kind = description.get("type")
    simple = _SIMPLE.get(kind) if isinstance(kind, str) else None
    if simple is not None:
        return simple(description, fetch)
    return _restore_implicit(description, fetch)


def _restore_implicit(description: dict[str, Any], fetch: Fetch) -> Any:
    saved = type_named(description.get("type"))
    parts, fields = description.get("parts"), description.get("fields")
    shape, dtype = description.get("shape"), named_dtype(description.get("dtype"))
    if not isinstance(parts, dict) or not isinstance(fields, dict):
        raise CheckpointError("has no mappings of parts and fields.")
    check_shape(shape, CheckpointError)
    inner = {key: restore(part, fetch) for key, part in parts.items()}
    try:
        made = saved.unpack(inner, {key: decode_plain(value) for key, value in fields.items()})
        found = tuple(made.shape), jnp.dtype(made.dtype)
    except CheckpointError:
        raise
    except _REFUSALS as err:
        what = f"does not make a {saved.cls.__name__}: {str(err)[:500]}"
        raise CheckpointError(what, fix=_wider(dtype)) from err
    if found != (tuple(shape), dtype):  # pyright: ignore[reportArgumentType]
        what = f"is described as {dtype}{shape}, but its parts make {found[1]}{list(found[0])}."
        raise CheckpointError(what, fix=_wider(dtype))
    return made


def _wider(dtype: np.dtype) -> str:
    """What to do about a dtype that JAX does not hold as it is set up now."""
    how = 'jax.config.update("jax_enable_x64", True), or JAX_ENABLE_X64=1 in the environment'
    return "" if fits_jax(dtype) else f"JAX holds {dtype} with jax_enable_x64 only: {how}, before loading."


def _restore_numpy(description: dict[str, Any], fetch: Fetch) -> Any:
    array = fetch(_tensor(description), dtype=named_dtype(description.get("dtype")), numpy=True)
    if description.get("scalar") is True and isinstance(array, np.ndarray):
        if array.ndim:
            raise CheckpointError(f"is described as a scalar, but has the shape {list(array.shape)}.")
        return array[()]
    return array


def _restore_key(description: dict[str, Any], fetch: Fetch) -> Any:
    impl = description.get("impl")
    data = fetch(_tensor(description))
    if isinstance(data, jax.ShapeDtypeStruct):
        return data
    try:
        return jax.random.wrap_key_data(jnp.asarray(data), impl=impl)
    except (TypeError, ValueError) as err:
        raise CheckpointError(f"is not a random key of the kind {impl!r:.100}: {err}") from err


def _restore_items(description: dict[str, Any], fetch: Fetch) -> Any:
    items, kind = description.get("items"), description["type"]
    if not isinstance(items, dict if kind == "dict" else list):
        raise CheckpointError(f"is described as a {kind} of {items!r:.100}.")
    if isinstance(items, dict):
        return {key: restore(item, fetch) for key, item in items.items()}
    made = [restore(item, fetch) for item in items]  # pyright: ignore[reportOptionalIterable]
    return made if kind == "list" else tuple(made)


def _tensor(description: dict[str, Any]) -> str:
    if not isinstance(description.get("tensor"), str):
        raise CheckpointError("has a description that names no tensor.")
    return description["tensor"]


_SIMPLE: dict[str, Callable[[dict[str, Any], Fetch], Any]] = {
    "array": lambda description, fetch: fetch(_tensor(description), dtype=named_dtype(description.get("dtype"))),
    "numpy": _restore_numpy,
    "key": _restore_key,
    "scalar": lambda description, fetch: decode_plain(description.get("value")),
    "none": lambda description, fetch: None,
    "list": _restore_items,
    "tuple": _restore_items,
    "dict": _restore_items,
}
