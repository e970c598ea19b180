"""What a quantization scheme of another program is: which tensors make up a weight, and how they become an array.

A scheme is found by the names, dtypes and shapes of its tensors; `quantization_config` adds the numbers that these
cannot say. Weights come out as PyTorch has them, (out, in), with blocks along the last axis.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from eformer.errors import CheckpointError

from ..safetensors.header import Entry, is_count

Parts = Mapping[str, Entry]  # by suffix
Config = Mapping[str, Any]
Read = Callable[[str], np.ndarray]  # a small tensor of the weight, by suffix
Dtypes = Mapping[str, tuple[str, ...]]  # by suffix

FLOATS = ("float16", "bfloat16", "float32")
WORDS = ("int32", "uint32")
_PIECES = 32
_OF_ALL = (".g_idx", ".weight_g_idx", ".weight_shape", ".weight_format")  # tensors that say something of every row


@dataclasses.dataclass(frozen=True)
class Scheme:
    """One way to store a weight. `method` is the name `quantization_config` has for its family.

    `needs` are the tensors a weight of this kind has and their dtypes, the codes first, `may` those it may have; `ndim`
    is the rank of the codes (0: any), `fits` looks at shapes where dtypes do not tell. `plan` checks all that headers
    say and returns the numbers `make` takes; `check` looks at values. `leaf` is the suffix of the array, `rows` the
    axis of the stored tensors along which its first one runs.
    """

    name: str
    method: str
    needs: Dtypes
    plan: Callable[[Parts, Config, Read], dict[str, Any]]
    make: Callable[..., Any]
    may: Dtypes = dataclasses.field(default_factory=dict)
    ndim: int = 2
    fits: Callable[[Parts], bool] = lambda parts: True
    check: Callable[..., None] = lambda arrays, **numbers: None
    leaf: str = ".weight"
    rows: int = 0

    @property
    def suffixes(self) -> list[str]:
        return [*self.needs, *self.may]

    def takes(self, parts: Parts) -> bool:
        """Do these tensors, by suffix, make a weight of this kind?"""
        dtypes = {**self.needs, **self.may}
        if not set(self.needs) <= set(parts) or any(e.dtype.name not in dtypes[s] for s, e in parts.items()):
            return False
        rank = len(parts[next(iter(self.needs))].shape)
        return (rank == self.ndim or (rank > 1 and not self.ndim)) and self.fits(parts)

    def pieces(self, parts: Parts, rows: int) -> tuple[int, list[str]]:
        """How many equal pieces of an array with so many rows can be made one by one, and which tensors are cut."""
        axis = self.rows
        lengths = {s: e.shape[axis] for s, e in parts.items() if s not in _OF_ALL and len(e.shape) > axis}
        # One number may serve all rows; one word holds those of several.
        cut = [s for s, length in lengths.items() if length > 1 or parts[s].dtype.name in WORDS]
        sizes = [lengths[suffix] for suffix in cut]
        # Words of rows and tiles of rows are full where rows are a multiple of 128 and they divide it.
        fits = all(size == rows or (rows % 128 == 0 and rows % size == 0) for size in sizes)
        return (math.gcd(_PIECES, *sizes), cut) if sizes and fits else (1, [])


def wrong(suffix: str, what: str, fix: str = "") -> CheckpointError:
    """An error about one of the tensors of a weight; whoever knows its whole name adds it."""
    return CheckpointError(what, tensor=suffix, fix=fix or "Fetch the checkpoint again, or ask who made it.")


def text_of(entry: Entry) -> str:
    return f"{entry.dtype}{list(entry.shape)}"


def expect(parts: Parts, suffix: str, shape: tuple[int, ...], why: str) -> None:
    """Raise unless a tensor has this shape, if it is there."""
    if suffix in parts and parts[suffix].shape != shape:
        raise wrong(suffix, f"is {text_of(parts[suffix])}, but {why} needs the shape {list(shape)}.")


def values_dtype(config: Config, parts: Parts) -> str:
    """The dtype of the values: what the model says, else that of the scales, else f32."""
    named = str(config.get("dtype", "")).removeprefix("torch.")
    scales = [parts[s].dtype.name for s in (".scales", ".weight_scale_inv", ".weight_scale") if s in parts]
    return next((name for name in (named, *scales) if name in FLOATS), "float32")


def number(config: Config, key: str, allowed: tuple[int, ...]) -> int | None:
    """A number of the configuration, or None if it is not there."""
    found = config.get(key)
    if found is not None and (type(found) is not int or found not in allowed):
        raise CheckpointError(f"has {key}={found!r:.100} in its quantization config; allowed are {allowed}.")
    return found


def has_patterns(config: Config) -> bool:
    """May a pattern for names (GPTQModel, AutoRound) say something else of this weight? They are not matched."""
    return bool(config.get("dynamic") or config.get("extra_config"))


def weight_groups(config: Config) -> list[Mapping[str, Any]]:
    """What `config_groups` says of weights."""
    groups = config.get("config_groups")
    found = [g.get("weights") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    return [weights for weights in found if isinstance(weights, dict)]


def group_size(stated: Any, size: int, groups: int, suffix: str, loose: bool = False) -> int | None:
    """How many values share a scale: what is stated, which must fit unless `loose`, else equal groups; None for whole
    rows."""
    if groups == 1:
        return None
    if is_count(stated) and stated and -(-size // stated) == groups:
        return stated
    if (stated is not None and not loose) or not groups or size % groups:
        what = f"has {groups} groups for {size} values, and the quantization config says group_size={stated!r:.50}."
        fits = size // groups if groups and size % groups == 0 else "..."
        raise wrong(suffix, what, f"Pass quantization={{'group_size': {fits}}}: how many values share a scale.")
    return size // groups


def check_method(config: Config, method: str) -> None:
    """Raise if the configuration names another method: its layout, or what its zero points mean, may be another."""
    stated = config.get("quant_method", config.get("method"))
    if isinstance(stated, str) and stated != method:
        what = f"has the layout of {method}, but the quantization config says quant_method={stated!r}."
        raise wrong(".qweight", what, f"Pass quantization={{'quant_method': {method!r}}} if that is what it is.")
