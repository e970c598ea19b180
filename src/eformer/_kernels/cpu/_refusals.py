"""Why a problem cannot, or should not, be given to the CPU kernels. None means it can."""

from __future__ import annotations

from ..limits import Limits
from ..parameters import Problem
from ._library import isa, loaded
from .tuning import LARGEST_LOOKUP, LARGEST_M

LIMITS = Limits(arithmetic="its own: products and sums in float32")


def refuses_product(problem: Problem) -> str | None:
    why = refuses_ragged(problem)
    largest = LARGEST_M.get((problem.fmt, problem.form))
    if why or problem.preference == "native" or largest is None or problem.m <= largest:
        return why
    return f"with M={problem.m} the tiled path is quicker (it is above {largest})"


def refuses_ragged(problem: Problem) -> str | None:
    return LIMITS.refuses_product(problem) or refuses_machine(problem.platform)


def refuses_gather(problem: Problem) -> str | None:
    why = LIMITS.refuses_lookup(problem) or refuses_machine(problem.platform)
    values, largest = problem.m * problem.cols, LARGEST_LOOKUP.get(problem.fmt)
    if why or problem.preference == "native" or largest is None or values <= largest:
        return why
    return f"XLA is quicker for {values} values (it is above {largest})"


def refuses_encode(problem: Problem) -> str | None:
    return LIMITS.refuses_encoding(problem) or refuses_machine(problem.platform)


def refuses_machine(platform: str) -> str | None:
    """Asked last: it loads the library."""
    if platform != "cpu":
        return f"its kernels run on the CPU, not on {platform}"
    library = loaded()
    if library.reason is not None:
        return library.reason
    return None if isa() else "this CPU has no instruction set the kernels are written for (AVX2, AVX-512 or NEON)"
