"""The structure of a pytree as JSON, a name for each of its leaves, and plain values as JSON.

Dicts, lists, tuples and None come back as what they were. Other nodes (dataclasses, modules, states of a framework)
come back as dicts of their children, because a file cannot make classes; `like=` gives them their class again.
"""

from __future__ import annotations

import collections
import enum
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax.tree_util as jtu
import numpy as np

from eformer._core import tree_flatten_with_path_with_implicit
from eformer.errors import CheckpointError

from ..safetensors.header import named_dtype

MAX_DEPTH = 64  # of descriptions and structures: far beyond real models, far below the limit of the interpreter


def encode_plain(value: Any, what: str = "the value") -> Any:
    """JSON for a plain value.

    >>> encode_plain((1, None, float("inf")))
    {'tuple': [1, None, {'float': 'inf'}]}
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, enum.StrEnum):  # equal to the string
        return str(value)
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if type(value) is complex:
        return {"complex": [encode_plain(value.real), encode_plain(value.imag)]}
    if type(value) is tuple:
        return {"tuple": [encode_plain(item, what) for item in value]}
    if isinstance(value, np.dtype):
        return {"dtype": named_dtype(value.name).name}
    if isinstance(value, type) and hasattr(value, "dtype") and isinstance(value.dtype, np.dtype):  # jnp.float32
        return {"dtype": named_dtype(value.dtype.name).name}
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        return encode_plain(value.item(), what)
    raise CheckpointError(
        f"{what} is {value!r:.100} of type {type(value).__name__}, which has no place in a file; allowed are None, "
        "booleans, numbers, strings, dtypes, and tuples of these.",
        fix="Give register_type a pack= and an unpack= that turn it into such values.",
    )


def decode_plain(value: Any, depth: int = 0) -> Any:
    """The value `encode_plain` was given."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict) and len(value) == 1 and depth < 16:
        ((tag, body),) = value.items()
        if tag == "tuple" and isinstance(body, list):
            return tuple(decode_plain(item, depth + 1) for item in body)
        if tag == "dtype":
            return named_dtype(body)
        if tag == "float" and body in ("inf", "-inf", "nan"):
            return float(body)
        if tag == "complex" and isinstance(body, list) and len(body) == 2:
            real, imag = (decode_plain(part, depth + 1) for part in body)
            if isinstance(real, float) and isinstance(imag, float):
                return complex(real, imag)
    raise CheckpointError(f"holds the value {value!r:.100}, which is not a plain value.")


_ROOT = "tensor"
_TAKEN = ("__metadata__",)  # has a meaning of its own in the file format
_DICTS: dict[type, str] = {dict: "dict", collections.OrderedDict: "ordered_dict"}
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple"}


def named_leaves(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Every leaf with its name, implicit arrays being leaves, and the treedef.

    Names are key paths joined by dots; those that would be equal are numbered.

    >>> named_leaves({"b": [1, 2], "a": 3})[0]
    [('a', 3), ('b.0', 1), ('b.1', 2)]
    """
    pairs, treedef = tree_flatten_with_path_with_implicit(tree)
    taken: set[str] = set(_TAKEN)
    named = [(unused(jtu.keystr(path, simple=True, separator=".") or _ROOT, taken), leaf) for path, leaf in pairs]
    return named, treedef


def unused(name: str, taken: set[str]) -> str:
    """`name`, or a numbered one if it is taken; the result is taken afterwards."""
    found, number = name, 1
    while found in taken:
        number += 1
        found = f"{name}#{number}"
    taken.add(found)
    return found


def describe_structure(tree: Any, names: Iterable[str]) -> Any:
    """JSON for the nodes of a tree; `names` are those of its leaves in the order of `named_leaves`."""
    pairs, _ = tree_flatten_with_path_with_implicit(tree)
    by_path = {path: name for (path, _), name in zip(pairs, names, strict=True)}
    return _describe(tree, (), by_path)


def _describe(node: Any, path: tuple[Any, ...], names: dict[Any, str]) -> Any:
    if path in names:
        return names[path]
    if node is None:
        return None
    if len(path) >= MAX_DEPTH:
        raise CheckpointError(f"trees deeper than {MAX_DEPTH} cannot be saved.", tensor=jtu.keystr(path))
    kind = type(node)
    if kind in _SEQUENCES:
        return {_SEQUENCES[kind]: [_describe(v, (*path, jtu.SequenceKey(i)), names) for i, v in enumerate(node)]}
    if kind in _DICTS:
        items = [[_key(k), _describe(v, (*path, jtu.DictKey(k)), names)] for k, v in node.items()]
        return {_DICTS[kind]: items}
    children, _ = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    items = [[jtu.keystr(key, simple=True), _describe(child, (*path, *key), names)] for key, child in children]
    return {"node": [kind.__name__, items]}


def _key(key: Any) -> Any:
    """JSON for the key of a dict. A key that is not a plain value comes back as its text."""
    try:
        return encode_plain(key)
    except CheckpointError:
        return str(key)


def build(structure: Any, leaf: Callable[[str], Any], depth: int = 0) -> Any:
    """The tree of a structure, `leaf(name)` being its leaves."""
    if structure is None:
        return None
    if isinstance(structure, str):
        return leaf(structure)
    if depth > MAX_DEPTH or not isinstance(structure, dict) or len(structure) != 1:
        raise CheckpointError(f"holds a structure it should not: {structure!r:.100}.")
    ((kind, body),) = structure.items()
    if kind == "node" and isinstance(body, list) and len(body) == 2:
        kind, body = "dict", body[1]
    if not isinstance(body, list):
        raise CheckpointError(f"holds a structure it should not: {structure!r:.100}.")
    if kind in ("list", "tuple"):
        items = [build(item, leaf, depth + 1) for item in body]
        return items if kind == "list" else tuple(items)
    if kind in ("dict", "ordered_dict"):
        wrong = [item for item in body if not isinstance(item, list) or len(item) != 2]
        if wrong:
            raise CheckpointError(f"holds a key and value that are {wrong[0]!r:.100}.")
        pairs = [(decode_plain(k), build(v, leaf, depth + 1)) for k, v in body]
        return dict(pairs) if kind == "dict" else collections.OrderedDict(pairs)
    raise CheckpointError(f"holds a structure of the unknown kind {kind!r:.100}.")
