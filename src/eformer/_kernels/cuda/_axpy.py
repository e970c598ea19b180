"""Which products are for the kernel of csrc/cuda/axpy.cuh: few rows of x in the axpy form, formats of 4 bits.

The library cuts them up. It is called like the kernel of csrc/cuda/wide.cuh, with a cut that leaves everything open.
"""

from __future__ import annotations

import math

from ..native import BF16
from ..parameters import Problem
from . import _wide

MOST = 16  # rows of x
CUT = _wide.Cut(0, 0, 0)


def can_take(problem: Problem) -> bool:
    """Values and x are rounded to bfloat16, and stored rows and x are read in whole 16 bytes."""
    if problem.form != "axpy" or not problem.format.in_nibbles or problem.offset is not None:
        return False
    if problem.x_dtype != BF16 or problem.out_dtype != BF16 or not problem.has_at_most(MOST):
        return False
    whole = (problem.block or 1) % 64 == 0 and problem.deep % 8 == 0
    return whole and math.prod(problem.batch) < 1 << 16 and _wide.has_wgmma()
