"""Attention of one token over a quantized cache: csrc/cuda/attention.cu."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from ..native import BF16, F32, FLOATS
from . import tuning

MOST_QUERIES = 16  # of a group
BLOCK = 64  # of int4
# Sizes of heads, padded to whole blocks: of int8, and where int4 is one of the two.
SIZES, SIZES_INT4 = (64, 80, 128, 256), (64, 128, 256)
SCALES = MappingProxyType({"int8": F32, "int4": BF16})
OLDEST = 9  # compute capability
PAIRS = (("int8", "int8"), ("int8", "int4"), ("int4", "int4"))


def refuses(problem: Any) -> str | None:
    """Why the kernel cannot take this attention; None means that it can."""
    kinds = problem.fmt, problem.values
    if kinds not in PAIRS:
        return f"keys are {problem.fmt} and values {problem.values}; it takes {', '.join(map(' and '.join, PAIRS))}"
    sizes = (*problem.batch, problem.m, problem.rows, problem.cols, 1 if problem.window is None else problem.window)
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return f"sizes {sizes}: one is not known yet, or there is nothing to attend to"
    if problem.m > MOST_QUERIES:
        return f"{problem.m} queries share a head of the cache; it takes up to {MOST_QUERIES}"
    if problem.x_dtype not in FLOATS or problem.out_dtype != problem.x_dtype:
        return f"q is {problem.x_dtype}, and it takes {', '.join(dtype.name for dtype in FLOATS)}"
    padded, allowed = padded_size(problem), SIZES if kinds == PAIRS[0] else SIZES_INT4
    if padded not in allowed:
        return f"heads of {problem.cols} values; it takes {', '.join(map(str, allowed))}"
    if "int8" in kinds and padded != problem.cols:
        return f"keys of {problem.cols} values are int8, and int4 values are padded to {padded}; it takes equal sizes"
    for what, fmt, block, scale in (
        ("keys", problem.fmt, problem.block, problem.scale_dtype),
        ("values", problem.values, problem.values_block, problem.values_scale_dtype),
    ):
        if scale != SCALES[fmt] or (fmt == "int4" and block != BLOCK):
            wanted = f" and blocks of {BLOCK}" if fmt == "int4" else ""
            return f"scales of {what} are {scale}, blocks {block}; it takes {SCALES[fmt]}{wanted}"
    if problem.platform != "cuda":  # the reason of all kernels
        return None
    if tuning.version()[0] < OLDEST:
        here = tuning.capability()
        return f"compute capability {here}; it needs clusters of blocks, which there are from {OLDEST}.0 on"
    return None


def padded_size(problem: Any) -> int:
    return -(-problem.cols // BLOCK) * BLOCK if "int4" in (problem.fmt, problem.values) else problem.cols
