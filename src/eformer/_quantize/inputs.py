"""Weights whose products round their inputs: what a configuration asks for, around what was quantized."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from eformer._core import ImplicitArray
from eformer._formats.activations.array import ActivationArray, no_product, takes
from eformer._formats.base import QuantizedArray
from eformer._formats.floating import codec as floats
from eformer._kernels.formats import one_of
from eformer._kernels.parameters import ACTIVATIONS

from .statistics import LeafStatistics

FIELDS = ("activations", "backward", "static")
NO_STATISTICS = (
    "static=True takes the scale of inputs from statistics, and there are none. Pass those of `eformer.calibrate`, as "
    "in quantize_tree(..., calibration=statistics), or leave static out: every row then has a scale of its own."
)


def check(config: Any) -> None:
    """Raise unless these fields of a configuration fit each other and the format."""
    for name in ("activations", "backward"):
        one_of(name, getattr(config, name), (None, *ACTIVATIONS))
    if config.activations is None:
        given = [name for name in ("backward", "static") if getattr(config, name)]
        if given:
            value = getattr(config, given[0])
            raise ValueError(
                f"{given[0]}={value!r} is an option of products that round their inputs: give activations, too, "
                f"{' or '.join(map(repr, ACTIVATIONS))}."
            )
        return
    kind = str(config.dtype)
    allowed = takes(floats.KINDS[kind].element if kind in floats.KINDS else kind)
    if config.activations not in allowed:
        raise ValueError(no_product(config.activations, kind, allowed))
    if config.simulate:
        raise ValueError(
            f"activations={config.activations!r} has no meaning with simulate=True, which gives a dense array: its "
            "products round nothing. Leave one of them out."
        )


def bare(config: Any) -> Any:
    """The configuration of the weight alone."""
    return config if config.activations is None else dataclasses.replace(config, **_defaults())


def _defaults() -> dict[str, Any]:
    return {"activations": None, "backward": None, "static": False}


def rounding_inputs(made: Any, config: Any, statistics: LeafStatistics | None = None, factor: Any = None) -> Any:
    """`made`, what a weight was quantized to, with inputs rounded as the configuration says.

    What scales or sorts inputs stays outside: the inputs it gives are rounded.
    """
    if config.activations is None:
        return made
    if not isinstance(made, QuantizedArray) and isinstance(getattr(made, "w", None), ImplicitArray):
        inner = rounding_inputs(made.w, config, statistics, getattr(made, "factor", factor))
        return dataclasses.replace(made, w=inner)
    scale = _static_scale(made, config, statistics, factor) if config.static else None
    return ActivationArray(made, scale, activations=config.activations, backward=config.backward)


def _static_scale(w: Any, config: Any, statistics: LeafStatistics | None, factor: Any) -> Any:
    """The largest input there was, of each matrix of a stack, and the code of the largest value go together."""
    if statistics is None:
        raise ValueError(NO_STATISTICS)
    use = (None if config.axis is None else statistics.along(config.axis)) or statistics
    if tuple(use.shape) != tuple(w.shape):
        raise ValueError(f"these are statistics of an array of shape {use.shape}, and this one has {tuple(w.shape)}.")
    order = (*use.stack, *use.axes)
    largest = np.asarray(use.absmax, np.float64).reshape([use.shape[axis] for axis in order])
    largest = largest.transpose(np.argsort(order))
    largest = np.expand_dims(largest, [axis for axis in range(w.ndim) if axis not in order])
    if factor is not None:
        largest = largest * np.abs(np.asarray(factor, np.float64))
    largest = largest.max(tuple(axis for axis in range(w.ndim) if axis not in use.stack), keepdims=True)
    return jnp.asarray(np.maximum(largest / ACTIVATIONS[config.activations], np.finfo(np.float32).tiny), jnp.float32)
