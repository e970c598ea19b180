"""The shared library of the CPU kernels, and the instruction sets it was built for."""

from __future__ import annotations

import ctypes
import sys

from .. import native

QMATMUL, RAGGED, GATHER, NF4_ENCODE = (
    "eformer_cpu_qmatmul", "eformer_cpu_ragged", "eformer_cpu_gather", "eformer_cpu_nf4_encode",
)  # fmt: skip

LIBRARY = native.Library(
    backend="cpu",
    title="CPU",
    compiler="C++ compiler",
    package=__name__.rpartition(".")[0],
    filename="libeformer_cpu.dylib" if sys.platform == "darwin" else "libeformer_cpu.so",
    abi_symbol="eformer_cpu_abi",
    abi=1,
    targets=(
        (QMATMUL, "EformerQmatmul"),
        (RAGGED, "EformerRagged"),
        (GATHER, "EformerQgather"),
        (NF4_ENCODE, "EformerNf4Encode"),
    ),
    platform="cpu",
)

# What `eformer_cpu_isa` returns. The kernels of a higher number of one family also run on what has a lower one.
ISAS = {0: "none", 1: "avx2", 2: "avx512", 3: "avx512_bf16", 4: "amx", 10: "neon"}


def loaded() -> native.Loaded:
    return native.load(LIBRARY)


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
