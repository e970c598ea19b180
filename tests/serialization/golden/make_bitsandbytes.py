"""Write bitsandbytes.safetensors: state dicts of real `Linear4bit` weights, and what bitsandbytes decodes them to.

Run with the `oracle` extra installed: `python tests/serialization/golden/make_bitsandbytes.py`.
"""

from __future__ import annotations

from pathlib import Path

try:
    import bitsandbytes.functional as bnb
    import torch
    from safetensors.torch import save_file
except ModuleNotFoundError:  # collected by pytest, which finds no examples here
    if __name__ == "__main__":
        raise

OUT = Path(__file__).with_name("bitsandbytes.safetensors")

# name: shape, block size, dtype, kind, nested
CASES = {
    "plain": ((24, 128), 64, "float32", "nf4", False),
    "nested": ((40, 512), 64, "bfloat16", "nf4", True),
    "small_blocks": ((6, 64), 32, "float16", "nf4", True),
    "crossing": ((5, 30), 64, "float32", "nf4", False),
    "crossing_nested": ((7, 9), 64, "bfloat16", "nf4", True),
    "fp4": ((4, 64), 64, "float32", "fp4", False),
}


def main() -> None:
    torch.manual_seed(5)
    state = {}
    for name, (shape, block, dtype, kind, nested) in CASES.items():
        w = torch.randn(*shape).to(getattr(torch, dtype))
        packed, quant_state = bnb.quantize_4bit(w, blocksize=block, quant_type=kind, compress_statistics=nested)
        state[f"{name}.weight"] = packed
        state |= {f"{name}.weight.{key}": value for key, value in quant_state.as_dict(packed=True).items()}
        state[f"{name}.decoded"] = bnb.dequantize_4bit(packed, quant_state)
    save_file({key: value.contiguous().clone() for key, value in state.items()}, OUT)
    print(f"{OUT.name}: {len(state)} tensors, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
