"""The formats that are compared, and one row of facts for each."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eformer.ops.quantization import QuantizationConfig, quantize_tree, report
from eformer.serialization import load, save

# name -> what `quantize_tree` takes; None keeps the weights as they are
FORMATS: dict[str, Any] = {
    "f32": None,
    "int8": "int8",
    "fp8": "fp8",
    "int4": "int4",
    "iq4_nl": "iq4_nl",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
    "nf4": "nf4",
    "nf4 dq": {"dtype": "nf4", "double_quant": True},
    "ternary": "ternary",
    "binary": "binary",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One format of one model. `quality` is what the model's table says it is."""

    format: str
    nbytes: int
    bits_per_weight: float
    quality: float
    change: float
    speed: float
    materializations: int
    bit_equal: bool

    @property
    def megabytes(self) -> float:
        return self.nbytes / 1e6


def quantized(params: Any, names: Sequence[str] | None = None, activations: str | None = None) -> dict[str, Any]:
    """The model in each of these formats (default: all); the dense one stays usable.

    With `activations` products round their inputs to that, in the formats that have such products.
    """
    made = {}
    for name in FORMATS if names is None else names:
        chosen = _rounding(FORMATS[name], activations)
        made[name] = params if chosen is None else quantize_tree(params, default=chosen, donate=False)
    return made


def _rounding(chosen: Any, activations: str | None) -> Any:
    if chosen is None or activations is None:
        return chosen
    options = {**(chosen if isinstance(chosen, dict) else {"dtype": chosen}), "activations": activations}
    try:
        QuantizationConfig(**options)
    except ValueError:  # no such product
        return chosen
    return options


def survives_a_file(params: Any) -> tuple[bool, int]:
    """Is the model the same, bit by bit, after it was saved and loaded? And the size of the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder) / "model.safetensors", params)
        found = load(path)
        before, after = jax.tree.flatten(params), jax.tree.flatten(found)
        same = before[1] == after[1] and all(map(_same, before[0], after[0]))
        return same, path.stat().st_size


def _same(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def rows_of(
    models: Mapping[str, Any],
    quality: Mapping[str, float],
    change: Mapping[str, float],
    speed: Mapping[str, float],
    dense: Mapping[str, int],
) -> list[Row]:
    """The table, with sizes measured and every model sent through a file."""
    return [
        Row(
            name,
            (found := report(params)).nbytes,
            found.bits_per_weight,
            quality[name],
            change[name],
            speed[name],
            dense[name],
            survives_a_file(params)[0],
        )
        for name, params in models.items()
    ]


def checks(rows: Sequence[Row]) -> dict[str, bool]:
    """What has to hold however little was done."""
    return {
        "every format is bit-equal after save and load": all(row.bit_equal for row in rows),
        "no weight was made dense": not any(row.materializations for row in rows),
    }
