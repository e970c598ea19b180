"""Writes mlx.npz: what `mx.quantize` and `mx.dequantize` of MLX give. Needs `pip install "mlx[cpu]"`; made with 0.32.4.

python tests/formats/golden/make_mlx.py
"""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np


def main() -> None:
    mx = importlib.import_module("mlx.core")
    rng = np.random.default_rng(5)
    w = (rng.standard_normal((8, 128)) * np.exp(rng.standard_normal((8, 1)))).astype(np.float32)
    w[1, :64], w[2, :64] = 0, 3.5
    w[3], w[4] = np.abs(w[3]), -np.abs(w[4])
    w[5] *= 1e-9
    w[6] *= 1e4
    made = {"w": w}
    for name in ("float32", "bfloat16", "float16"):
        a = mx.array(w).astype(getattr(mx, name))
        for bits in (2, 3, 4, 5, 6, 8):
            for group in (32, 64, 128):
                if group == 64 or name == "float32":
                    q, s, b = mx.quantize(a, group, bits)
                    parts = {"q": q, "s": s.astype(mx.float32), "b": b.astype(mx.float32)}
                    parts |= {"d": mx.dequantize(q, s, b, group, bits)} if name == "float32" else {}
                    made |= {f"affine-{name}-{bits}-{group}-{k}": np.array(v) for k, v in parts.items()}
        for mode in ("mxfp4", "mxfp8", "nvfp4"):
            q, s = mx.quantize(a, mode=mode)
            d = mx.dequantize(q, s, mode=mode, dtype=mx.float32)
            made |= {f"{mode}-{name}-{k}": np.array(v) for k, v in (("q", q), ("s", s), ("d", d))}
    np.savez_compressed(Path(__file__).parent / "mlx.npz", **made)


if __name__ == "__main__":
    main()
