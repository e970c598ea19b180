"""The leaves of any model (dicts, Flax Linen and NNX, Equinox, Haiku): their paths, and what they are for.

Implicit arrays are leaves. NNX modules are opened with `nnx.split`, which sees a shared variable once.

What a leaf is for, its role, is found by its name, its shape, its neighbours and, where there is one, the layer that
holds it. It decides two things: whether the leaf is quantized at all, and along which axis. Nothing depends on it for
correctness: any axis gives a right model, the right one gives a quick and a slightly more accurate one.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.tree_util as jtu

from eformer._core import tree_flatten_with_path_with_implicit


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf, the names on its path, and the object that holds it (None when that cannot be found)."""

    names: tuple[str, ...]
    value: Any
    parent: Any = None

    @property
    def path(self) -> str:
        return "/".join(self.names)


def named_leaf(name: str, value: Any) -> Leaf:
    """A leaf of a file, whose names are joined by dots or slashes."""
    return _taken_apart(Leaf((name,), value))


def _taken_apart(leaf: Leaf) -> Leaf:
    """The same leaf by the single names: a key may hold several, as those of a state dict or of Haiku do."""
    return dataclasses.replace(leaf, names=tuple(part for name in leaf.names for part in re.split(r"[./]", name)))


@dataclasses.dataclass(frozen=True)
class Tree:
    """A model taken apart: its leaves, and how to put others in their place."""

    leaves: tuple[Leaf, ...]
    rebuild: Callable[[Iterable[Any]], Any]


def open_tree(params: Any) -> Tree:
    """Take a model apart.

    >>> tree = open_tree({"dense": {"kernel": 1.0, "bias": 2.0}})
    >>> [leaf.path for leaf in tree.leaves]
    ['dense/bias', 'dense/kernel']
    >>> tree.rebuild([3.0, 4.0])
    {'dense': {'bias': 3.0, 'kernel': 4.0}}
    """
    if params is None or isinstance(params, (str, bytes, os.PathLike)):
        raise TypeError(
            f"a model is a pytree of arrays or a module, got {params!r:.100} of type {type(params).__name__}. Of a "
            "file, load(path) gives the arrays, and quantize_file(source, target) writes them quantized."
        )
    state, root, merge = _state(params)
    pairs, treedef = tree_flatten_with_path_with_implicit(state)
    leaves = tuple(_leaf(path, value, root) for path, value in pairs)
    return Tree(leaves, lambda values: merge(treedef.unflatten(values)))


def map_tree(f: Callable[[Any], Any], params: Any, is_leaf: Callable[[Any], bool]) -> Any:
    """`jax.tree.map`, for NNX modules too."""
    state, _, merge = _state(params)
    return merge(jtu.tree_map(f, state, is_leaf=is_leaf))


