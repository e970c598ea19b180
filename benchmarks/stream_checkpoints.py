"""Memory and time of loading and converting a checkpoint of another program, a weight at a time.

    python benchmarks/stream_checkpoints.py [gptq|mlx|fp8|pack-quantized] [gigabytes]

writes a synthetic checkpoint, then measures in processes of their own what `quantize_file` (weights stay packed) and
`load_checkpoint` add to the resident memory, in units of the file and of its largest weight.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import safetensors.numpy

OUT, IN, GROUP = 8192, 8192, 128


def tensors(kind: str, layer: int) -> dict[str, np.ndarray]:
    """One weight of 8192 x 8192."""
    rng = np.random.default_rng(layer)
    words = rng.integers(0, 2**32, OUT * IN // 8, dtype=np.uint32)
    groups = IN // GROUP
    scale = np.full((OUT, groups), 0.01, np.float16)
    name = f"layers.{layer}"
    if kind == "gptq":
        zeros = np.full((groups, OUT // 8), 0x77777777, np.int32)
        index = (np.arange(IN) // GROUP).astype(np.int32)
        parts = {
            "qweight": words.view(np.int32).reshape(-1, OUT),
            "qzeros": zeros,
            "scales": scale.T.copy(),
            "g_idx": index,
        }
    elif kind == "mlx":
        parts = {"weight": words.reshape(OUT, -1), "scales": scale, "biases": -8 * scale}
    elif kind == "pack-quantized":
        shape = np.array([OUT, IN], np.int64)
        parts = {"weight_packed": words.view(np.int32).reshape(OUT, -1), "weight_scale": scale, "weight_shape": shape}
    else:
        import ml_dtypes

        codes = (rng.integers(0, 256, (OUT, IN), dtype=np.uint8) & 0xBF).view(ml_dtypes.float8_e4m3fn)
        parts = {"weight": codes, "weight_scale_inv": np.ones((OUT // 128, IN // 128), np.float32)}
    return {f"{name}.{part}": array for part, array in parts.items()}


CONFIG = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True},
    "mlx": {"bits": 4, "group_size": GROUP},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "pack-quantized": {"quant_method": "compressed-tensors"},
}


def write(folder: Path, kind: str, size: float) -> int:
    """A checkpoint of several files. Returns its bytes."""
    index, total, layer = {}, 0, 0
    while total < size:
        found = tensors(kind, layer)
        file = f"model-{layer}.safetensors"
        safetensors.numpy.save_file(found, folder / file)
        index |= dict.fromkeys(found, file)
        total, layer = total + sum(a.nbytes for a in found.values()), layer + 1
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    key = "quantization_config" if "quant_method" in CONFIG[kind] else "quantization"
    (folder / "config.json").write_text(json.dumps({"torch_dtype": "float16", key: CONFIG[kind]}))
    return total


def resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(job: str, folder: str) -> None:
    """In a process of its own: what the job adds to the peak of the resident memory."""
    import jax.numpy as jnp

    import eformer as ef

    jnp.ones(8).block_until_ready()
    before, begun = resident(), time.perf_counter()
    if job == "load":
        found = ef.load_checkpoint(folder)
        held = sum(array.nbytes for array in found.values())
    else:
        report = ef.quantize_file(folder, Path(folder) / "out.safetensors")
        held = report.nbytes_out
    print(json.dumps({"seconds": time.perf_counter() - begun, "peak": resident() - before, "packed": held}))


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        return measure(*sys.argv[2:4])
    kinds = [sys.argv[1]] if sys.argv[1:] else list(CONFIG)
    size = float(sys.argv[2]) * 1e9 if sys.argv[2:] else 1e9
    for kind in kinds:
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
            total = write(Path(folder), kind, size)
            weight = sum(a.nbytes for a in tensors(kind, 0).values())
            for job in ("quantize", "load"):
                argv = [sys.executable, __file__, "--measure", job, folder]
                found = json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)
                over = found["peak"] - (found["packed"] if job == "load" else 0)
                print(
                    f"{kind:15} {job:9} file {total / 1e6:7,.0f} MB, one weight {weight / 1e6:5,.0f} MB: "
                    f"{found['seconds']:5.1f} s, peak {found['peak'] / 1e6:7,.0f} MB, "
                    f"beyond what is held {over / 1e6:5,.0f} MB = {over / weight:.1f} weights"
                )


if __name__ == "__main__":
    main()
