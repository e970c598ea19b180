"""`export`: packed arrays as a folder that other programs read, where that rounds nothing.

A weight is written as PyTorch has it, (out, in). Which axis is `in` say the blocks or the scales, and the name: the
last one of a `weight`, the second last of a `kernel`, or where nothing else tells.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eformer._core import ImplicitArray
from eformer._formats.floating.array import ArrayFloat
from eformer._formats.int8.array import Array8B
from eformer._formats.integer.array import ArrayInt
from eformer._formats.permuted.array import PermutedArray
from eformer._jax import traces
from eformer._kernels.formats import scale_values, unpack
from eformer.errors import CheckpointError

from ..checkpoint.load import LazyCheckpoint
from ..safetensors.writing import write_file, write_json
from ..tree.describe import Leaf, host
from ..tree.structure import named_leaves
from . import layouts
from .configuration import CONFIG_KEYS, read_json
from .packed import open_checkpoint

Stored = dict[str, Any]  # arrays by suffix
Note = dict[str, Any]  # what the configuration says of the weight


class _Unfit(ValueError):
    """An array that a scheme cannot hold without rounding."""


def _input_axis(q: Any, name: str) -> int:
    """The axis that products contract, -1 or -2."""
    inner = q.w if isinstance(q, PermutedArray) else q
    named = {"weight": -1, "kernel": -2}.get(name.rpartition(".")[2])
    found, scale = getattr(inner, "blocked", None), getattr(inner, "scale", None)
    if found is None and scale is not None and scale.ndim == 2 and scale.size > 1:
        found = -2 if scale.shape[0] == 1 else -1
    if found is not None and named is not None and found - (inner.ndim if found >= 0 else 0) != named:
        what = f"shares scales along axis {found}, the outputs of a {name.rpartition('.')[2]!r}"
        raise _Unfit(f"{what}; it must be along the inputs: quantize with axis={named}.")
    return found or named or -2


def _rows(q: Any, codes: jax.Array, name: str) -> tuple[jax.Array, jax.Array]:
    """Codes (out, in) of a matrix without blocks, and its scales."""
    return (codes, q.scale) if _input_axis(q, name) == -1 else (codes.T, q.scale.T)


def _codes(q: Any) -> jax.Array:
    """Codes (..., out, in), a byte each."""
    if isinstance(q, ArrayInt):
        return jnp.moveaxis(q.codes(), q.blocked, -1)
    codes = unpack(q.codes, q.kernel_format)
    return codes.reshape(*codes.shape[:-2], codes.shape[-2] * codes.shape[-1])[..., : q.shape[q.blocked]]


def _integers(q: Any, bits: tuple[int, ...], kinds: str) -> tuple[ArrayInt, Any, int]:
    """The array of integers, how its inputs were sorted (None: not at all), and how many share a scale."""
    order = q.order if isinstance(q, PermutedArray) else None
    q = q if order is None else q.w
    if not isinstance(q, ArrayInt) or q.bits not in bits or q.ndim < 2:
        raise _Unfit(f"is {q!r}; that format holds matrices of integers of {', '.join(map(str, bits))} bits{kinds}.")
    return q, order, min(q.block_size, q.shape[q.blocked])


def _zero_points(q: ArrayInt) -> Any:
    if q.bias is not None or (q.zero is not None and not jnp.issubdtype(q.zero.dtype, jnp.integer)):
        raise _Unfit("has biases, or zero points that are not integers.")
    return q.zero


def _signed(words: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(words, jnp.int32)


def gptq(q: Any, name: str) -> tuple[Stored, Note]:
    _input_axis(q, name)
    q, order, group = _integers(q, (2, 3, 4, 8), "")
    zero, codes = _zero_points(q), _codes(q)
    size = codes.shape[-1]
    if q.ndim != 2 or size * q.bits % 32:
        raise _Unfit(f"has the shape {list(q.shape)}; that format holds matrices whose inputs fill words of 32 bits.")
    place = jnp.arange(size) if order is None else jnp.argsort(order)
    points = jnp.full(q.scale.shape, 2 ** (q.bits - 1) - 1, jnp.uint8) if zero is None else zero.astype(jnp.uint8)
    stored = {
        ".qweight": _signed(layouts.to_words(codes[:, place], q.bits).T),
        ".qzeros": _signed(layouts.to_words(points.T, q.bits)),
        ".scales": q.scale.T,
        ".g_idx": (place // group).astype(jnp.int32),
    }
    form = {"sym": zero is None, "checkpoint_format": "gptq" if zero is None else "gptq_v2"}
    return stored, {"bits": q.bits, "group_size": group, "desc_act": order is not None, **form, "rows": group == size}


def mlx(q: Any, name: str) -> tuple[Stored, Note]:
    _input_axis(q, name)
    if isinstance(q, ArrayFloat) and q.kind in ("mxfp4", "mxfp8", "nvfp4") and q.tensor_scale is None:
        bits = 8 // q.row.per_byte
        stored = {".weight": layouts.to_words(_codes(q), bits), ".scales": layouts.unsigned(q.scale)}
        return stored, {"group_size": q.block_size, "bits": bits, "mode": q.kind}
    q, order, group = _integers(q, (2, 3, 4, 5, 6, 8), ", MXFP4, MXFP8, and NVFP4 without a scale of the tensor")
    bias = q.bias
    if q.symmetric and q.scale.dtype.itemsize == 2:
        bias = q.scale * -(2 ** (q.bits - 1))  # exact: a power of two
    if order is not None or bias is None or group not in (32, 64, 128) or q.pad:
        holds = "biases of 16 bits, or symmetric codes with such scales (ArrayInt.quantize(w, scale_dtype='bfloat16'))"
        raise _Unfit(f"is {q!r} in blocks of {group}; MLX has whole blocks of 32, 64 or 128 with {holds}.")
    stored = {".weight": layouts.to_words(_codes(q), q.bits), ".scales": q.scale, ".biases": bias}
    return stored, {"group_size": group, "bits": q.bits, "mode": "affine"}


def fp8(q: Any, name: str, scale: str = ".weight_scale_inv") -> tuple[Stored, Note]:
    if not isinstance(q, ArrayFloat) or q.kind not in ("fp8", "fp8_e5m2") or q.ndim != 2:
        raise _Unfit(f"is {q!r}; that format holds matrices of FP8.")
    e5m2 = q.kind == "fp8_e5m2"
    dtype = jnp.float8_e5m2 if e5m2 else jnp.float8_e4m3fn
    if q.blocked is not None:
        _input_axis(q, name)
        codes, numbers, note = _codes(q), q.scale, {"weight_block_size": [128, 128]}
    else:
        codes, numbers = _rows(q, q.codes, name)
        scale, note = ".weight_scale", {}
    if numbers.dtype == jnp.uint8:
        numbers = lax.bitcast_convert_type(numbers, jnp.float8_e8m0fnu)
    return {".weight": lax.bitcast_convert_type(codes, dtype), scale: numbers}, {
        **note,
        "fmt": "e5m2" if e5m2 else "e4m3",
    }


def compressed_tensors(q: Any, name: str) -> tuple[Stored, Note]:
    if isinstance(q, Array8B) and q.ndim == 2:
        weight, scale = _rows(q, q.weight, name)
        note = _note("int-quantized", 8, "int", "channel" if scale.shape[0] > 1 else "tensor")
        if scale.shape[1] == 1:
            return {".weight": weight, ".weight_scale": scale}, note
    if isinstance(q, ArrayFloat) and q.kind in ("fp8", "fp8_e5m2"):
        stored, _ = fp8(q, name, ".weight_scale")
        if (scale := stored[".weight_scale"]).dtype == jnp.float8_e8m0fnu:  # exact: powers of two
            stored[".weight_scale"] = scale_values(lax.bitcast_convert_type(scale, jnp.uint8))
        strategy = "block" if q.blocked is not None else "tensor" if stored[".weight_scale"].size == 1 else "channel"
        more = {"block_structure": [128, 128]} if strategy == "block" else {}
        return stored, {**_note("float-quantized", 8, "float", strategy), **more}
    if isinstance(q, ArrayFloat) and q.kind in _FLOATS and q.ndim == 2 and not q.pad:
        return _floats_in_blocks(q, name)
    _input_axis(q, name)
    q, order, group = _integers(
        q, (2, 3, 4, 5, 6, 8), ", rows of INT8, FP8, and whole blocks of MXFP4, MXFP8 and NVFP4"
    )
    if q.ndim != 2:
        raise _Unfit(f"has the shape {list(q.shape)}; that format holds matrices.")
    zero, codes, (out, size) = _zero_points(q), _codes(q), (q.scale.shape[0], q.shape[q.blocked])
    place = jnp.arange(size) if order is None else jnp.argsort(order)
    stored = {
        ".weight_packed": _signed(layouts.to_words(codes[:, place], q.bits)),
        ".weight_scale": q.scale,
        ".weight_shape": jnp.array([out, size], jnp.int32),
    }
    if zero is not None:
        stored[".weight_zero_point"] = _signed(layouts.to_words(zero.astype(jnp.uint8).T, q.bits).T)
    if order is not None:
        stored[".weight_g_idx"] = (place // group).astype(jnp.int32)
    note = _note(
        "pack-quantized", q.bits, "int", "channel" if group == size else "group", group if group < size else None
    )
    return stored, {**note, "symmetric": zero is None, **({} if order is None else {"actorder": "group"})}


# The name of the format, how its scales are shared, and their type.
_FLOATS = {
    "mxfp4": ("mxfp4-pack-quantized", "group", "torch.uint8"),
    "mxfp8": ("mxfp8-quantized", "group", "torch.uint8"),
    "nvfp4": ("nvfp4-pack-quantized", "tensor_group", "torch.float8_e4m3fn"),
}


def _floats_in_blocks(q: ArrayFloat, name: str) -> tuple[Stored, Note]:
    _input_axis(q, name)
    form, strategy, dtype = _FLOATS[q.kind]
    codes, bits = _codes(q), 8 // q.row.per_byte
    note = {**_note(form, bits, "float", strategy, q.block_size), "scale_dtype": dtype}
    if bits == 8:
        return {".weight": lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), ".weight_scale": q.scale}, note
    stored = {".weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, ".weight_scale": q.scale}
    if q.kind == "nvfp4":
        stored[".weight_global_scale"] = _reciprocal(jnp.ones(1) if q.tensor_scale is None else q.tensor_scale)
    return stored, note


def _reciprocal(factor: jax.Array) -> jax.Array:
    """What values were multiplied by before they were rounded: 1 over it is the factor. Not all numbers have one."""
    factor = factor.reshape(1)
    near = 1 / factor
    tried = jnp.concatenate([near, jnp.nextafter(near, 0), jnp.nextafter(near, jnp.inf)])
    fits = 1 / tried == factor
    if traces.is_concrete(factor) and not fits.any():
        raise _Unfit(
            f"has the scale {factor.item()!r} of the tensor, and that format holds only what is 1 / a float32."
        )
    return tried[jnp.argmax(fits)].reshape(1)


def _note(form: str, bits: int, kind: str, strategy: str, group: int | None = None) -> Note:
    sizes = {} if group is None else {"group_size": group}
    return {"format": form, "num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, **sizes}


# -- folders -----------------------------------------------------------------------------------------------------------


def _same(notes: Mapping[str, Note], method: str) -> Note:
    """One configuration for all weights."""
    first, found = next(iter(notes.items()))
    for name, note in notes.items():
        if note != found:
            what = f"would need {note}, and {first!r} needs {found}; {method} has one configuration for all weights."
            raise CheckpointError(what, tensor=name, fix="Quantize all weights alike.")
    return {"quantization_config": {"quant_method": method, **{k: v for k, v in found.items() if k != "rows"}}}


def _gptq_config(notes: Mapping[str, Note], dense: Sequence[str]) -> Note:
    """Rows of one group fit any configuration with groups of their size. All matrices of numbered layers are taken for
    quantized, unless a pattern of GPTQModel says that they are not."""
    rows = all(note["rows"] for note in notes.values())
    sizes = {"group_size": -1} if rows else {}
    stated = _same({k: {**note, **sizes, "rows": rows} for k, note in notes.items()}, "gptq")
    if left := [stem for stem in dense if re.search(r"\.\d+\.", stem)]:
        stated["quantization_config"]["dynamic"] = {f"-:^{re.escape(stem)}$": {} for stem in left}
    return stated


def _fp8_config(notes: Mapping[str, Note], dense: Sequence[str]) -> Note:
    stated = _same(notes, "fp8")
    stated["quantization_config"] |= {"activation_scheme": "dynamic", "modules_to_not_convert": [*dense]}
    return stated


def _mlx_config(notes: Mapping[str, Note], dense: Sequence[str]) -> Note:
    found = next(iter(notes.values()))
    stated = {**found, **{name: note for name, note in notes.items() if note != found}}
    return {"quantization": stated, "quantization_config": stated}


def _groups_config(notes: Mapping[str, Note], dense: Sequence[str]) -> Note:
    groups: dict[str, Any] = {}
    for name, note in notes.items():
        weights = {k: v for k, v in note.items() if k != "format"}
        groups.setdefault(json.dumps(note), {"targets": [], "weights": weights, "format": note["format"]})[
            "targets"
        ] += [name]
    forms = {group["format"] for group in groups.values()}
    named = {f"group_{i}": group for i, group in enumerate(groups.values())}
    form = forms.pop() if len(forms) == 1 else "mixed-precision"
    stated = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return {"quantization_config": {**stated, "config_groups": named, "ignore": [*dense]}}


Writer = Callable[[Any, str], tuple[Stored, Note]]
Configure = Callable[[Mapping[str, Note], Sequence[str]], Note]  # of notes, and the layers that stay dense
WRITERS: dict[str, tuple[Writer, Configure]] = {
    "gptq": (gptq, _gptq_config),
    "mlx": (mlx, _mlx_config),
    "fp8": (fp8, _fp8_config),
    "compressed-tensors": (compressed_tensors, _groups_config),
}


def export(source: Any, folder: str | os.PathLike[str], to: str, *, config: Mapping[str, Any] | None = None) -> Path:
    """Write packed arrays as a checkpoint of another program, bit for bit. Returns the folder.

    Args:
        source: a pytree of arrays, or the path of a checkpoint (what `open_checkpoint` takes).
        folder: where `model.safetensors` and `config.json` go; made if it is not there.
        to: "gptq", "mlx", "fp8" or "compressed-tensors".
        config: what else `config.json` says; by default what the one beside the source says.

    Dense arrays are written as they are. A packed array that the other program could only hold rounded is an error.
    """
    if to not in WRITERS:
        raise ValueError(f"{to=} is unknown; allowed are {', '.join(map(repr, WRITERS))}.")
    folder, (write, configure) = Path(folder), WRITERS[to]
    is_path = isinstance(source, (str, os.PathLike))
    named: Mapping[str, Any] = open_checkpoint(source) if is_path else dict(named_leaves(source)[0])
    notes: dict[str, Note] = {}
    leaves, owners, dtypes, dense = [], {}, set(), []
    for name in (*named, *getattr(named, "aliases", ())):  # tied weights are written once for each name
        value = named.abstract(named.known(name))[0] if isinstance(named, LazyCheckpoint) else named[name]
        leaf, note = _planned(name, value, write, to)
        leaves.append(leaf)
        dtypes |= {value.dtype.name} if note else set()
        owners |= dict.fromkeys(leaf.tensors, name)
        notes |= {_stem(name): note} if note else {}
        dense += [_stem(name)] if note is None and len(value.shape) == 2 and _stem(name) != name else []
    if not notes:
        raise CheckpointError(f"has no packed array to write as {to}.", file=source if is_path else None)

    @functools.lru_cache(maxsize=1)
    def made(name: str) -> Stored:
        value = named[name]
        with _refusing(name, to):
            return _stored(name, write(value, name)[0]) if isinstance(value, ImplicitArray) else {name: value}

    stated = {**(_beside(source) if config is None and is_path else config or {}), **configure(notes, dense)}
    if len(dtypes) == 1 and not {"dtype", "torch_dtype"} & set(stated):  # that of the values, which scales may not have
        stated = {"torch_dtype": dtypes.pop(), **stated}
    folder.mkdir(parents=True, exist_ok=True)
    tensors = [tensor for leaf in leaves for tensor in leaf.layout()]
    notice = {"format": "mlx" if to == "mlx" else "pt"}
    write_file(folder / "model.safetensors", tensors, notice, lambda tensor: host(made(owners[tensor])[tensor], tensor))
    write_json(folder / "config.json", stated)
    return folder


def _planned(name: str, value: Any, write: Any, to: str) -> tuple[Leaf, Note | None]:
    if not isinstance(value, ImplicitArray):
        if not hasattr(value, "dtype"):
            raise CheckpointError(f"is {value!r:.100}, not an array.", tensor=name, fix="Leave it out.")
        return Leaf(name, name, {name: value}), None
    note: Note = {}

    def stored(q: Any) -> Stored:
        made, found = write(q, name)
        note.update(found)
        return made

    with _refusing(name, to):
        return Leaf(name, name, _stored(name, jax.eval_shape(stored, value))), note


@contextlib.contextmanager
def _refusing(name: str, to: str) -> Iterator[None]:
    """Says of which tensor it is that a format cannot hold it."""
    try:
        yield
    except _Unfit as err:
        fix = "Quantize it in a format that needs no rounding there, or materialize it."
        raise CheckpointError(f"cannot be written as {to}: it {err}", tensor=name, fix=fix) from err


def _stem(name: str) -> str:
    """The name of the layer; empty for the `weight` of a layer alone."""
    return f".{name}".removesuffix(".weight").removesuffix(".kernel")[1:]


def _stored(name: str, parts: Stored) -> Stored:
    return {f"{_stem(name)}{suffix}".removeprefix("."): array for suffix, array in parts.items()}


def _beside(source: Any) -> Note:
    """The configuration of the model at a path, without what it says of quantization."""
    path = Path(source)
    found = read_json((path if path.is_dir() else path.parent) / "config.json")
    return {key: value for key, value in found.items() if key not in CONFIG_KEYS}
