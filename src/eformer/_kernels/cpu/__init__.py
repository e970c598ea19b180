"""C++ kernels for the CPU (csrc/cpu), called through XLA's foreign function interface."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..formats import BYTE_SCALES
from ..native import (
    FLOATS,
    Limits,
    Loaded,
    call,
    in_one_batch_axis,
    library_of,
    load,
    offset_in_one_batch_axis,
    storage_attributes,
)
from ..parameters import FORMS, Problem

LIBRARY = library_of(
    "cpu",
    compiler="C++ compiler",
    package=__name__,
    abi=5,
    targets={
        "qmatmul": "EformerQmatmul",
        "ragged": "EformerRagged",
        "gather": "EformerQgather",
        "nf4_encode": "EformerNf4Encode",
        "byte_matmul": "EformerByteMatmul",
        "byte_ragged": "EformerByteRagged",
        "stack_qmatmul": "EformerStackQmatmul",
        "stack_byte_matmul": "EformerStackByteMatmul",
    },
)

# What `eformer_cpu_isa` returns. The kernels of a higher number of one family also run on what has a lower one.
ISAS = {0: "none", 1: "avx2", 2: "avx512", 3: "avx512_bf16", 4: "amx", 10: "neon"}


def loaded() -> Loaded:
    return load(LIBRARY)


def isa() -> int:
    """The best instruction set of this machine the library has kernels for, a key of `ISAS`; 0 without a library."""
    library = loaded()
    if library.handle is None:
        return 0
    best = library.handle.eformer_cpu_isa
    best.restype = ctypes.c_int64
    return int(best())


def isa_name() -> str:
    return ISAS.get(isa(), "unknown")


# -- sizes at which the kernels change their ways, found by measurement (benchmarks/cpu_matmul.py) ---------------------

# Multiplications below which waking the threads of the pool costs more than they save.
INLINE = 1 << 19
# Multiplications that take as long as encoding one value.
ENCODE_COST = 16

# Values a lookup may give before XLA, which writes them once in a fused loop, is quicker; absent means always.
LARGEST_LOOKUP: dict[str, int] = {"int8": 1 << 20, "int8_block": 1 << 20, "ternary": 1 << 19, "binary": 1 << 18}


# -- why a problem cannot, or should not, be given to the kernels; None means it can -----------------------------------

FORMATS = ("nf4", "int8", "ternary", "binary", "int4", "iq4_nl", "fp4", "int8_block")
FORMATS += ("fp8_e4m3", "fp8_e5m2", "fp8_e4m3_block", "fp8_e5m2_block")
UNPACKED = ("int2", "int3", "int5", "int6")  # unpacked to the bytes of int8_block
FORMATS += UNPACKED
SCALES = (*FLOATS, *BYTE_SCALES)
LIMITS = Limits(FORMATS, scales=SCALES, block=2, arithmetic="its own: products and sums in float32")


def refuses_product(problem: Problem) -> str | None:
    return LIMITS.refuses_product(problem) or refuses_machine(problem.platform)


# Products whose x is rounded. Blocks must not cut a panel of the kernels, or four bytes of codes.
BYTE_LIMITS = Limits((*FORMATS[:8], *UNPACKED), scales=SCALES, arithmetic="its own: exact sums of integers")
BYTE_PANEL, MOST_BYTE_PRODUCTS = 256, 1 << 17


def refuses_rounded(problem: Problem) -> str | None:
    """Why x cannot be rounded to 8 bits for this product by the kernels."""
    if problem.activations != "int8":
        return f"it rounds x to int8, not to {problem.activations}"
    return BYTE_LIMITS.refuses_product(problem) or _refuses_sums(problem) or refuses_machine(problem.platform)


def refuses_floats(problem: Problem) -> str | None:
    """Why rows of x that were rounded cannot be multiplied as floats."""
    return refuses_product(problem) if problem.activations == "fp8" else "rows of integers are multiplied as bytes"


def _refuses_sums(problem: Problem) -> str | None:
    if problem.form == "axpy" and problem.fmt != "int8":
        return f"values of {problem.fmt} are packed along what is not summed up"
    if problem.format.blocked:
        block, least = problem.block or 1, 4 if problem.fmt in UNPACKED else 4 * problem.format.per_code
        if block % least or (BYTE_PANEL % block and block % BYTE_PANEL):
            return (
                f"blocks of {block} values; it takes multiples of {least} that divide {BYTE_PANEL}, and its multiples"
            )
    elif not problem.scales_results_only:
        return "scales differ along what is summed up"
    if problem.deep > MOST_BYTE_PRODUCTS:
        return f"sums of {problem.deep} products do not fit 32 bits"
    return None


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


# Sizes and dtypes have been checked; what arrives here is what the handlers take. `how` is there to be forced by tests
# and benchmarks: see `_how`.


def takes_offsets(problem: Problem) -> bool:
    return problem.offset in (np.uint8, *FLOATS)


def takes_scales(problem: Problem) -> bool:
    return problem.scale_dtype in SCALES


def _numbers(factor: Any) -> Any:
    """A factor for each matrix, along one axis."""
    return None if factor is None else factor.reshape(-1)


def _matmul(
    name: str, problem: Problem, x: jax.Array, codes: jax.Array, scale: Any = None, x_scale: Any = None,
    *, offset: Any = None, factor: Any = None, index: Any = None, **how: Any,
) -> jax.Array:  # fmt: skip
    """The product of one problem, batch axes included; with an index, of that entry of stacks of codes and scales."""
    stacked = index is not None
    rows, codes, scale, last = in_one_batch_axis(problem, x, codes, scale, x_scale, stacked=stacked)
    last = offset_in_one_batch_axis(problem, offset, stacked=stacked) if name == "qmatmul" else last
    operands = [rows, codes, scale, _numbers(factor), last]
    if stacked:
        name, operands = f"stack_{name}", [*operands, index]
    y = _product(problem, name, (*rows.shape[:2], problem.outs), operands, rows.shape[0], how)
    return y.reshape(*x.shape[:-1], problem.outs)


def _ragged(
    name: str, problem: Problem, x: jax.Array, codes: jax.Array, sizes: jax.Array, scale: Any = None,
    x_scale: Any = None, *, offset: Any = None, factor: Any = None, **how: Any,
) -> jax.Array:  # fmt: skip
    """Groups of rows of x (M, K), each times its own matrix; rows after the last group are zeros."""
    sizes = sizes.astype(jnp.int32)
    operands = [x, codes, scale, _numbers(factor), *((offset, sizes) if name == "ragged" else (sizes, x_scale))]
    return _product(problem, name, (x.shape[0], problem.outs), operands, 1, how)


qmatmul, qragged = functools.partial(_matmul, "qmatmul"), functools.partial(_ragged, "ragged")
# Those whose x is rounded to int8.
byte_matmul, byte_ragged = functools.partial(_matmul, "byte_matmul"), functools.partial(_ragged, "byte_ragged")


def _product(
    problem: Problem, name: str, shape: tuple[int, ...], operands: list[Any], matrices: int, how: Any
) -> jax.Array:
    work = matrices * problem.m * problem.rows * problem.cols
    attributes = {**storage_attributes(problem), "form": FORMS.index(problem.form), **_how(work, **how)}
    (y,) = call(LIBRARY, name, [(shape, problem.out_dtype)], operands, **attributes)
    return y


def qgather(
    problem: Problem,
    codes: jax.Array,
    indices: jax.Array,
    scale: Any = None,
    *,
    offset: Any = None,
    factor: Any = None,
    **how: Any,
) -> jax.Array:
    """Decoded rows for indices (n,) inside the table."""
    result = ((indices.shape[0], problem.cols), problem.out_dtype)
    attributes = {**storage_attributes(problem), **_how(math.prod(result[0]), **how)}
    operands = [codes, scale, _numbers(factor), offset, indices.astype(jnp.int32)]
    (rows,) = call(LIBRARY, "gather", [result], operands, **attributes)
    return rows


def nf4_encode(problem: Problem, x: jax.Array, **how: Any) -> tuple[jax.Array, jax.Array]:
    """(rows, cols) -> codes (rows, blocks, block / 2) and absmax (rows, blocks)."""
    assert problem.block is not None
    lead = (x.shape[0], -(-x.shape[1] // problem.block))
    results = [((*lead, problem.block // 2), np.uint8), (lead, np.float32)]
    attributes = {"block": problem.block, **_how(ENCODE_COST * x.size, **how)}
    codes, absmax = call(LIBRARY, "nf4_encode", results, [x], **attributes)
    return codes, absmax


def _how(work: int, *, isa: int = -1, threads: int | None = None) -> dict[str, int]:
    """For a number of multiplications. The instruction set -1 is the best of the machine; 0 threads are those of XLA's
    own pool, 1 is the calling thread. A number not known yet (a program exported for any size) takes the pool."""
    few = isinstance(work, int) and work <= INLINE
    return {"isa": isa, "threads": int(few) if threads is None else threads}
