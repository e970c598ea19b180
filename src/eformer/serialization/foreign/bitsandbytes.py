"""NF4 state dicts of bitsandbytes, read and written without it.

It stores a weight `W` of PyTorch, shape (out, in), as six entries: `W` (codes, two a byte, flat), `W.absmax`,
`W.quant_map`, `W.quant_state.bitsandbytes__nf4` (JSON as bytes) and, if absmax is compressed, `W.nested_absmax` and
`W.nested_quant_map`. Its blocks run over the flattened weight; where `in` is a multiple of the block size they are the
blocks of `ArrayNF4` along the last axis, byte for byte.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from eformer._core import ImplicitArray
from eformer._formats.nf4.array import ArrayNF4, CompressedAbsmax
from eformer._formats.nf4.codec import CODEBOOK, DYNAMIC_MAP, GROUP
from eformer.errors import CheckpointError

from ..safetensors.header import about, is_count, named_dtype, parse_json
from ..tree.structure import named_leaves

STATE = ".quant_state.bitsandbytes__"
PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
DTYPES = ("float32", "float16", "bfloat16")


def from_bitsandbytes(state: Mapping[str, Any], *, fallback: Literal["error", "dense"] = "error") -> dict[str, Any]:
    """Turn the entries of quantized weights into `ArrayNF4`s of shape (out, in); other entries stay as they are.

    For `x @ w` of JAX use `w.T`, which moves nothing.

    Args:
        state: a state dict of NumPy, JAX or PyTorch arrays, or what `open_lazy` gives.
        fallback: what to do with a weight that cannot be an `ArrayNF4` of its shape (blocks that cross rows, FP4,
            another table): "error" refuses it, "dense" decodes it, exactly.
    """
    if fallback not in ("error", "dense"):
        raise ValueError(f"{fallback=} is unknown; allowed are 'error' and 'dense'.")
    weights = {key.split(STATE)[0]: key for key in state if STATE in key}
    parts = {f"{name}.{part}" for name in weights for part in PARTS} | set(weights.values())
    made: dict[str, Any] = {}
    for key in state:
        if key in weights:
            with about(None, key):
                made[key] = StoredWeight(state, key, weights[key]).restored(fallback)
        elif key not in parts:
            made[key] = state[key]
    missing = [name for name in weights if name not in made]
    if missing:
        raise CheckpointError("has a quantization state, but no codes.", tensor=missing[0])
    return made


class StoredWeight:
    """One weight, its entries checked against each other."""

    def __init__(self, state: Mapping[str, Any], name: str, key: str):
        found = {part: _array(state[f"{name}.{part}"]) for part in PARTS if f"{name}.{part}" in state}
        details = parse_json(_array(state[key]).astype(np.uint8, copy=False).tobytes(), None)
        if not isinstance(details, dict) or not {"absmax", "quant_map"} <= set(found):
            lacking = sorted({"absmax", "quant_map"} - set(found)) or ["a quantization state that is a JSON object"]
            raise CheckpointError(f"lacks {' and '.join(lacking)}.", fix="Fetch all files that belong to it again.")
        self.kind, self.dtype = details.get("quant_type"), details.get("dtype")
        shape, block = details.get("shape"), details.get("blocksize")
        if not isinstance(shape, list) or not all(map(is_count, shape)) or math.prod(shape) > 1 << 50:
            raise CheckpointError(f"has the shape {shape!r:.100}.")
        if self.dtype not in DTYPES or not is_count(block) or block not in BLOCKS:
            raise CheckpointError(f"has the dtype {self.dtype!r:.100} and blocks of {block!r:.100}.")
        self.shape, self.block = tuple(shape), int(block)
        self.size = math.prod(shape)
        self.blocks = math.ceil(self.size / self.block)
        # Bytes, which `quant_storage` may have called values of another dtype.
        codes = np.ascontiguousarray(_array(state[name]))
        codes = codes.reshape(-1).view(np.uint8) if codes.dtype.name in DTYPES else codes
        self.codes = _sized(codes, math.ceil(self.size / 2), "uint8", "codes")
        self.table = _sized(found["quant_map"], 16, "float32", "quant_map")
        self.nested = self._nested(found, details) if "nested_absmax" in found else None
        dtype = "uint8" if self.nested else "float32"
        self.absmax = _sized(found["absmax"], self.blocks, dtype, "absmax")

    def _nested(self, found: Mapping[str, np.ndarray], details: Mapping[str, Any]) -> tuple[Any, Any, int, np.float32]:
        group, offset = details.get("nested_blocksize"), details.get("nested_offset")
        if not is_count(group) or not group or type(offset) is not float or "nested_quant_map" not in found:
            raise CheckpointError(f"has a nested absmax with blocks of {group!r:.100} and the offset {offset!r:.100}.")
        scale = _sized(found["nested_absmax"], math.ceil(self.blocks / group), "float32", "nested_absmax")
        table = _sized(found["nested_quant_map"], 256, "float32", "nested_quant_map")
        return scale, table, group, np.float32(offset)

    def restored(self, fallback: str) -> Any:
        obstacle = self._obstacle()
        if not obstacle:
            return self._packed()
        if fallback == "error":
            raise CheckpointError(obstacle, fix='Pass fallback="dense" to decode it, or quantize it again.')
        return self._dense()

    def _obstacle(self) -> str:
        if self.kind != "nf4" or not np.array_equal(self.table, CODEBOOK):
            return f"is quantized as {self.kind!r:.100} with a table that is not that of NF4."
        if not self.shape or self.shape[-1] % self.block:
            return f"has the shape {list(self.shape)}: its blocks of {self.block} values cross the ends of rows."
        return ""

    def _packed(self) -> ArrayNF4:
        rows = (*self.shape[:-1], self.shape[-1] // self.block)
        packed = jax.device_put(self.codes.reshape(*rows, self.block // 2))
        return ArrayNF4(packed, self._stored_absmax(rows), self.block, axis=-1, dtype=jnp.dtype(self.dtype))

    def _stored_absmax(self, rows: tuple[int, ...]) -> Any:
        """Compressed if it is a matrix in groups of 256 with the usual table, else expanded, which is exact too."""
        if self.nested is None:
            return jax.device_put(self.absmax.reshape(rows))
        scale, table, group, offset = self.nested
        if len(rows) <= 2 and group == GROUP and np.array_equal(table, DYNAMIC_MAP):
            codes = jax.device_put(self.absmax.reshape(rows))
            return CompressedAbsmax(codes, jax.device_put(scale), jnp.asarray(offset), core=len(rows))
        return jax.device_put(self._expanded().reshape(rows))

    def _expanded(self) -> np.ndarray:
        if self.nested is None:
            return self.absmax
        scale, table, group, offset = self.nested
        return table[self.absmax] * scale[np.arange(self.blocks) // group] + offset

    def _dense(self) -> jax.Array:
        codes = np.stack([self.codes >> 4, self.codes & 15], axis=-1).reshape(-1)[: self.size]
        values = self.table[codes] * self._expanded()[np.arange(self.size) // self.block]
        return jax.device_put(values.astype(named_dtype(self.dtype)).reshape(self.shape))


def _array(value: Any) -> np.ndarray:
    """A NumPy array of what may be an array of any library. (PyTorch cannot give bf16 to NumPy, but to JAX.)"""
    if hasattr(value, "__dlpack__") and not isinstance(value, (np.ndarray, jax.Array)):
        value = jax.dlpack.from_dlpack(value)
    return np.asarray(value)


def _sized(array: np.ndarray, size: int, dtype: str, what: str) -> np.ndarray:
    if array.size != size or array.dtype.name != dtype:
        raise CheckpointError(f"has {what} {array.dtype}{list(array.shape)}, but needs {size} values of {dtype}.")
    return np.ascontiguousarray(array).reshape(-1)


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
