"""Which tensors of a checkpoint of another program make up a quantized weight: by names, dtypes and shapes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from eformer.errors import CheckpointError

from ..safetensors.header import Entry
from . import bitsandbytes, compressed_integers, float_schemes, integer_schemes
from .configuration import words_of
from .scheme import FLOATS, Scheme, text_of

SCHEMES: tuple[Scheme, ...] = integer_schemes.SCHEMES + compressed_integers.SCHEMES + float_schemes.SCHEMES
# Tensors that mean nothing without others. These suffixes parameters of any model may have.
_COMMON = {"", ".weight", ".scale", ".scales", ".biases", "_scale", "_scales"}
_COMPANIONS = sorted({s for scheme in SCHEMES for s in scheme.suffixes} - _COMMON, key=len, reverse=True)
# What values of few bits are multiplied by; what activations are, is no part of a weight.
_SCALE = re.compile(r"(?!.*(input|activation|act_|_act$)).*(scal(e|ing)|absmax).*")
# What the values of a weight that is read would depend on as well.
_MORE = re.compile(r"(weight_?)?(zp|zeros?|zero_points?|offsets?)|weight_.*scal(e|ing).*")
# Values of few bits, which beside a scale are codes. Indices of 64 bits and masks are none.
_NARROW = re.compile(r"u?int(8|16|32)|float8.*|float4.*")
RAW = "`eformer.open_lazy` gives the stored tensors as they are."
CONVERT = f"Convert it with the program that made it, or take the dense checkpoint. {RAW}"


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight of another program: its scheme (None: bitsandbytes), the name before the suffixes, and its tensors."""

    scheme: Scheme | None
    stem: str
    tensors: Mapping[str, str]  # by suffix


def find_weights(entries: Mapping[str, Entry], config: Mapping[str, Any]) -> dict[str, Weight]:
    """The quantized weights among the tensors of a file, by the name of the array each makes."""
    found: dict[str, Weight] = {}
    dotted = {f".{name}": name for name in entries}  # the tensors of one layer alone have nothing before the dot
    for scheme in SCHEMES:
        codes = next(iter(scheme.needs))
        for stem in (name.removesuffix(codes) for name in dotted if name.endswith(codes)):
            there = {s: dotted[f"{stem}{s}"] for s in scheme.suffixes if f"{stem}{s}" in dotted}
            if scheme.takes({suffix: entries[name] for suffix, name in there.items()}):
                found.setdefault(f"{stem}{scheme.leaf}"[1:], Weight(scheme, stem[1:], there))
    for name in (n for n in entries if bitsandbytes.STATE in n):
        weight = name.split(bitsandbytes.STATE)[0]
        if weight not in entries:
            raise CheckpointError("has a quantization state, but no codes.", tensor=weight)
        parts = (*(f"{weight}.{part}" for part in bitsandbytes.PARTS), name)
        found[weight] = Weight(None, weight, {n: n for n in (weight, *parts) if n in entries})
    for leaf, weight in found.items():
        if leaf in entries and leaf not in weight.tensors.values():
            codes = next(iter(weight.tensors.values()))
            what = f"is {text_of(entries[leaf])}, a dense weight, and {codes!r} is the same one, quantized."
            raise CheckpointError(what, tensor=leaf, fix=f"Delete one of the two. {RAW}")
    owned = {tensor for weight in found.values() for tensor in weight.tensors.values()}
    stems = {weight.stem: leaf for leaf, weight in found.items() if leaf}
    left = {name: entry for name, entry in entries.items() if name not in owned}
    _check_complete(left, entries, config)
    for name in left:
        stem, _, part = name.rpartition(".")
        if stem in stems and _MORE.fullmatch(part):
            what = f"is {text_of(entries[name])} beside {stems[stem]!r}, which is read without it: a layout of its own."
            raise CheckpointError(what + words_of(config), tensor=name, fix=CONVERT)
    return found


def _check_complete(left: Mapping[str, Entry], entries: Mapping[str, Entry], config: Mapping[str, Any]) -> None:
    """What belongs to no weight must not be part of one."""
    said = words_of(config)
    scales = {name.rpartition(".")[0]: name for name in left if _SCALE.fullmatch(name.rpartition(".")[2])}
    for name, entry in left.items():
        suffix = next((s for s in _COMPANIONS if f".{name}".endswith(s)), None)
        if suffix is None and f".{name}".endswith(".weight") and entry.dtype.name == "uint32":
            suffix = ".weight"
        if suffix in ("_blocks", ".blocks") and entry.dtype.name != "uint8":
            suffix = None
        stem = f".{name}".removesuffix(suffix or "")[1:]
        dense = entries.get(f"{stem}.weight".lstrip("."))
        if suffix is not None and dense is not None and dense.dtype.name in FLOATS:  # rounded, but not packed
            continue
        scale = scales.get(name) or scales.get(name.rpartition(".")[0])
        if suffix is not None:
            _refuse_part(name, suffix, [n for n in entries if n.startswith(stem) and n != name], entries, config)
        if len(entry.shape) > 1 and _NARROW.fullmatch(entry.dtype.name) and scale != name:
            is_weight = name.endswith("weight") or entry.dtype.name.startswith("float")
            if scale is not None:
                beside = f"{scale!r} {text_of(entries[scale])}"
                what = f"is {text_of(entry)} beside {beside}: a quantized weight in no layout that is read."
                raise CheckpointError(what + said, tensor=name, fix=CONVERT)
            if is_weight and said:
                what = f"is {text_of(entry)}, but nothing beside it says what these values are multiplied by."
                raise CheckpointError(what + said, tensor=name, fix=f"Fetch all files. {RAW}")
        if name.endswith(".bitmask") and f"{name.removesuffix('bitmask')}compressed" in entries:
            what = "says where the values of a sparse weight are; only dense ones are read."
            raise CheckpointError(what + said, tensor=name, fix=CONVERT)


def _refuse_part(
    name: str, suffix: str, near: list[str], entries: Mapping[str, Entry], config: Mapping[str, Any]
) -> NoReturn:
    beside = [f"{n} {text_of(entries[n])}" for n in near[:5]] or "nothing"
    kinds = [s for s in SCHEMES if suffix in s.suffixes]
    kinds = [s for s in kinds if s.method == config.get("quant_method")] or kinds
    wanted = "; ".join(f"{s.name}: {', '.join(n or 'NAME' for n in s.needs)}" for s in kinds[:6])
    what = f"is {text_of(entries[name])}, part of a quantized weight, but with {beside} beside it it makes none"
    raise CheckpointError(
        f"{what} of {wanted}.{words_of(config)}", tensor=name, fix=f"Fetch all files; else c{CONVERT[1:]}"
    )
