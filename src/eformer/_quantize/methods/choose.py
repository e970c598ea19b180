"""Which method every leaf of a model gets, and with which statistics."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

from eformer.errors import CalibrationError, CalibrationWarning

from .. import inputs
from ..config import QuantizationConfig, check_method, quantize_stack
from ..own import OwnFormat
from ..plan import Decision
from ..statistics import LeafStatistics, Statistics
from .encode import encode


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A method, the statistics it works with, and what reports say of it (nothing where no method was asked for)."""

    method: str = "round"
    statistics: LeafStatistics | None = None
    note: str = ""
    calibrated: bool = False
    factor: Any = None  # that another leaf takes over

    def encode(self, w: Any, config: QuantizationConfig, decision: Decision) -> Any:
        plain, batch = dataclasses.replace(config, method=None), decision.role.batch
        if self.calibrated and self.statistics is None:  # no product used it, so none asks for these
            plain = dataclasses.replace(plain, static=False, smooth=None)
        if self.method == "round":
            return quantize_stack(w, plain, batch, self.statistics)
        made = encode(w, self.statistics, inputs.bare(plain), self.method, batch, self.factor)
        return inputs.rounding_inputs(made, plain, self.statistics)


def choose(decisions: Sequence[Decision], calibration: Statistics | None, method: str | None) -> dict[str, Chosen]:
    """The method of every leaf that is quantized, by its path.

    Statistics of another model are refused. Leaves that have none are rounded, with a warning for those that products
    use; so are formats of one's own, which have no other method.
    """
    check_method(method)
    if calibration is not None:
        _check(decisions, calibration)
    default = method or ("round" if calibration is None else "gptq")
    chosen, missing, few = {}, [], []
    for decision in decisions:
        config, path = decision.config, decision.leaf.path
        if config is None:
            continue
        wanted = config.method or (default if config.smooth is None else method or "round")
        if config.smooth is not None and wanted != "round":
            raise ValueError(
                f"smooth={config.smooth} for {path!r} goes with method='round', not with {wanted!r}: both transform "
                "the inputs. Leave one of them out."
            )
        statistics = None if calibration is None else calibration.get(path)
        if isinstance(config, OwnFormat) or wanted == "round":
            chosen[path] = Chosen(statistics=statistics, calibrated=calibration is not None)
        elif calibration is None:
            if wanted != "scale":
                raise ValueError(
                    f"method={wanted!r} for {path!r} needs statistics of its inputs: quantize_tree(..., calibration="
                    "eformer.calibrate(forward, params, batches)). Without them use method='scale' or 'round'."
                )
            chosen[path] = Chosen("scale", None, "scale, no statistics")
        elif statistics is None:
            chosen[path] = Chosen(note="rounded, no statistics", calibrated=True)
            missing += [path] if decision.role.kind != "embedding" else []  # which is looked up, not multiplied
        else:
            if not (config.method or method) and any(use.moment is None for use in statistics.uses):
                wanted = "scale"  # which diagonals are enough for
            wanted = _for_tables(wanted) if decision.role.kind == "embedding" else wanted
            chosen[path] = Chosen(wanted, statistics, wanted)
            few += [path] if "gptq" in wanted and statistics.tokens < statistics.channels else []
    _warn(missing, few, calibration)
    return chosen


def _for_tables(method: str) -> str:
    """Rows of a table are looked up, too, and a lookup has no input to multiply by factors."""
    return {"awq": "scale", "awq+gptq": "gptq"}.get(method, method)


def _check(decisions: Sequence[Decision], calibration: Statistics) -> None:
    """Refuse statistics whose leaves are not those of the model."""
    shapes = {d.leaf.path: tuple(getattr(d.leaf.value, "shape", ())) for d in decisions}
    for path, statistics in calibration.items():
        if path not in shapes:
            near = ", ".join(repr(d.leaf.path) for d in decisions if d.config is not None)[:200]
            raise CalibrationError(
                f"the statistics are of another model: they have a leaf {path!r}, and this model has none; its leaves "
                f"to quantize are {near or 'none'}. Calibrate the parameters that are quantized."
            )
        if tuple(statistics.shape) != shapes[path]:
            raise CalibrationError(
                f"the statistics are of another model: {path!r} has shape {tuple(statistics.shape)} there and "
                f"{shapes[path]} here. Calibrate the parameters that are quantized."
            )


def _warn(missing: Sequence[str], few: Sequence[str], calibration: Statistics | None) -> None:
    if missing:
        warnings.warn(
            f"{_some(missing)} without statistics, because no product used them while calibrating: rounded to the "
            "nearest instead.",
            CalibrationWarning,
            stacklevel=5,
        )
    if few and calibration is not None:
        statistics = calibration[few[0]]
        warnings.warn(
            f"{_some(few)} with fewer tokens than channels ({statistics.tokens} and {statistics.channels} of the "
            "first): so few tokens show correlations by chance, and method='gptq' follows them only in part. "
            "Calibrate with more tokens for a better model.",
            CalibrationWarning,
            stacklevel=5,
        )


def _some(paths: Sequence[str]) -> str:
    named = ", ".join(map(repr, paths[:3])) + ", ..." * (len(paths) > 3)
    return f"{len(paths)} {'leaf' if len(paths) == 1 else 'leaves'} ({named})"
