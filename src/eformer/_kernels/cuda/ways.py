"""The ways to compute a product, and which is the quickest: as measured on this kind of GPU, else by rule.

`eformer tune` measures products of some shapes in every way and writes the quickest into a file. The one of an H200 is
part of the package; EFORMER_GPU_TABLE names another. A product takes the way of the most similar one that was measured.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jax import lax

from eformer import _settings

from ..native import BF16
from ..parameters import Problem
from . import _axpy, _odd, _wide
from .tuning import BYTE_BLOCKS, BYTES, LARGEST_M, SKINNY_SHARED, capability, fits, is_skinny, shared_bytes

# The kernels of skinny.cuh and dot.cuh, or of axpy.cuh; those of wide.cuh, of odd.cuh; decoding first, then cuBLAS.
WAYS = ("few", "wide", "odd", "decode")
# Formats that are decoded while they are multiplied; so are some blocks of bytes (`is_few_in_byte_blocks`, `_wide`).
FUSED = ("nf4", "int8", "ternary", "binary", "int4", "iq4_nl", "fp4", "fp8_e4m3", "fp8_e5m2")
# Formats whose products take as long as those of another one.
LIKE = {"iq4_nl": "int4", "fp4": "int4", "fp8_e5m2": "fp8_e4m3"}
FAR = math.log(4)  # from one shape to another: a factor
WHOLE = 256  # columns in such pieces are for other kernels
BLOCK = 32  # what the blocks of a matrix that is not decoded first are multiples of
# Rows of x up to which one matrix of so few values is not decoded first, where the wide kernel does not take it.
SMALL = 1 << 23
Times = Mapping[str, float]  # microseconds, by way
Table = Mapping[str, Mapping[str, Mapping[str, str]]]  # format and form, shape, rows of x


def possible(problem: Problem) -> list[str]:
    """The ways that can take a product."""
    found = ["odd", "decode"] if _odd.can_take(problem) else ["decode"]
    if _wide.can_take(problem):
        found.insert(0, "wide")
    if problem.form == "axpy":
        return ["few", *found] if _axpy.can_take(problem) else found
    whole = not (problem.block or 0) % BLOCK and not _is_exact(problem) and not problem.scaled_both_ways
    if problem.fmt in FUSED:
        rows = problem.m * (2 if _wide.doubles_rows(problem) else 1)
        few = problem.m <= LARGEST_M and whole and fits(problem.fmt, rows, rows, problem.offset is not None)
    else:
        few = is_few_in_byte_blocks(problem)
    return ["few", *found] if few else found


def is_few_in_byte_blocks(problem: Problem) -> bool:
    """Is it for the kernel of csrc/cuda/skinny.cuh, which has no other one behind it for these formats?"""
    block, size = problem.block or 1, 2 if problem.scale_dtype == BF16 else 4
    if problem.form != "dot" or problem.fmt not in BYTE_BLOCKS or _is_exact(problem) or problem.rows < 16:
        return False
    blocks = -(-problem.cols // block)
    whole = block % 32 == 0 and (block & (block - 1)) == 0 and blocks * size % 16 == 0
    offsets = 0 if problem.offset is None else blocks * problem.offset.itemsize
    # Offsets are copied in pieces of 4 bytes. Those of 16 rows and their scales have to fit, rows in whole 16 bytes.
    if offsets % 4 or 16 * (blocks * size + offsets + 64) > shared_bytes() - SKINNY_SHARED:
        return False
    return whole and is_skinny(problem.fmt, problem.m * (2 if _wide.doubles_rows(problem) else 1), problem.cols)


def _is_exact(problem: Problem) -> bool:
    return _wide.is_float32(problem) and problem.precision not in (None, lax.Precision.DEFAULT)


def chosen(problem: Problem) -> str:
    ways = possible(problem)
    measured = _measured(problem) if problem.x_dtype == problem.out_dtype == BF16 and not problem.batch else None
    return measured if measured in ways else _by_rule(problem, ways)


def _by_rule(problem: Problem, ways: list[str]) -> str:
    if problem.form == "axpy" and "few" in ways:
        return "few"
    if _wide.takes(problem):
        return "wide"
    if _odd.takes(problem):
        return "odd"
    small = problem.rows * problem.cols <= SMALL and not problem.batch
    few = problem.m <= ((8 if problem.fmt in BYTES else 16) if small else LARGEST_M)
    return "few" if "few" in ways and few else "decode"


def _measured(problem: Problem) -> str | None:
    """The quickest way for the nearest shape, with as many rows of x or the next larger number that was measured."""
    shapes = table(_settings.gpu_table(), capability()).get(f"{LIKE.get(problem.fmt, problem.fmt)} {problem.form}")
    if not shapes:
        return None

    def distance(shape: str) -> float:
        rows, cols = map(int, shape.split("x"))
        apart = abs(math.log(rows / problem.rows)) + abs(math.log(cols / problem.cols))
        others = (cols % WHOLE == 0) != (problem.cols % WHOLE == 0)  # are other kernels there?
        others = others or _wide.can_take(problem.replace(rows=rows, cols=cols)) != _wide.can_take(problem)
        return apart + (FAR if others else 0.0)

    nearest = min(shapes, key=distance)
    if distance(nearest) > FAR:  # nothing like it was measured
        return None
    rows = sorted(map(int, shapes[nearest]))
    return shapes[nearest][str(next((m for m in rows if m >= problem.m), rows[-1]))]


@functools.cache
def table(override: str | None, generation: str) -> Table:
    """The quickest ways on GPUs of a generation; empty where nobody has measured them."""
    path = Path(override) if override else Path(__file__).with_name(f"quickest_{generation}.json")
    if not path.is_file():
        if override:
            raise FileNotFoundError(
                f"EFORMER_GPU_TABLE is {override!r}, and there is no such file; see `eformer tune`."
            )
        return {}
    found = json.loads(path.read_text())
    # The package of one generation is not for another.
    return found["quickest"] if found.get("capability") == generation else {}


def quickest(measured: Iterable[tuple[Problem, Times]]) -> dict[str, Any]:
    """The table of products that were measured in every way they can be computed."""
    found: dict[str, Any] = {}
    for problem, times in measured:
        shapes = found.setdefault(f"{problem.fmt} {problem.form}", {})
        shapes.setdefault(f"{problem.rows}x{problem.cols}", {})[str(problem.m)] = min(times, key=lambda way: times[way])
    return found
