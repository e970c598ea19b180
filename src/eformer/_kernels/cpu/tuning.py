"""Sizes at which the CPU kernels change their ways, found by measurement (benchmarks/cpu_matmul.py)."""

from __future__ import annotations

# Multiplications below which waking the threads of the pool costs more than they save.
INLINE = 1 << 19
# Multiplications that take as long as encoding one value.
ENCODE_COST = 16

# Rows of x up to which the kernels are quicker than the tiled path, by (format, form); absent means always.
LARGEST_M: dict[tuple[str, str], int] = {}

# Values a lookup may give before XLA, which writes them once in a fused loop, is quicker; absent means always.
LARGEST_LOOKUP: dict[str, int] = {"int8": 1 << 20, "ternary": 1 << 19, "binary": 1 << 18}


def threads_for(work: int) -> int:
    """The `threads` attribute for a number of multiplications: 1 on the calling thread, 0 on XLA's pool.

    A number that is not known yet (a program exported for any batch size) takes the pool.
    """
    return 1 if isinstance(work, int) and work <= INLINE else 0
