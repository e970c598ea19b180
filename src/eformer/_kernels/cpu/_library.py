"""The shared library of the CPU kernels, and the instruction sets it was built for."""

from __future__ import annotations

import ctypes

from .. import native

LIBRARY = native.library_of(
    "cpu",
    compiler="C++ compiler",
    package=__name__.rpartition(".")[0],
    abi=1,
    targets={
        "qmatmul": "EformerQmatmul",
        "ragged": "EformerRagged",
        "gather": "EformerQgather",
        "nf4_encode": "EformerNf4Encode",
    },
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