def _state(params: Any) -> tuple[Any, Any, Callable[[Any], Any]]:
    """The pytree of a model, the model that has its names, and what makes a model of such a tree."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(params, nnx.Module):
        return params, params, lambda tree: tree
    # Adapters are modules there; here they are arrays. By name, because what depends on Flax comes after this room.
    adapters = importlib.import_module("eformer.integrations.nnx")
    root = adapters.joined(params)
    graph, state = nnx.split(root)
    return state, root, lambda tree: adapters.taken_apart(nnx.merge(graph, tree))


def nbytes_of(array: Any) -> int:
    """Bytes of one stored array, or of what has its shape and dtype."""
    return math.prod(array.shape) * array.dtype.itemsize


def _leaf(path: Sequence[Any], value: Any, root: Any) -> Leaf:
    names = [jtu.keystr((key,), simple=True) for key in path]
    holders = _holders(root, path)
    # A variable or a box with metadata around one array is not part of the name a person gives to that array.
    while len(names) > 1 and names[-1] == "value" and type(holders[-1]).__module__.startswith("flax."):
        names.pop()
        holders.pop()
    return Leaf(tuple(names), value, holders[-1])


def _holders(root: Any, path: Sequence[Any]) -> list[Any]:
    """The objects on the way to a leaf, the one that holds it last; None from where the way is lost."""
    found = [root]
    for key in path[:-1]:
        found.append(_child(found[-1], key))
    return found


def _child(node: Any, key: Any) -> Any:
    name: Any = getattr(key, "key", getattr(key, "name", getattr(key, "idx", None)))
    try:
        by_attribute = isinstance(key, jtu.GetAttrKey) or not hasattr(node, "__getitem__")
        return getattr(node, str(name)) if by_attribute else node[name]
    except (AttributeError, KeyError, IndexError, TypeError):
        return None


# What `skip=` may name, and the kind of leaf each stands for.
GROUPS = {
    "norms": "norm",
    "biases": "bias",
    "routers": "router",
    "positions": "position",
    "heads": "head",
    "embeddings": "embedding",
    "convolutions": "conv",
    "constants": "constant",
    "unsure": "unsure",
}

# Parts of weights that another program quantized: rounding them again would ruin the weight.
_SCALES = re.compile(
    r"scales|qzeros|(nested_)?absmax|(.*_)?scale_inv|weight_(global_)?scale(_2)?|weight_zero_point|scb"
)
_MATRIX = ("kernel", "w", "weight")
# Names that stand for an operand of a product, whatever the shape.
_OPERAND = re.compile(r"^w\w?\d?$|^[qkvo]$|kernel|weight|proj|linear|dense|einsum|lora|embed|head|(^|_)fc")
_BIAS = re.compile(r"^(bias|biases|.*_bias)$")
# Names are compared by their parts: "layer_norm", "norm1" and "LayerNorm_0" have a part "norm", "denormalize" has not.
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_NORM = re.compile(r"(?!de|un)[a-z]*norms?|normali[sz](e|er|ation)")
_NORM_LEAF = ("scale", "gamma", "beta", "offset")
_POSITION = re.compile(r"positions?|positional|posemb[a-z]*")
# What a layer with a norm or positions in its name is when it is a matrix after all.
_PROJECTION = frozenset(("proj", "projection", "linear", "dense"))
_POSITIONWISE = frozenset(("wise", "ff", "ffn", "ffw", "feed", "feedforward", "mlp")) | _PROJECTION
_ROUTER = re.compile(r"router|gate_inp|expert_gate")
_HEAD = re.compile(r"^(lm_head|head|classifier|logits|unembed(ding)?|embed_out|output_projection)$")
_EMBEDDING = re.compile(r"embed|embd|^wte$|^emb$")
# What scales, masks, rotates, decays or counts, and what is added to a sequence: tensors of their own, not of a layer.
_CONSTANT = frozenset(
    ("absmax", "cached", "cos", "decay", "freq", "freqs", "log", "mask", "mean", "mix", "point", "scale", "scales")
    + ("scb", "sin", "std", "token", "tokens", "var", "zeros")
)
_STATE_SPACE = ("d", "ssm_a", "ssm_d", "r_k")
_SHORT = 16  # fewer entries than this along the second longest axis make a matrix that is more like a few vectors
_ATTENTION_IN = re.compile(r"^w?(q|k|v|query|key|value)(_proj)?$")
_ATTENTION_OUT = re.compile(r"^w?(o|out|output)(_proj)?$")
_QUERIES, _OUTPUTS = ("query", "q", "q_proj", "wq", "query_proj"), ("out", "o", "o_proj", "wo", "out_proj", "output")


@dataclasses.dataclass(frozen=True)
class Role:
    """The kind of a leaf, and its axes (counted from the end): contracted with activations, and kept by the product."""

    kind: str
    inputs: tuple[int, ...] = (-2,)
    outputs: tuple[int, ...] = (-1,)
    batch: int = 0  # leading axes that number matrices: layers of a stack, experts
    doubt: str = ""  # why it is unclear whether a product uses the leaf

    def axis(self, scales_many_axes: bool) -> int | tuple[int, ...]:
        """The axis to quantize along.

        Embeddings: the last, so that a row is looked up whole. Else the contracted one. A format whose scale may serve
        several axes (INT8) takes all contracted ones. Formats in blocks have one blocked axis; where several are
        contracted (the output kernel of attention) it is the last: the product is then one matrix product, instead of
        one per head and a sum.
        """
        if self.kind == "embedding":
            return -1
        if scales_many_axes:
            return self.inputs
        return self.inputs[0] if len(self.inputs) == 1 else -1


def roles_of(leaves: Sequence[Leaf]) -> list[Role]:
    """The role of every leaf of a model; a flat dict of joined names has those of the nested one."""
    apart = [_taken_apart(leaf) for leaf in leaves]
    leaves = apart if len({leaf.names for leaf in apart}) == len(apart) else leaves
    shapes = {leaf.names: tuple(getattr(leaf.value, "shape", ())) for leaf in leaves}
    return [_role(leaf, shapes) for leaf in leaves]


def _role(leaf: Leaf, shapes: Mapping[tuple[str, ...], tuple[int, ...]]) -> Role:
    shape = shapes[leaf.names]
    kind = _kind(leaf, shapes)
    if kind == "conv":
        role = _convolution(leaf, shape)
    elif kind == "embedding" or len(shape) < 2:
        role = Role(kind, batch=max(len(shape) - 2, 0))
    else:
        inputs, outputs = _matrix_axes(leaf, shapes)
        role = Role(kind, inputs, outputs, len(shape) - len(inputs) - len(outputs))
    doubt = _doubt(leaf, role, shape) if kind in ("conv", "embedding", "kernel", "head") else ""
    return dataclasses.replace(role, kind="unsure", doubt=doubt) if doubt else role


def _kind(leaf: Leaf, shapes: Mapping[tuple[str, ...], Any]) -> str:
    names = [name.lower() for name in leaf.names]
    name, holders = (names[-1] if names else ""), names[:-1]
    parts = [_parts(part) for part in leaf.names[-2:]]
    if "opt_state" in holders:  # moments look like the matrices they belong to
        return "optimizer"
    if _SCALES.fullmatch(name):
        return "scale"
    if _BIAS.match(name) or (name == "b" and _is_bias(leaf, shapes)):
        return "bias"
    if name in _NORM_LEAF or any(map(_is_norm, [_parts(type(leaf.parent).__name__), *parts])):
        return "norm"
    if any(map(_is_position, parts)):
        return "position"
    if _is_constant(name, holders, parts, shapes, leaf.names[:-1]):
        return "constant"
    if any(map(_ROUTER.search, names)) or _is_gate_of_experts(leaf, shapes):
        return "router"
    if any(map(_HEAD.match, names[-2:])):
        return "head"
    if _is_convolution(leaf, name, holders, shapes[leaf.names]):
        return "conv"
    return "embedding" if _is_embedding(leaf, name, holders) else "kernel"


def _is_bias(leaf: Leaf, shapes: Mapping[tuple[str, ...], Any]) -> bool:
    """A leaf called `b` is a bias if it is no matrix, or if a matrix beside it has its axes and one more."""
    shape, beside = shapes[leaf.names], [shapes.get((*leaf.names[:-1], name), ()) for name in _MATRIX]
    without_one = [other[:i] + other[i + 1 :] for other in beside for i in range(len(other))]
    return len(shape) < 2 or shape in without_one


def _is_constant(name: str, holders: Sequence[str], parts: Any, shapes: Any, beside: tuple[str, ...]) -> bool:
    if name in _MATRIX:  # of a layer: only frequencies are stored so
        return bool(holders) and holders[-1].endswith(("freqs", "freq"))
    own = parts[-1] if parts else []
    if name in _STATE_SPACE and (name != "d" or (*beside, "A_log") in shapes):
        return True
    if any(part.startswith("emb") for part in own) or not _PROJECTION.isdisjoint(own):
        return False
    return not _CONSTANT.isdisjoint(own) or (own[:1] == ["time"] and len(own) > 1)


def _doubt(leaf: Leaf, role: Role, shape: Sequence[int]) -> str:
    """Why a leaf that looks like an operand of a product may be none, or nothing."""
    if len(shape) < 2:
        return ""
    longest = sorted(shape)[-2:]
    thin = longest[0] < _SHORT and longest[1] >= _SHORT * longest[0]
    if longest[0] == 1:
        return "it is a vector, all its axes but one have length 1"
    own = next((n for n in reversed(leaf.names) if n not in _MATRIX), "").lower()
    if role.kind == "conv" and shape[role.inputs[0]] == 1:
        return "it filters channels one by one"
    if thin and (
        ("conv" in own and len(shape) == 2) or (role.kind == "embedding" and leaf.names[-1] not in ("kernel", "w"))
    ):
        return f"it is a table of {longest[0]} rows"
    if any(map(_OPERAND.search, (name.lower() for name in leaf.names[-2:]))):
        return ""
    if len(shape) > 2 and shape[0] == 1:
        return "its first axis has length 1, like something that is added to a batch"
    return f"it has only {longest[0]} rows, and its name does not say what it is for" if thin else ""


def _parts(name: str) -> list[str]:
    """The words of a name, without numbers.

    >>> _parts("LayerNorm_0"), _parts("pos_embed"), _parts("RMSNorm1")
    (['layer', 'norm'], ['pos', 'embed'], ['rms', 'norm'])
    """
    return [part.lower() for part in _PART.findall(name)]


def _is_norm(parts: Sequence[str]) -> bool:
    if not parts or parts[-1] in _PROJECTION:
        return False
    return "ln" in (parts[0], parts[-1]) or any(map(_NORM.fullmatch, parts))


def _is_position(parts: Sequence[str]) -> bool:
    if not parts or not _POSITIONWISE.isdisjoint(parts):
        return False
    table = any(part.startswith(("emb", "bias", "pos")) for part in parts)
    abbreviated = parts[0] == "pos" or (table and not {"pos", "rel", "relpos", "relative"}.isdisjoint(parts))
    return abbreviated or parts == ["wpe"] or any(map(_POSITION.fullmatch, parts))


def _is_gate_of_experts(leaf: Leaf, shapes: Mapping[tuple[str, ...], Any]) -> bool:
    """A layer called `gate` is a router when experts stand next to it, and one half of an MLP otherwise.

    Experts are called so, or are a stack of matrices, one for every output of the gate.
    """
    if "gate" not in leaf.names[-3:]:
        return False
    beside = leaf.names[: len(leaf.names) - 1 - leaf.names[::-1].index("gate")]
    depth, own = len(beside), shapes[leaf.names]
    near = [other for other in shapes if other[:depth] == beside and len(other) > depth]
    stacks = [shapes[other] for other in near if len(shapes[other]) == len(own) + 1]
    return any("expert" in other[depth].lower() for other in near) or any(min(own) in s[:-2] for s in stacks if own)


def _is_embedding(leaf: Leaf, name: str, holders: Sequence[str]) -> bool:
    if hasattr(leaf.parent, "num_embeddings"):
        return True
    if name in ("kernel", "w"):  # of a layer that has "embed" in its name: a projection
        return False
    last = holders[-1] if name == "weight" and holders else name
    return _EMBEDDING.search(last) is not None


def _is_convolution(leaf: Leaf, name: str, holders: Sequence[str], shape: Sequence[int]) -> bool:
    if hasattr(leaf.parent, "num_spatial_dims") or hasattr(leaf.parent, "kernel_size"):
        return True
    window = name == "weight" and len(shape) == 4 and max(shape[-2:]) <= 32 and shape[-1] == shape[-2]
    return window or (len(shape) >= 3 and any("conv" in name for name in holders[-1:]))


def _convolution(leaf: Leaf, shape: Sequence[int]) -> Role:
    """(spatial..., in, out) in Flax and Haiku, (out, in, spatial...) in Equinox and PyTorch."""
    if leaf.names[-1] != "weight":
        return Role("conv")
    spatial = getattr(leaf.parent, "num_spatial_dims", len(shape) - 2)
    return Role("conv", (-1 - spatial,), (-2 - spatial,), len(shape) - 2 - spatial)


def _matrix_axes(leaf: Leaf, shapes: Mapping[tuple[str, ...], Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    name, shape = leaf.names[-1] if leaf.names else "", shapes[leaf.names]
    if name == "weight":
        return (-1,), (-2,)
    ins, outs = getattr(leaf.parent, "in_features", None), getattr(leaf.parent, "out_features", None)
    if isinstance(ins, tuple) and isinstance(outs, tuple) and len(ins) + len(outs) <= len(shape):
        return _last(len(ins), len(outs))
    n_in, n_out = _attention(leaf, shapes) or _by_bias(leaf, shapes) or (1, 1)
    return _last(n_in, n_out)


def _last(n_in: int, n_out: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(range(-n_in - n_out, -n_out)), tuple(range(-n_out, 0))


def _attention(leaf: Leaf, shapes: Mapping[tuple[str, ...], Any]) -> tuple[int, int] | None:
    """Kernels that keep heads as an axis: (model, heads, size) in, (heads, size, model) out.

    A stack of matrices has three axes too. The query and output kernels beside a leaf tell which it is.
    """
    ndim, own = len(shapes[leaf.names]), 2 if leaf.names[-1:] and leaf.names[-1] in _MATRIX else 1
    if ndim < 3 or len(leaf.names) < own:
        return None
    owner, beside, ending = leaf.names[-own], leaf.names[:-own], leaf.names[len(leaf.names) - own + 1 :]
    inward, outward = _ATTENTION_IN.match(owner), _ATTENTION_OUT.match(owner)
    if not (inward or outward):
        return None
    query = next((shapes[p] for n in _QUERIES if (p := (*beside, n, *ending)) in shapes), None)
    out = next((shapes[p] for n in _OUTPUTS if (p := (*beside, n, *ending)) in shapes), None)
    if query is None or out is None or not len(query) == len(out) == ndim:
        return None
    if (*query[:-2], query[-1], query[-2]) == tuple(out):  # both are stacks
        return None
    if query[-2:] != out[-3:-1] or query[-3] != out[-1] or query[:-3] != out[:-3]:
        return None
    return (1, 2) if inward else (2, 1)


def _by_bias(leaf: Leaf, shapes: Mapping[tuple[str, ...], Any]) -> tuple[int, int] | None:
    """A kernel (batch..., in, out...) whose bias is (batch..., out...). As many axes as fit are batch axes."""
    shape, bias = shapes[leaf.names], shapes.get((*leaf.names[:-1], "bias"), ())
    if len(bias) != len(shape) - 1:
        return None
    fitting = [batch for batch in range(len(shape) - 1) if bias == shape[:batch] + shape[batch + 1 :]]
    return (1, len(bias) - fitting[-1]) if fitting else None
