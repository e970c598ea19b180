"""The shared library of the CUDA kernels."""

from __future__ import annotations

from .. import native

LIBRARY = native.library_of(
    "cuda",
    compiler="CUDA compiler",
    package=__name__.rpartition(".")[0],
    abi=2,
    targets={
        "qmatmul": "EformerCudaQmatmul",
        "wide": "EformerCudaWide",
        "ragged": "EformerCudaRagged",
        "gather": "EformerCudaQgather",
        "dequant": "EformerCudaDequant",
    },
)


def loaded() -> native.Loaded:
    return native.load(LIBRARY)
