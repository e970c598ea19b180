"""A GGUF file: weights are used as stored, or requantized for speed, without llama.cpp.

python examples/load_gguf.py [FILE.gguf]        (without a file, a tiny one is written first)
"""

from __future__ import annotations

import struct
import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import eformer as ef

Q8_0, F32 = 8, 0  # numbers of two of the types


def q8_0(w: np.ndarray) -> bytes:
    """Groups of 32 values: a scale in f16, then 32 codes."""
    groups = w.reshape(-1, 32)
    scale = (np.abs(groups).max(1, keepdims=True) / 127).astype(np.float16)
    codes = np.round(groups / np.maximum(scale.astype(np.float32), 1e-8)).astype(np.int8)
    return np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=1).tobytes()


def write_tiny(path: Path) -> None:
    """The smallest file a reader takes: a header, pairs of metadata, descriptions of tensors, aligned data."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    rng = np.random.default_rng(0)
    weight = rng.standard_normal((64, 128), dtype=np.float32)  # (out, in), as in all files of this kind
    tensors = {
        "blk.0.ffn_up.weight": (Q8_0, weight.shape, q8_0(weight)),
        "blk.0.ffn_norm.weight": (F32, (128,), np.ones(128, np.float32).tobytes()),
    }
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 1)
    head += text("general.architecture") + struct.pack("<I", 8) + text("llama")
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(data))
        data += raw + b"\0" * (-len(raw) % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(sys.argv[1]) if sys.argv[1:] else Path(folder) / "tiny.gguf"
        if not sys.argv[1:]:
            write_tiny(path)
        file = ef.open_gguf(path)  # reads the header only
        print(file.metadata["general.architecture"], f"with {len(file)} tensors:")
        for name in list(file)[:8]:
            array = file[name]
            kind = "as stored" if isinstance(array, ef.ImplicitArray) else "dense"
            print(f"  {name:24} {kind:10} {array.dtype}{list(array.shape)}")

        name = next(name for name in file if len(file[name].shape) == 2)
        w = file[name].T  # (in, out), free of charge: codes and scales stay where they are
        x = jnp.ones((2, w.shape[0]))
        with ef.materialization_policy("error"):
            y = ef.implicit(jnp.matmul)(x, w)  # on the codes of the file; nothing was requantized
        assert jnp.allclose(y, x @ w.materialize(), atol=1e-3)
        print(f"x @ {name}.T has the shape {y.shape}")

        # As NF4, for the fast kernels: one tensor after the other, however large the file is.
        done = ef.quantize_file(path, f"{folder}/model.safetensors", "nf4", min_size=0)
        print(f"{done.nbytes_in:,} bytes -> {done.nbytes_out:,} bytes:", ef.load(done.path)[name])


if __name__ == "__main__":
    main()
