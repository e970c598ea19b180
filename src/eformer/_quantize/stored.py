"""Arrays that are quantized already, and blocks that are longer than what they hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from eformer._core import ImplicitArray, materialize
from eformer._core.trace import ImplicitTracer
from eformer._formats.base import QuantizedArray
from eformer.errors import AlreadyQuantizedError

from .inputs import FIELDS, bare

Config = Any  # a QuantizationConfig, whose module stands above this one


def behind(array: Any) -> Any:
    """The implicit array that a function under `implicit` sees; anything else as it is."""
    return array.value if isinstance(array, ImplicitTracer) else array


def is_packed(array: Any) -> bool:
    """Is this array quantized, or is there a quantized one in it?"""
    held = behind(array)
    if not isinstance(held, ImplicitArray):
        return False
    leaves = jax.tree.leaves(held, is_leaf=lambda x: isinstance(x, QuantizedArray))
    return any(isinstance(leaf, QuantizedArray) for leaf in leaves)


def unchanged(array: Any, found: Config, config: Config) -> Any:
    """A quantized array, which has the configuration `found`, as it is; refused where another one is asked for."""
    held = behind(array)
    if found is None or not agree(found, config, held.shape):
        there, asked = (repr(held), str(config.dtype)) if found is None else differences(found, config)
        fix = "take the dense values first, quantize(dequantize(q), ...)."
        if found is not None and _only_rounds_inputs(found, config) and agree(found, bare(config), held.shape):
            backward = "" if config.backward is None else f", backward={config.backward!r}"
            made = f"eformer.ActivationArray(q, activations={config.activations!r}{backward})"
            fix = f"{made} keeps its codes and rounds the inputs of its products."
        raise AlreadyQuantizedError(f"this {type(held).__name__} of shape {held.shape}", there, asked, fix)
    return materialize(array) if config.simulate else array


def _only_rounds_inputs(found: Config, config: Config) -> bool:
    """Does `config` ask for rounded inputs, which `found` has not, and for nothing that needs statistics?"""
    return found.activations is None and config.activations is not None and not config.static and config.smooth is None


def agree(found: Config, wanted: Config, shape: Sequence[int]) -> bool:
    """Was an array of this shape, which has `found`, quantized as `wanted` asks? An axis left open may be any."""
    axes = [_counted_from_the_end(c.axis, len(shape)) for c in (found, wanted)]
    same = dataclasses.replace(wanted, axis=found.axis, use_kernel=found.use_kernel, simulate=False, method=None)
    return axes[1] in (axes[0], None) and found in (same, fitted(same, shape))


def differences(found: Config, wanted: Config) -> tuple[str, str]:
    """The options in which two configurations differ, in words: what is there, and what is asked for."""
    same = dataclasses.replace(wanted, use_kernel=found.use_kernel, simulate=False, method=None)
    if wanted.axis is None:
        same = dataclasses.replace(same, axis=found.axis)
    names = [f.name for f in dataclasses.fields(found) if getattr(found, f.name) != getattr(same, f.name)]

    def words(config: Config) -> str:
        own = [n for n in names if n in ("dtype", "axis", *FIELDS) or n in config.format.options]
        told = ", ".join(f"{n}={getattr(config, n)!s}" for n in own if getattr(config, n) is not None)
        return told or f"dtype={config.dtype!s}"

    return words(found), words(wanted)


def _counted_from_the_end(axis: int | Sequence[int] | None, ndim: int) -> tuple[int, ...] | None:
    axes = (axis,) if isinstance(axis, int) else axis
    return None if axes is None else tuple(sorted(a - ndim if a >= 0 else a for a in axes))


def fitted(config: Config, shape: Sequence[int]) -> Config:
    """The same values in less storage: the block is halved while one half holds the whole axis."""
    ndim, block = len(shape), config.block_size
    axis = config.axis if config.axis is not None else max(-2, -ndim)
    if block is None or "block_size" not in config.format.options or not isinstance(axis, int):
        return config
    if not -ndim <= axis < ndim or not shape[axis]:
        return config
    least = config.format.one_block(shape[axis])
    while block % 16 == 0 and block // 2 >= least:  # halves that every format in blocks allows
        block //= 2
    return config if block == config.block_size else dataclasses.replace(config, block_size=block)
