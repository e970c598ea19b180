"""The shared library of the CUDA kernels."""

from __future__ import annotations

from .. import native

QMATMUL, WIDE, RAGGED, GATHER, DEQUANT = (
    "eformer_cuda_qmatmul", "eformer_cuda_wide", "eformer_cuda_ragged", "eformer_cuda_gather", "eformer_cuda_dequant",
)  # fmt: skip

LIBRARY = native.Library(
    backend="cuda",
    title="CUDA",
    compiler="CUDA compiler",
    package=__name__.rpartition(".")[0],
    filename="libeformer_cuda.so",
    abi_symbol="eformer_cuda_abi",
    abi=2,
    targets=(
        (QMATMUL, "EformerCudaQmatmul"),
        (WIDE, "EformerCudaWide"),
        (RAGGED, "EformerCudaRagged"),
        (GATHER, "EformerCudaQgather"),
        (DEQUANT, "EformerCudaDequant"),
    ),
    platform="CUDA",
)


def loaded() -> native.Loaded:
    return native.load(LIBRARY)
