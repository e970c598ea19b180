"""Formats of one's own in rules: a function that quantizes an array, or a class that has one called `quantize`."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
from collections.abc import Callable
from typing import Any

import jax

from eformer._core import ImplicitArray

from .config import Format, QuantizationConfig


@dataclasses.dataclass(frozen=True)
class OwnFormat(QuantizationConfig):
    """As a `QuantizationConfig`, for a function `encode(array)`, or `encode(array, axis=...)`, that gives an array."""

    encode: Callable[..., Any] = dataclasses.field(default=lambda array: array, kw_only=True)

    def __post_init__(self) -> None:
        pass  # its options are its own

    @property
    def format(self) -> Format:
        return Format(ImplicitArray, _encode, default_block=None)

    def to_json(self) -> str:
        return json.dumps({"dtype": str(self.dtype), "axis": self.axis, "simulate": self.simulate})


def _encode(array: jax.Array, config: Any) -> Any:
    takes_axis = config.axis is not None and "axis" in inspect.signature(config.encode).parameters
    made = config.encode(array, axis=config.axis) if takes_axis else config.encode(array)
    if not isinstance(made, ImplicitArray) or tuple(made.shape) != tuple(array.shape):
        raise TypeError(
            f"{config.dtype} gave {made!r} for an array of shape {tuple(array.shape)}; it must give an ImplicitArray "
            "of that shape."
        )
    return made


def own_format(choice: Any) -> OwnFormat | None:
    """The configuration of a class with `quantize`, or of a function; None for anything else."""
    encode = getattr(choice, "quantize", None) if isinstance(choice, type) else choice
    if not callable(encode):
        return None
    owner = choice if isinstance(choice, type) else getattr(choice, "__self__", choice)
    return OwnFormat(getattr(owner, "__name__", repr(choice)), None, encode=encode)


def imported(text: str) -> Any:
    """What "package.module:Name" stands for."""
    module, _, name = text.partition(":")
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as err:
        raise ValueError(f"{text!r} cannot be imported: {err}. Give it as package.module:Class.") from err
    return found
