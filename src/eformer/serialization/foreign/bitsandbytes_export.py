"""State dicts for bitsandbytes, which loads them as its own NF4 weights."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from eformer._core import ImplicitArray
from eformer._formats.nf4.array import ArrayNF4, CompressedAbsmax
from eformer._formats.nf4.codec import CODEBOOK, DYNAMIC_MAP, GROUP
from eformer.errors import CheckpointError

from ..locating import about
from ..tree.structure import named_leaves
from .bitsandbytes import BLOCKS, DTYPES, STATE


def to_bitsandbytes(tree: Any) -> dict[str, np.ndarray]:
    """A state dict for bitsandbytes: each `ArrayNF4` as its entries, dense arrays as they are.

    The weight of PyTorch is the one with the blocked axis last: a kernel (in, out) with blocks along its first axis,
    the default, becomes (out, in), and an array with blocks along its last axis keeps its shape.
    """
    state: dict[str, np.ndarray] = {}
    for name, leaf in named_leaves(tree)[0]:
        with about(None, name):
            if isinstance(leaf, ArrayNF4):
                state.update(_exported(leaf, name))
            elif isinstance(leaf, ImplicitArray) or not hasattr(leaf, "dtype"):
                what = f"is a {type(leaf).__name__}; only ArrayNF4 and dense arrays can be exported."
                raise CheckpointError(what, fix="Materialize it first.")
            else:
                state[name] = np.asarray(leaf)
    return state


def _exported(q: ArrayNF4, name: str) -> dict[str, np.ndarray]:
    if q.ndim > 2 and q.blocked != -1:
        raise CheckpointError(
            f"is a stack {list(q.shape)} with blocks along axis {q.blocked}.", fix="Export its slices."
        )
    if q.pad or q.block_size not in BLOCKS or q.dtype.name not in DTYPES:
        raise CheckpointError(
            f"cannot be held by bitsandbytes: {q!r} has blocks of {q.block_size} and {q.pad} values of padding.",
            fix=f"Quantize with a block size in {BLOCKS} that divides the axis, and a dtype in {DTYPES}.",
        )
    packed = np.asarray(q.packed)
    shape = (*packed.shape[:-2], packed.shape[-2] * q.block_size)
    details: dict[str, Any] = {
        "quant_type": "nf4", "blocksize": q.block_size, "dtype": q.dtype.name, "shape": list(shape)
    }  # fmt: skip
    # Tables are copied: `save` stores an array that appears twice only once, and bitsandbytes wants each.
    parts = {"": packed.reshape(-1, 1), ".quant_map": CODEBOOK.copy()}
    absmax = q.absmax
    if isinstance(absmax, CompressedAbsmax) and absmax.core == absmax.codes.ndim:
        offset = float(absmax.offset)
        details |= {"nested_blocksize": GROUP, "nested_dtype": "float32", "nested_offset": offset}
        nested = {".nested_absmax": np.asarray(absmax.scale).reshape(-1), ".nested_quant_map": DYNAMIC_MAP.copy()}
        parts |= {".absmax": np.asarray(absmax.codes).reshape(-1), **nested}
    else:
        parts[".absmax"] = np.asarray(q.part(q.scale_part)).astype(np.float32).reshape(-1)
    parts[f"{STATE}nf4"] = np.frombuffer(json.dumps(details).encode(), np.uint8)
    return {f"{name}{suffix}": array for suffix, array in parts.items()}
