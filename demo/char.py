"""The character model of this folder: its sizes and its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from eformer.models import Config, Params
from eformer.serialization import load

from .text import VOCABULARY

CONFIG = Config(vocabulary=VOCABULARY, width=192, layers=3, heads=6, kv_heads=6, hidden=512)
LENGTH = 256  # characters it was trained on at a time
_LAYER = "layers."


def load_params() -> Params:
    """The weights in float32; the file has them in float16.

    >>> load_params()["layers"]["up"].shape
    (3, 192, 512)
    """
    stored = load(Path(__file__).with_name("char.safetensors"))
    found: dict[str, Any] = {name: jnp.asarray(value, jnp.float32) for name, value in stored.items()}
    layers = {name.removeprefix(_LAYER): found[name] for name in found if name.startswith(_LAYER)}
    return {"embedding": found["embedding"], "layers": layers, "norm": found["norm"]}


def flat(params: Params) -> dict[str, Any]:
    """Arrays by name, as they are in the file."""
    layers = {f"{_LAYER}{name}": value for name, value in params["layers"].items()}
    return {"embedding": params["embedding"], "norm": params["norm"], **layers}
