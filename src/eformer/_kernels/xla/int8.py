"""INT8 panels: one value per byte."""

from __future__ import annotations

from typing import Any

import jax


def planes(codes: jax.Array, dtype: Any) -> list[jax.Array]:
    return [codes.astype(dtype)]
