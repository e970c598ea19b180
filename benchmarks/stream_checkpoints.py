"""Memory and time of loading and converting checkpoints of other programs, a weight at a time.

    python benchmarks/stream_checkpoints.py [--kinds gptq,awq] [--gigabytes 1] [--output results.json]

writes a synthetic checkpoint of each kind and measures, in processes of their own, what is added to the peak of the
resident memory by `load_checkpoint` of a single file and of a folder with an index, by reading a lazily opened one
weight by weight, and by `quantize_file`, which keeps weights packed. What goes beyond the arrays that are held is given
in units of one stored weight; two of them are allowed. Compiling the program that arranges a weight, once for each
shape, takes about 40 MB for a moment; it is done before.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

OUT, IN, GROUP = 8192, 8192, 128
JOBS = ("load", "lazy", "quantize", "load one file")
E4M3 = ml_dtypes.float8_e4m3fn
GGUF = {"Q4_0": (2, 18), "Q4_1": (3, 20), "Q8_0": (8, 34), "MXFP4": (39, 17)}  # code, bytes of 32 values


def random_bytes(layer: int, count: int) -> np.ndarray:
    """Bytes whose bit 6 is 0: as FP8 they are finite."""
    return np.random.default_rng(layer).integers(0, 256, count, dtype=np.uint8) & 0xBF


def words(layer: int, bits: int, dtype: Any = np.int32) -> np.ndarray:
    return random_bytes(layer, OUT * IN * bits // 8).view(dtype)


def scales(groups: int, dtype: Any = np.float16) -> np.ndarray:
    return np.full((OUT, groups), 0.01, dtype)


def gptq(layer: int, act_order: bool = False) -> dict[str, np.ndarray]:
    index = (np.arange(IN) // GROUP).astype(np.int32)
    return {
        "qweight": words(layer, 4).reshape(-1, OUT),
        "qzeros": np.full((IN // GROUP, OUT // 8), 0x77777777, np.int32),
        "scales": scales(IN // GROUP).T.copy(),
        "g_idx": np.random.default_rng(layer).permutation(index) if act_order else index,
    }


def awq(layer: int) -> dict[str, np.ndarray]:
    zeros = np.full((IN // GROUP, OUT // 8), 0x77777777, np.int32)
    return {"qweight": words(layer, 4).reshape(IN, -1), "qzeros": zeros, "scales": scales(IN // GROUP).T.copy()}


def mlx(layer: int, bits: int) -> dict[str, np.ndarray]:
    scale = scales(IN // 64)
    return {"weight": words(layer, bits, np.uint32).reshape(OUT, -1), "scales": scale, "biases": -8 * scale}


def packed(layer: int, bits: int) -> dict[str, np.ndarray]:
    shape = np.array([OUT, IN], np.int64)
    scale = scales(IN // GROUP, ml_dtypes.bfloat16)
    return {"weight_packed": words(layer, bits).reshape(OUT, -1), "weight_scale": scale, "weight_shape": shape}


def fp8(layer: int, name: str, *shape: int) -> dict[str, np.ndarray]:
    return {"weight": words(layer, 8, E4M3).reshape(OUT, IN), name: np.full(shape, 0.01, np.float32)}


def fp4(layer: int, names: tuple[str, str], block: int, dtype: Any = np.uint8, **more: Any) -> dict[str, np.ndarray]:
    scale = np.full((OUT, IN // block), 120, np.uint8)
    codes = words(layer, 4, dtype).reshape(OUT, -1)
    return {names[0]: codes, names[1]: scale.view(E4M3) if more else scale, **more}


def experts(layer: int) -> dict[str, np.ndarray]:
    blocks = words(layer, 4, np.uint8).reshape(8, OUT // 8, IN // 32, 16)
    return {"down_proj_blocks": blocks, "down_proj_scales": np.full(blocks.shape[:-1], 120, np.uint8)}


def bitsandbytes(layer: int) -> dict[str, np.ndarray]:
    from eformer._formats.nf4.codec import CODEBOOK

    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [OUT, IN]}
    return {
        "weight": words(layer, 4, np.uint8).reshape(-1, 1),
        "weight.absmax": np.full(OUT * IN // 64, 0.01, np.float32),
        "weight.quant_map": CODEBOOK.copy(),
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }


CT, PACKED = {"quant_method": "compressed-tensors"}, ("weight_packed", "weight_scale")
FP8 = {"quant_method": "fp8"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
# For every kind what makes the tensors of a layer, and the quantization config.
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}),
    "gptq-act-order": (
        lambda i: gptq(i, act_order=True),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": True},
    ),
    "awq": (awq, AWQ),
    "mlx-4": (lambda i: mlx(i, 4), {"bits": 4, "group_size": 64}),
    "mlx-8": (lambda i: mlx(i, 8), {"bits": 8, "group_size": 64}),
    "mlx-mxfp4": (lambda i: fp4(i, ("weight", "scales"), 32, np.uint32), {"mode": "mxfp4", "group_size": 32}),
    "pack-quantized-4": (lambda i: packed(i, 4), CT),
    "pack-quantized-8": (lambda i: packed(i, 8), CT),
    "float-quantized": (lambda i: fp8(i, "weight_scale", OUT, 1), CT),
    "nvfp4-pack-quantized": (lambda i: fp4(i, PACKED, 16, weight_global_scale=np.ones(1, np.float32)), CT),
    "mxfp4-pack-quantized": (lambda i: fp4(i, PACKED, 32), CT),
    "fp8-scale-inv": (lambda i: fp8(i, "weight_scale_inv", OUT // 128, IN // 128), FP8),
    "fp8-scale": (lambda i: fp8(i, "weight_scale"), FP8),
    "mxfp4-experts": (experts, {"quant_method": "mxfp4"}),
    "bitsandbytes": (bitsandbytes, {"quant_method": "bitsandbytes"}),
    **{f"gguf-{name.lower()}": (name, {}) for name in GGUF},
}


def layers(kind: str, size: float) -> Iterator[dict[str, np.ndarray]]:
    total, layer, make = 0, 0, KINDS[kind][0]
    while total < size:
        found = {f"layers.{layer}.{part}": array for part, array in make(layer).items()}
        yield found
        total, layer = total + sum(a.nbytes for a in found.values()), layer + 1


def write(folder: Path, kind: str, size: float, *, one_file: bool) -> tuple[Path, int, int]:
    """A checkpoint of one file, or one for each layer with an index: what to open, its bytes, those of a weight."""
    if kind.startswith("gguf"):
        return write_gguf(folder / "model.gguf", KINDS[kind][0], size)
    config = KINDS[kind][1]
    key = "quantization_config" if "quant_method" in config else "quantization"
    (folder / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", key: config}))
    if one_file:
        tensors = {name: array for found in layers(kind, size) for name, array in found.items()}
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        return folder / "model.safetensors", 0, 0
    index, total, weight = {}, 0, 0
    for layer, found in enumerate(layers(kind, size)):
        safetensors.numpy.save_file(found, folder / f"model-{layer}.safetensors")
        index |= dict.fromkeys(found, f"model-{layer}.safetensors")
        weight = sum(a.nbytes for a in found.values())
        total += weight
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder, total, weight


def write_gguf(path: Path, name: str, size: float) -> tuple[Path, int, int]:
    code, nbytes = GGUF[name]
    weight = OUT * IN // 32 * nbytes
    count = int(-(-size // weight))
    head = b"GGUF" + struct.pack("<IQQ", 3, count, 0)
    for layer in range(count):
        text = f"blk.{layer}.ffn_down.weight".encode()
        head += struct.pack("<Q", len(text)) + text + struct.pack("<IQQIQ", 2, IN, OUT, code, layer * weight)
    with path.open("wb") as file:
        file.write(head + b"\0" * (-len(head) % 32))
        for layer in range(count):
            random_bytes(layer, weight).tofile(file)
    return path, count * weight, weight


def resident(what: str) -> int:
    """VmRSS, or its peak, VmHWM. (`getrusage` has the peak of the process this one was forked from, too.)"""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(what))
    return int(line.split()[1]) * 1024


def trim() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def measure(job: str, path: str) -> None:
    """In a process of its own: what the job adds to the peak of the resident memory, and what it holds at the end."""
    import jax

    import eformer as ef

    tiny = ef.quantize(jax.numpy.ones((64, 64)), dtype="int4")  # so that the compiler is loaded
    jax.block_until_ready(tiny.T @ tiny.materialize())
    trim()
    before = resident("VmRSS")
    first: Any = ef.open_checkpoint(path)
    name = next(iter(first))
    jax.block_until_ready(list(first.read_rows(name)) if job == "quantize" else first[name])  # compiles
    del first
    trim()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    begun = time.perf_counter()
    if job == "quantize":
        ef.quantize_file(path, Path(path).with_name("out.safetensors"))
        held = 0
    elif job == "lazy":
        opened = ef.open_checkpoint(path)
        for name in opened:
            held = jax.block_until_ready(opened[name]).nbytes
    else:
        found = jax.block_until_ready(ef.load_checkpoint(path))
        held = sum(array.nbytes for array in found.values())
    print(json.dumps({"seconds": time.perf_counter() - begun, "peak": resident("VmHWM") - before, "held": held}))


def run(kind: str, size: float) -> Iterator[dict[str, Any]]:
    total = weight = 0
    for one_file in (False, True):
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
            path, *sizes = write(Path(folder), kind, size, one_file=one_file)
            total, weight = (total, weight) if one_file else sizes
            for job in JOBS[3:] if one_file else JOBS[:3]:
                if kind.startswith("gguf") and one_file:  # the others are of one file, too
                    return
                argv = [sys.executable, __file__, "--measure", job, str(path)]
                found = json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout)
                over = (found["peak"] - found["held"]) / weight
                yield {"kind": kind, "job": job, "nbytes": total, "weight_nbytes": weight, **found, "over": over}


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        return measure(*sys.argv[2:4])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for kind in options.kinds.split(","):
        for row in run(kind, options.gigabytes * 1e9):
            rows.append(row)
            print(
                f"{kind:21} {row['job']:14} file {row['nbytes'] / 1e6:6,.0f} MB: {row['seconds']:5.1f} s, peak "
                f"{row['peak'] / 1e6:6,.0f} MB, beyond what is held {row['over']:5.2f} stored weights",
                flush=True,
            )
        if options.output is not None:
            note = "over: peak of the resident memory beyond what is held, in stored weights of 8192 x 8192"
            options.output.write_text(json.dumps({"note": note, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
