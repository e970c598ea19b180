"""`encode`: one weight, the statistics of its inputs and a format, to an array of that format by one method."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer._formats.arguments import as_float, checked_axis, keep_sharding
from eformer._formats.scaled.array import ScaledArray
from eformer._jax import traces
from eformer.errors import CalibrationError, CalibrationWarning

from ..config import QuantizationConfig, check_method, quantize_stack
from ..statistics import LeafStatistics
from . import awq, gptq, matrices
from .grids import Grid, GridFixed, grid_of
from .layout import Layout

REVISITS = 2  # how often "gptq" looks at all codes and scales again


@dataclasses.dataclass(frozen=True)
class Lazy:
    """Numbers of the inputs of a stack of matrices, in f32 and in the order of the matrices, made when asked for."""

    stored: np.ndarray  # (S, ...)
    prepare: Callable[[np.ndarray], np.ndarray]

    def __getitem__(self, some: slice) -> np.ndarray:
        return self.prepare(np.asarray(self.stored[some], np.float64))


@dataclasses.dataclass(frozen=True)
class Work:
    """A weight taken apart: its matrices (S, K, N), what is known of their inputs, and the grid of the format."""

    layout: Layout
    grid: Grid
    config: QuantizationConfig
    diagonal: Any = None
    moment: Any = None
    count: Any = None

    @property
    def how(self) -> dict[str, Any]:
        return {"grid": self.grid, "block": self.layout.block, "along_inputs": self.layout.along_inputs}

    def run(self, f: Callable[..., Any], *arrays: Any, **options: Any) -> Any:
        return matrices.in_parts(f, self.layout.sizes, *arrays, **options)

    def codes(self, w: jax.Array, scale: jax.Array, zero: Any, method: str) -> tuple[jax.Array, jax.Array, Any]:
        """Codes (S, K, N) for scales and zero points that are known, and these, which "gptq" then fits to the codes."""
        if method != "gptq":
            return self.run(matrices.nearest, w, scale, zero, **self.how), scale, zero
        codes, times, scale, zero = self._propagated(w, scale, zero)
        for _ in range(self.grid.rounds - 1 if self.fits else 0):
            codes, times, scale, zero = self._propagated(w, scale, zero)
        for _ in range(REVISITS if self.fits else 0):
            codes = self._given_codes(matrices.revisited, w, times, codes, scale, zero)
            scale, zero = self._given_codes(matrices.refitted, w, times, codes, scale, zero)
        _check_damping(times)
        return codes, scale, zero

    @property
    def fits(self) -> bool:
        """Can scales be fitted to codes, with the inputs known?"""
        return self.layout.along_inputs and not isinstance(self.grid, GridFixed)

    def _propagated(self, w: jax.Array, scale: jax.Array, zero: Any) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
        codes, times = self.run(matrices.propagated, w, self.moment, self.count, scale, zero, **self.how)
        if self.fits:
            scale, zero = self._given_codes(matrices.refitted, w, times, codes, scale, zero)
        return codes, times, scale, zero

    def _given_codes(self, f: Callable[..., Any], w: jax.Array, times: jax.Array, *known: Any) -> Any:
        return self.run(f, w, self.moment, self.count, times, *known, grid=self.grid, block=self.layout.block)

    def scaled(self, factor: Any) -> Work:
        """The same for a weight that was multiplied by a factor for every channel."""
        inverse = 1 / factor
        return dataclasses.replace(
            self,
            diagonal=None if self.diagonal is None else _Product(self.diagonal, inverse**2),
            moment=None if self.moment is None else _Product(self.moment, inverse[:, :, None], inverse[:, None, :]),
        )


class _Product:
    """A product of arrays, made a few entries at a time: of JAX in f32, of NumPy in f64."""

    def __init__(self, *arrays: Any):
        self.arrays = arrays

    def __getitem__(self, some: slice) -> Any:
        parts = [a[some] for a in self.arrays]
        if any(isinstance(part, jax.Array) for part in parts):
            parts = [jnp.asarray(part, jnp.float32) for part in parts]
        return math.prod(parts[1:], start=parts[0])


def encode(
    w: Any,
    statistics: LeafStatistics | None,
    config: QuantizationConfig,
    method: str,
    batch: int = 0,
    factor: Any = None,
) -> Any:
    """Quantize a weight by a method.

    Args:
        w: floating, of rank 1 or more.
        statistics: of its inputs; None only for "round" and "scale".
        config: the format; its axis is the packed one.
        method: one of `METHODS`. "round" takes the nearest codes for the largest value of every block. "scale" searches
            for the scales of the least error, weighted by the inputs where they are known. "gptq" also makes later
            inputs answer for the errors of earlier ones. "awq" multiplies the inputs by factors first, which a
            `ScaledArray` carries; "awq+gptq" does both.
        batch: leading axes that number matrices, as for `quantize_stack`.
        factor: for "awq", factors (matrices, channels) that another leaf takes over: the array is that of the weight
            times these, and carries none.
    """
    check_method(method)
    if method == "round":
        return quantize_stack(w, config, batch)
    dense = as_float(w, str(config.dtype))
    if not isinstance(dense, traces.Tracer) and not bool(jnp.all(jnp.isfinite(dense))):
        _warn(f"the values are not finite, so there is nothing to search for: rounded instead of method={method!r}.")
        return quantize_stack(w, config, batch)
    if not config.scaled:
        raise ValueError(f"method={method!r} chooses scales, but scaled=False has none. Use method='round'.")
    work = _begin(tuple(dense.shape), statistics, config, method)
    if work is None:
        return quantize_stack(w, config, batch)
    values = _on_one_device(dense).astype(jnp.float32)
    run = _made
    if method.startswith("awq"):
        run = _with_factors if factor is None else functools.partial(_times, factor=factor)
    made = keep_sharding(run(work, values, method, dense.dtype), dense)
    return made.materialize() if config.simulate else made


def _begin(shape: tuple[int, ...], statistics: LeafStatistics | None, config: QuantizationConfig, method: str) -> Any:
    """How to take the weight apart; None, with a warning, where the method cannot work on it."""
    ndim = len(shape)
    axis = None
    if not isinstance(config.axis, tuple) or len(config.axis) == 1:
        axis = checked_axis(config.axis, ndim) % ndim
    found = None if axis is None else grid_of(config, shape[axis])
    if statistics is None:
        if method != "scale":
            raise ValueError(f"method={method!r} needs statistics of the inputs. Take some with eformer.calibrate.")
        if axis is None or found is None:  # one scale per row: nothing to gain
            return None
        return Work(Layout(shape, axis, found[1], (axis,), ()), found[0], config)
    if tuple(statistics.shape) != shape:
        raise CalibrationError(f"statistics are of a leaf of shape {statistics.shape}, and this one has shape {shape}.")
    uses = [use for use in statistics.uses if axis not in use.stack or found is None]
    if not uses:
        _warn(f"values are packed along an axis that numbers matrices: rounded instead of method={method!r}.")
        return None
    use = next((use for use in uses if axis in use.axes), uses[0])
    if found is None:
        grid, layout = GridFixed(str(config.dtype)), Layout(shape, None, 1, use.axes, use.stack)
    else:
        grid, layout = found[0], Layout(shape, axis, found[1], use.axes, use.stack)
    if "gptq" in method and use.moment is None:
        raise CalibrationError(
            f"method={method!r} needs whole second moments, and these statistics hold diagonals only. Calibrate "
            "without diagonal_only=True, or use method='scale' or 'awq'."
        )
    if not np.all(np.isfinite(use.diagonal)):
        raise CalibrationError("the statistics hold numbers that are not finite: calibrate again on finite inputs.")
    return Work(layout, grid, config, *_inputs(layout, use))


def _inputs(layout: Layout, use: LeafStatistics) -> tuple[Any, Any, Any]:
    """Diagonal (S, K) and moment (S, K, K), or None, in units of the mean of the diagonal; tokens (S,)."""
    k, s = use.channels, math.prod(use.stack_sizes)
    mean = np.mean(np.asarray(use.diagonal, np.float64).reshape(s, k), axis=1)
    mean = np.where(mean > 0, mean, 1)
    diagonal = Lazy(use.diagonal.reshape(s, k), layout.channels)
    moment = None if use.moment is None else Lazy(use.moment.reshape(s, k, k), layout.moment)
    inverse = 1 / mean
    moment = None if moment is None else _Product(moment, inverse[:, None, None])
    return _Product(diagonal, inverse[:, None]), moment, np.asarray(use.count, np.float32).reshape(s)


def _made(work: Work, values: jax.Array, method: str, dtype: Any) -> Any:
    """The array, for "scale" and "gptq"."""
    layout, grid = work.layout, work.grid
    if isinstance(grid, GridFixed):
        return _with_fixed_scales(work, values, method, dtype)
    assert layout.axis is not None
    w = layout.take(values)
    unit = grid.unit(w)
    w = w if unit is None else w / unit
    diagonal = work.diagonal
    if method == "gptq" and work.fits:
        diagonal = work.run(matrices.conditional, work.moment, work.count, diagonal)
    scale, zero = work.run(matrices.scales, w, diagonal, **work.how)
    stored = None
    if grid.together:
        stored, numbers = grid.stored(layout.back_scale(scale), layout.axis)
        scale = layout.take_scale(numbers)
    codes, scale, zero = work.codes(w, scale, zero, method)
    if stored is not None:
        stored, _ = grid.stored(layout.back_scale(scale), layout.axis)
    scale = layout.back_scale(scale) if stored is None else stored
    zero = None if zero is None else layout.back_scale(zero)
    if unit is not None:
        unit = unit.reshape([layout.shape[a] if a in layout.stack else 1 for a in range(len(layout.shape))])
    ndim = len(layout.shape)
    made = grid.build(layout.back(codes), scale, zero, unit=unit, axis=layout.axis - ndim, dtype=dtype)
    return made if work.config.use_kernel else made.replaced(use_kernel=False)


def _with_fixed_scales(work: Work, values: jax.Array, method: str, dtype: Any) -> Any:
    """INT8 and FP8 whose scales serve rows, tensors or tiles: those of plain rounding; "gptq" chooses the codes."""
    grid, layout = work.grid, work.layout
    assert isinstance(grid, GridFixed)
    rounded = quantize_stack(values, work.config, len(layout.stack))
    if method == "gptq":
        scale = layout.take(grid.scales(rounded).astype(jnp.float32))
        rounded = grid.rebuilt(rounded, layout.back(work.codes(layout.take(values), scale, None, method)[0]))
    return rounded.replaced(dtype=dtype)


def _with_factors(work: Work, values: jax.Array, method: str, dtype: Any) -> Any:
    """The array of the weight times its factors, and their inverse to multiply the inputs with."""
    layout = work.layout
    factor = _factors([work], [values])
    core = len(layout.shape) - next((i for i, a in enumerate(layout.stack) if i != a), len(layout.stack))
    made = _times(work, values, method, dtype, factor=factor)
    return ScaledArray(made, 1 / layout.carried(factor), core=core)


def _times(work: Work, values: jax.Array, method: str, dtype: Any, *, factor: Any) -> Any:
    """The array of the weight times factors (S, K), or (S, channels)."""
    layout = work.layout
    missing = layout.sizes[1] - factor.shape[1]
    factor = jnp.pad(jnp.asarray(factor, jnp.float32), ((0, 0), (0, missing)), constant_values=1)
    method = "gptq" if "gptq" in method else "scale"
    return _made(work.scaled(factor), values * layout.carried(factor), method, dtype)


def _factors(works: Sequence[Work], values: Sequence[jax.Array]) -> jax.Array:
    """Factors (S, K) for matrices with the same inputs."""
    configs = []
    for work in works:
        axis = -2 if isinstance(work.grid, GridFixed) or work.layout.along_inputs else -1
        configs.append(dataclasses.replace(work.config, axis=axis, simulate=False))
    first = max(works, key=lambda work: work.layout.sizes[1])  # padded to whole blocks, which may differ
    s, k, _ = first.layout.sizes
    sizes = s, k, sum(work.layout.sizes[2] for work in works)
    weights = [work.layout.take(w) for work, w in zip(works, values, strict=True)]
    weights = [jnp.pad(w, ((0, 0), (0, k - w.shape[1]), (0, 0))) for w in weights]
    return matrices.in_parts(awq.factors, sizes, first.diagonal, first.moment, *weights, configs=tuple(configs))


def shared_factors(
    weights: Sequence[Any], statistics: Sequence[LeafStatistics], configs: Sequence[QuantizationConfig]
) -> jax.Array | None:
    """Factors (matrices, channels) for weights with the same inputs, each contracted along one axis; None for values
    that are not finite."""
    dense = [as_float(w, str(config.dtype)) for w, config in zip(weights, configs, strict=True)]
    if not all(bool(jnp.all(jnp.isfinite(w))) for w in dense):
        return None
    works = [_begin(tuple(w.shape), s, c, "awq") for w, s, c in zip(dense, statistics, configs, strict=True)]
    found = _factors(works, [_on_one_device(w).astype(jnp.float32) for w in dense])
    return found[:, : statistics[0].channels]


def _check_damping(times: jax.Array) -> None:
    """Say so where the usual damping was not enough."""
    if isinstance(times, traces.Tracer):
        return
    failed, raised = int(np.sum(np.asarray(times) >= gptq.ATTEMPTS)), float(np.max(np.asarray(times), initial=0))
    if failed:
        _warn(
            f"the second moment of the inputs of {failed} of {times.size} matrices cannot be factored, even with "
            f"{gptq.DAMPING * gptq.MORE_DAMPING**gptq.ATTEMPTS:g} of its mean on the diagonal: errors of rounding are "
            "not propagated there. Calibrate with more, or other, tokens."
        )
    elif raised:
        _warn(
            f"the second moment of the inputs needed a damping of {gptq.DAMPING * gptq.MORE_DAMPING**raised:g} of its "
            f"mean, instead of {gptq.DAMPING}, to be factored: calibrate with more tokens."
        )


def _on_one_device(array: jax.Array) -> jax.Array:
    """A weight that is split over devices, on one of them; the result is split again."""
    if isinstance(array, traces.Tracer) or len(array.sharding.device_set) == 1:
        return array
    if not array.is_fully_addressable:
        raise ValueError(
            "a weight that is split over processes can only be rounded: use method='round', or quantize it "
            "before it is split over processes."
        )
    return jnp.asarray(np.asarray(array))


def _warn(text: str) -> None:
    warnings.warn(text, CalibrationWarning, stacklevel=4)
