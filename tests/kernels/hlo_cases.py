"""What tests of compiled programs on several devices share: meshes, placed operands, reading the collectives."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections import Counter
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from .cases import FORMATS, Case

ROWS, COLS, M, BLOCK, GROUPS = 32, 128, 16, 16, 4
SIZES = np.array([5, 0, 7, 3], np.int32)
OPTIONS: dict[str, Any] = {"nf4": {"block_size": BLOCK}}
COLLECTIVES = re.compile(
    r"= (\(.*?\)|\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)"
    r"(?:-start)?\("
)


def mesh_of(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind, kind))


def collectives(text: str) -> Counter[str]:
    """How many of each kind, and a check that no codes are among what they move."""
    found: Counter[str] = Counter()
    for moved, kind in COLLECTIVES.findall(text):
        assert not re.search(r"\b[us]8\[", moved), f"{kind} moves codes: {moved}"
        found[kind] += len(re.findall(r"\w+\[[\d,]*\]", moved)) if kind == "all-reduce" else 1
    return found


@dataclasses.dataclass(frozen=True)
class Row:
    """Specs of x, of the stored codes and of the result (None: as it comes), and the collectives of each form.

    A form lists those of the product, then those of its gradient with respect to x.
    """

    x: P
    codes: P
    out: P | None
    dot: tuple[str, str] = ("", "")
    axpy: tuple[str, str] = ("", "")


SUM, SCATTER = "all-reduce", "reduce-scatter"


def seeded(*key: Any) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def put(mesh: jax.sharding.Mesh, case: Case, x: np.ndarray, row: Row) -> list[jax.Array]:
    """x, codes and scale; an axis of a scale that serves all is not split."""
    along = (*row.codes, *[None] * (case.codes.ndim - len(row.codes)))
    sizes = case.scale.shape
    scale_spec = P(*(axis if size > 1 else None for axis, size in zip(along, sizes, strict=False)))
    placed = ((x, row.x), (case.codes, row.codes), (case.scale, scale_spec))
    return [jax.device_put(value, NamedSharding(mesh, spec)) for value, spec in placed]


def expected_counts(lists: tuple[str, ...]) -> Counter[str]:
    return Counter({kind: n * len(FORMATS) for kind, n in Counter(filter(None, lists)).items()})


def compiled(function: Any, *operands: Any) -> tuple[Any, str]:
    """The results of a program and its text."""
    made = jax.jit(function).lower(*operands).compile()
    return made(*operands), made.as_text()


def by_groups(x: np.ndarray, dense: np.ndarray) -> np.ndarray:
    owner = np.repeat(np.arange(GROUPS), SIZES)
    y = np.zeros((len(x), dense.shape[2]))
    for i, g in enumerate(owner):
        y[i] = x[i] @ dense[g]
    return y
