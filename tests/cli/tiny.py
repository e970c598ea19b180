"""A LLaMA model in a GGUF file, as small as one can be, with a tokenizer for the letters a to d."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from serialization.gguf_files import gguf_bytes

WIDTH, HEADS, KV_HEADS, HIDDEN, LAYERS = 64, 4, 2, 96, 2
TOKENS = ["<|im_end|>", "a", "b", "c", "d", "Ġ", "ab", "Ċ"]
NOTES: dict[str, Any] = {
    "llama.block_count": np.uint32(LAYERS),
    "llama.embedding_length": np.uint32(WIDTH),
    "llama.feed_forward_length": np.uint32(HIDDEN),
    "llama.attention.head_count": np.uint32(HEADS),
    "llama.attention.head_count_kv": np.uint32(KV_HEADS),
    "llama.attention.layer_norm_rms_epsilon": np.float32(1e-5),
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": np.array([3] + 7 * [1], np.int32),
    "tokenizer.ggml.merges": ["a b"],
}


def write(
    path: Path, kind: str = "F32", more: dict[str, tuple[str, tuple[int, ...]]] | None = None, **notes: Any
) -> Path:
    kv = KV_HEADS * WIDTH // HEADS
    matrices = {"attn_q": (WIDTH, WIDTH), "attn_k": (kv, WIDTH), "attn_v": (kv, WIDTH), "attn_output": (WIDTH, WIDTH)}
    matrices |= {"ffn_gate": (HIDDEN, WIDTH), "ffn_up": (HIDDEN, WIDTH), "ffn_down": (WIDTH, HIDDEN)}
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {"token_embd.weight": (kind, (len(TOKENS), WIDTH))}
    for number in range(LAYERS):
        tensors |= {f"blk.{number}.{name}.weight": (kind, size) for name, size in matrices.items()}
        tensors |= {f"blk.{number}.{name}.weight": ("F32", (WIDTH,)) for name in ("attn_norm", "ffn_norm")}
    tensors |= {"output_norm.weight": ("F32", (WIDTH,)), **(more or {})}
    path.write_bytes(gguf_bytes(tensors, {**NOTES, **notes}))
    return path
