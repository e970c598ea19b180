"""What the files beside a checkpoint say of its quantization, and of each weight."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eformer.errors import CheckpointError

from ..safetensors.header import MAX_HEADER
from ..safetensors.reading import open_regular

# The keys of a quantization config that are read.
READ = (
    "bits", "w_bit", "group_size", "q_group_size", "quant_method", "method", "checkpoint_format", "format", "desc_act",
    "sym", "version", "mode", "weight_block_size", "config_groups", "dynamic", "packing_format", "backend",
    "extra_config", "data_type", "dtype", "weight_scale_semantics",
)  # fmt: skip
# Where it is; a later one, which MLX writes, adds to what an earlier one says.
CONFIG_KEYS = ("compression_config", "quantization_config", "quantization")
_BESIDE = ("quantization_config.json", "quantize_config.json")  # of AutoRound and AutoGPTQ
_OF_LANGUAGE = ("text_config", "llm_config", "language_config")  # part of a model with pictures
_OF_A_WEIGHT = ("bits", "group_size", "mode")


def read_config(folder: Path) -> dict[str, Any]:
    """What `config.json` in a folder says of quantization, and the dtype of the model; empty if there is nothing."""
    model = read_json(folder / "config.json")
    parts = [part for key in _OF_LANGUAGE if isinstance(part := model.get(key), dict)] + [model]
    stated = [part[key] for part in parts for key in CONFIG_KEYS if isinstance(part.get(key), dict)]
    stated = stated or [read_json(folder / name) for name in _BESIDE]
    dtypes = [part[key] for part in parts for key in ("torch_dtype", "dtype") if isinstance(part.get(key), str)]
    found: dict[str, Any] = {key: value for part in stated for key, value in part.items()}
    return {**found, "dtype": dtypes[-1]} if dtypes else found


def of_weight(config: Mapping[str, Any], stem: str) -> Mapping[str, Any]:
    """The configuration of one weight. What is said of it alone takes the place of what is said of all: numbers that
    it leaves out are those of the program, not of the other weights."""
    extra = config.get("extra_config")
    own = config.get(stem, extra.get(stem) if isinstance(extra, Mapping) else None)
    if isinstance(own, Mapping):
        config = {**{key: value for key, value in config.items() if key not in _OF_A_WEIGHT}, **own}
    found = {key: value for key, value in config.items() if value is not None}
    return {**found, **_meant_by_autoround(found)} if "auto-round" in str(found.get("quant_method")) else found


def _meant_by_autoround(config: Mapping[str, Any]) -> dict[str, Any]:
    """AutoRound writes the layouts of others under names of its own, older versions as a backend."""
    packing = str(config.get("packing_format", config.get("backend", "gptq")))
    if "awq" in packing:
        return {"quant_method": "awq"}
    minus = packing == "auto" or "gptq" in packing.replace("gptqmodel", "")
    return {"checkpoint_format": "gptq" if minus else "gptq_v2", **config, "quant_method": "gptq"}


def words_of(config: Mapping[str, Any]) -> str:
    """What a configuration calls the kind of quantization, for messages; empty if it does not."""
    keys = ("quant_method", "method", "quant_algo", "checkpoint_format", "format", "version", "packing_format")
    stated = [f"{key}={config[key]!r:.50}" for key in keys if isinstance(config.get(key), str)]
    return f" The quantization config says {', '.join(stated)}." if stated else ""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    if not path.is_file():
        return {}
    with os.fdopen(open_regular(path), "rb") as file:
        text = file.read(MAX_HEADER)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise CheckpointError(f"is not JSON: {str(err)[:200]}.", file=path) from err
    if not isinstance(found, dict):
        raise CheckpointError("does not hold an object.", file=path, fix="Fetch it again.")
    return found
