"""The same products in other libraries on the CPU, where they are installed: PyTorch's packed matmuls, bitsandbytes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

Thunk = Callable[[], Any]


def rivals(rng: np.random.Generator, k: int, n: int, m: int, dtype: str, threads: int) -> dict[str, Thunk]:
    """Name -> a product of x (m, k) with a (k, n) matrix. Empty without PyTorch."""
    if importlib.util.find_spec("torch") is None:
        return {}
    import torch

    torch.set_num_threads(threads)
    x = torch.from_numpy(rng.standard_normal((m, k), dtype=np.float32)).to(getattr(torch, dtype))
    w = torch.from_numpy(rng.standard_normal((n, k), dtype=np.float32))
    found = _pytorch(torch, x.to(torch.bfloat16), w)
    if importlib.util.find_spec("bitsandbytes") is not None:
        found["bitsandbytes nf4"] = _bitsandbytes(x, w)
    return found


def _pytorch(torch: Any, x: Any, w: Any) -> dict[str, Thunk]:
    """Weight-only products; both take bf16 activations only."""
    n, k = w.shape
    codes = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    scales = torch.rand(n, dtype=torch.bfloat16)
    nibbles = torch.randint(0, 16, (n, k), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles, 1)
    groups = torch.rand(k // 64, n, 2, dtype=torch.bfloat16)
    return {
        "torch int8pack": lambda: torch.ops.aten._weight_int8pack_mm(x, codes, scales),
        "torch int4pack": lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 64, groups),
    }


def _bitsandbytes(x: Any, w: Any) -> Thunk:
    import bitsandbytes

    packed, state = bitsandbytes.functional.quantize_4bit(w, blocksize=64, quant_type="nf4")
    return lambda: bitsandbytes.matmul_4bit(x, packed.t(), quant_state=state)
