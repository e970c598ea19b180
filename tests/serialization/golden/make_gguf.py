"""Write gguf.npz: random blocks of every ggml type, and what the `gguf` package decodes them to.

Run with it installed: `python tests/serialization/golden/make_gguf.py`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

try:
    import gguf
except ModuleNotFoundError:  # collected by pytest, which finds no examples here
    if __name__ == "__main__":
        raise

OUT = Path(__file__).with_name("gguf.npz")
KINDS = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4", "IQ4_XS",
    "TQ1_0", "TQ2_0",
)  # fmt: skip


def main() -> None:
    rng = np.random.default_rng(2024)
    arrays = {}
    for kind in KINDS:
        number = gguf.GGMLQuantizationType[kind]
        _, nbytes = gguf.GGML_QUANT_SIZES[number]
        raw = rng.integers(0, 256, (8, nbytes), dtype=np.uint8)
        if kind == "MXFP4":
            raw[:, 0] = raw[:, 0].clip(2, 250)  # what 0, 1 and 255 mean, ggml and the specification disagree on
        with np.errstate(all="ignore"):
            arrays |= {f"{kind}/raw": raw, f"{kind}/values": gguf.dequantize(raw, number)}
    np.savez_compressed(OUT, **arrays)
    print(f"{OUT.name}: {len(arrays)} arrays, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
