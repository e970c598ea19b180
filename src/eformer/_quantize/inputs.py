"""Weights whose products round their inputs: what a configuration asks for, around what was quantized."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from eformer._core import ImplicitArray
from eformer._formats.activations.array import ActivationArray, no_product, takes
from eformer._formats.base import QuantizedArray
from eformer._formats.floating import codec as floats
from eformer._formats.scaled.array import ScaledArray
from eformer._kernels.formats import one_of
from eformer._kernels.parameters import ACTIVATIONS

from .statistics import LeafStatistics, Statistics

FIELDS = ("activations", "backward", "static", "smooth")
NO_STATISTICS = (
    "{option} needs statistics of the inputs, and there are none. Pass what `eformer.calibrate` returns, as in "
    "quantize_tree(..., calibration=statistics), or leave it out."
)


def check(config: Any) -> None:
    """Raise unless these fields of a configuration fit each other and the format."""
    for name in ("activations", "backward"):
        one_of(name, getattr(config, name), (None, *ACTIVATIONS))
    if config.activations is None:
        given = [name for name in FIELDS[1:] if getattr(config, name) not in (None, False)]
        if given:
            value = getattr(config, given[0])
            raise ValueError(
                f"{given[0]}={value!r} is an option for products that round their inputs: give activations= as well, "
                f"{' or '.join(map(repr, ACTIVATIONS))}."
            )
        return
    is_number = isinstance(config.smooth, (int, float, np.floating)) and not isinstance(config.smooth, bool)
    if config.smooth is not None and not (is_number and 0 <= config.smooth <= 1):
        raise ValueError(f"smooth={config.smooth!r} is not a number from 0 (inputs keep their outliers) to 1; try 0.5.")
    if config.smooth is not None and config.method not in (None, "round"):
        raise ValueError(
            f"smooth={config.smooth} and method={config.method!r} both transform the inputs; leave one out."
        )
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
    if config.activations is None:
        return config
    return dataclasses.replace(config, activations=None, backward=None, static=False, smooth=None)


def quantized(array: Any, config: Any, statistics: LeafStatistics | None, encode: Callable[[Any, Any], Any]) -> Any:
    """`encode(array, config)` of the weight alone, then what becomes of its inputs."""
    weight = bare(config)
    if config.activations is not None and weight.axis is None and len(array.shape) > 1:
        weight = dataclasses.replace(weight, axis=-2)  # what x @ w contracts, so that codes are added up without scales
    if config.smooth is None:
        return rounding_inputs(encode(array, weight), config, statistics)
    use = _use(array, config, statistics, f"smooth={config.smooth}")
    factor = _smoothing(array, config.smooth, use)
    made = encode((array * factor).astype(array.dtype), weight)
    return rounding_inputs(ScaledArray(made, 1 / factor, core=array.ndim - len(use.stack)), config, statistics)


def _smoothing(array: Any, strength: float, use: LeafStatistics) -> Any:
    """What every input is divided by, and its row of the weight multiplied with (SmoothQuant, Xiao et al. 2022):
    max|x|**a / max|w|**(1 - a), a being the strength; 1 where that is no number."""
    outputs = tuple(axis for axis in range(array.ndim) if axis not in (*use.stack, *use.axes))
    largest = jnp.max(jnp.abs(array.astype(jnp.float32)), axis=outputs, keepdims=True)
    factor = jnp.asarray(_along(use), jnp.float32) ** strength / largest ** (1 - strength)
    return jnp.where((factor > 0) & (factor < jnp.inf), factor, 1)


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
    use = _use(w, config, statistics, "static=True")
    largest: Any = _along(use).astype(np.float32)
    if factor is not None:
        largest = largest * jnp.abs(factor.astype(jnp.float32))
    largest = largest.max(tuple(axis for axis in range(w.ndim) if axis not in use.stack), keepdims=True)
    return jnp.maximum(jnp.asarray(largest / ACTIVATIONS[config.activations]), np.finfo(np.float32).tiny)


def _use(w: Any, config: Any, statistics: LeafStatistics | None, option: str) -> LeafStatistics:
    if statistics is None:
        raise ValueError(NO_STATISTICS.format(option=option))
    if not isinstance(statistics, LeafStatistics):
        paths = ", ".join(map(repr, list(statistics)[:3])) if isinstance(statistics, Statistics) else "'path'"
        raise TypeError(
            f"statistics is of type {type(statistics).__name__}; give those of this array alone, "
            f"stats[path] of what eformer.calibrate returned; paths look like {paths}."
        )
    use = (None if config.axis is None else statistics.along(config.axis)) or statistics
    if tuple(use.shape) != tuple(w.shape):
        raise ValueError(f"these are statistics of an array of shape {use.shape}, and this one has {tuple(w.shape)}.")
    return use


def _along(use: LeafStatistics) -> np.ndarray:
    """The largest magnitude of every input, with the axes of the weight; outputs have size 1."""
    order = (*use.stack, *use.axes)
    largest = np.asarray(use.absmax, np.float64).reshape([use.shape[axis] for axis in order])
    largest = largest.transpose(np.argsort(order))
    return np.expand_dims(largest, [axis for axis in range(len(use.shape)) if axis not in order])
