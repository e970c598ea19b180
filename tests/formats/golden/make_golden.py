"""Write nf4.npz: small tensors with the codes and statistics bitsandbytes gives them on the CPU.

Run with the `oracle` extra installed: `python tests/formats/golden/make_golden.py`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

try:
    import bitsandbytes.functional as bnb
    import torch
except ModuleNotFoundError:  # collected by pytest, which finds no examples here
    if __name__ == "__main__":
        raise

OUT = Path(__file__).with_name("nf4.npz")


def inputs() -> dict[str, tuple[torch.Tensor, int]]:
    """Name to (flat tensor, block size); bitsandbytes cuts the flat tensor into blocks."""
    rng = np.random.default_rng(20240607)
    cases: dict[str, tuple[torch.Tensor, int]] = {}
    for block in (32, 64, 128, 256):
        for size in (block, 3 * block, 2 * block + 6, block - 10):
            cases[f"normal_{block}_{size}"] = (torch.tensor(rng.standard_normal(size), dtype=torch.float32), block)
    for dtype in (torch.bfloat16, torch.float16):
        cases[str(dtype).removeprefix("torch.")] = (torch.tensor(rng.standard_normal(330)).to(dtype), 64)
    cases["uniform"] = (torch.tensor(rng.uniform(-3, 3, 512), dtype=torch.float32), 64)
    cases["spread"] = (torch.tensor(rng.standard_normal(512) * 10.0 ** rng.uniform(-30, 30, 512)).float(), 64)
    cases["zeros_and_ones"] = (torch.tensor([0.0] * 64 + [1.0] * 64 + [-1.0] * 64), 64)
    codebook = bnb.get_4bit_type("nf4", device="cpu")
    middles = (codebook[1:] + codebook[:-1]) / 2
    above = torch.nextafter(middles, torch.tensor(2.0))
    ties = torch.cat([torch.tensor([1.0]), codebook, middles, above, torch.zeros(17)])
    cases["ties"] = (torch.cat([ties, 4 * ties, ties / 1024]), 64)
    return cases


def nested(absmax: torch.Tensor) -> dict[str, torch.Tensor]:
    """What `compress_statistics=True` stores. The f64 input selects the exact search: for f32, the CPU build looks
    codes up in a table over a grid of 2**-15, unlike the CUDA kernel and the portable one."""
    offset, table = absmax.mean(), bnb.create_dynamic_map()
    codes, scale = torch.ops.bitsandbytes.quantize_blockwise.default((absmax - offset).double(), table, 256)
    expanded = bnb.dequantize_blockwise(codes, absmax=scale, code=table, blocksize=256) + offset
    return {"codes": codes, "scale": scale, "offset": offset, "expanded": expanded}


def main() -> None:
    arrays: dict[str, np.ndarray] = {"dynamic_map": bnb.create_dynamic_map().numpy()}
    for name, (w, block) in inputs().items():
        packed, state = bnb.quantize_4bit(w, blocksize=block, quant_type="nf4")
        decoded = bnb.dequantize_4bit(packed, state)
        # NumPy has no bf16: f32 holds both half types exactly.
        for key, value in {
            "w": w,
            "packed": packed.flatten(),
            "absmax": state.absmax,
            "decoded": decoded.flatten(),
        }.items():
            arrays[f"{name}/{key}"] = (value.float() if value.is_floating_point() else value).numpy()
        arrays[f"{name}/block"] = np.array(block)
    rng = np.random.default_rng(7)
    for size in (5, 256, 1000):
        absmax = torch.tensor(np.abs(rng.standard_normal((size, 64))).max(axis=1), dtype=torch.float32)
        arrays[f"nested_{size}/absmax"] = absmax.numpy()
        arrays |= {f"nested_{size}/{key}": value.numpy() for key, value in nested(absmax).items()}
    np.savez_compressed(OUT, **arrays)
    print(f"{OUT.name}: {len(arrays)} arrays, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
