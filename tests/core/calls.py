"""The table of public JAX calls: each row is a name, a function of one matrix, and the kind of matrix it wants.

A row is the call on that matrix plus constants, nothing else, so the implicit array itself reaches the named function.
`calls_numpy`, `calls_lax` and `calls_libraries` hold the rows; this module holds their form and their inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .toys import Block8, Plain


class Call(NamedTuple):
    name: str
    function: Callable[[Any], Any]
    kind: str
    dispatches: bool = False  # a type with a `dot_general` handler must never be made dense
    concrete: bool = False  # the result's shape depends on the values: eager only


def simple(module: Any, prefix: str, names: str) -> dict[str, Callable]:
    """Rows that are the bare function, by name."""
    return {f"{prefix}.{name}": getattr(module, name) for name in names.split()}


def table(kind: str, rows: dict[str, Callable], **flags: bool) -> list[Call]:
    return [Call(name, function, kind, **flags) for name, function in rows.items()]


def _spd(rng: np.random.Generator) -> np.ndarray:
    """Symmetric and diagonally dominant, so positive definite."""
    codes = rng.integers(-5, 6, (16, 16))
    codes = np.triu(codes, 1)
    return codes + codes.T + np.diag(rng.integers(100, 120, 16))


# Every scale is a power of two: dense values are exact, and no fused multiply-add can move a rounding or a tie.
def matrix(kind: str, implicit_type: type) -> Any:
    """One matrix of a kind: `real` (16, 12), `unit` in (0, 1), `spd`, `integer`, `complex`, `stack` or `kernel`."""
    rng = np.random.default_rng(sum(map(ord, kind)))
    shape = {"real": (16, 12), "stack": (3, 16, 12), "kernel": (3, 3, 8, 4)}.get(kind, (16, 16))
    low = 1 if kind == "unit" else -100
    codes = _spd(rng) if kind == "spd" else rng.integers(low, 101, shape)
    scale = 2.0 ** rng.integers(-6, -4, (*shape[:-2], shape[-2] // 8, shape[-1]))
    if kind in ("spd", "unit"):
        scale = np.full_like(scale, 1 / 128)
    elif kind == "integer":
        scale = np.ones_like(scale)
    elif kind == "complex":
        scale = scale * (1 + 0.5j)
    dtype = {"integer": np.int32, "complex": np.complex64}.get(kind, np.float32)
    block8 = Block8(jnp.asarray(codes, jnp.int8), jnp.asarray(scale, dtype), 8)
    if implicit_type is Block8:
        return block8
    values = codes * np.repeat(scale, 8, axis=-2)
    factor = 1 if kind == "integer" else 0.5
    return Plain(jnp.asarray(values / factor, dtype), jnp.asarray(factor, dtype))
