"""Valid little files, ways to damage them, and what reading a damaged one may do: work, or say what is wrong.

    python -m tests.serialization.fuzz 20000 [seed]

reads that many damaged files of each kind.
"""

from __future__ import annotations

import json
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from eformer import serialization as files
from eformer.ops.quantization import LoraArray

from . import foreign_files
from .gguf_files import gguf_bytes
from .trees import Outer, dense, random_bits, random_int8, random_nf4

ABSURD = [
    0,
    1,
    -1,
    2**31,
    2**32 - 1,
    2**53,
    2**62,
    2**63 - 1,
    2**64 - 1,
    10**30,
    1.5,
    1e300,
    True,
    None,
    "",
    "x",
    [],
    {},
]
SEED = "seed.safetensors"


def small_tree() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.standard_normal((16, 6)), jnp.float32)
    q = random_nf4(rng, w.shape, 8, double=True)
    outer = Outer(random_int8(rng, w.shape), (dense(rng, 16, 2), dense(rng, 2, 6)), gain=2.0, when=(1, None))
    return {
        "q": q,
        "t": [random_bits(rng, w.shape, 2, "channel"), w],
        "o": outer,
        "l": LoraArray(random_nf4(rng, w.shape, 8), dense(rng, 16, 2), dense(rng, 2, 6), scale=0.5),
        "n": (np.arange(3), 7, None),
        "b": w > 0,
    }


def safetensors_bytes(folder: Path) -> bytes:
    return files.save(folder / SEED, small_tree()).read_bytes()


FOREIGN = "foreign.safetensors"
FUSED = ("fp8.weight", "fp8.weight_scale_inv")  # for experts in one tensor


def foreign_config(folder: Path) -> dict[str, Any]:
    """Writes a file with a weight of every scheme of other programs. Returns its `config.json`."""
    tensors: dict[str, np.ndarray] = {}
    kinds = {
        "gptq": foreign_files.gptq(np.random.default_rng(0)),
        "sorted": foreign_files.gptq(np.random.default_rng(0), act_order=True, bits=3),
        "awq": foreign_files.awq(np.random.default_rng(0)),
        "mlx": foreign_files.mlx(np.random.default_rng(0), bits=3),
        "mx": foreign_files.in_blocks("mxfp4")(np.random.default_rng(0), by="mlx"),
        "packed": foreign_files.pack_quantized(np.random.default_rng(0), zeros=True, size=90),
        "int": foreign_files.int_quantized(np.random.default_rng(0), zeros=True),
        "nv": foreign_files.in_blocks("nvfp4")(np.random.default_rng(0), by="compressed-tensors"),
        "fp8": foreign_files.fp8(np.random.default_rng(0)),
        "experts": foreign_files.mxfp4_experts(np.random.default_rng(0)),
    }
    for stem, (parts, _, _) in kinds.items():
        tensors |= {f"{stem}{name.removeprefix('m')}": array for name, array in parts.items()}
    tensors |= {f"all{name.removeprefix('fp8.weight')}": np.stack([tensors[name]] * 2) for name in FUSED}
    safetensors.numpy.save_file(tensors, folder / FOREIGN)
    groups = kinds["packed"][1]["config_groups"]
    own = {"mlx": {"bits": 3, "group_size": 64}, "mx": {"mode": "mxfp4"}, "awq": {"quant_method": "awq", "bits": 4}}
    more = {"extra_config": {"sorted": {"bits": 3, "group_size": 32}}, "dynamic": {"+:gptq": {"bits": 4}}}
    stated = {"quant_method": "gptq", "checkpoint_format": "gptq", "config_groups": groups, "sym": False, **own, **more}
    return {"torch_dtype": "float16", "quantization_config": {**stated, "group_size": 32}}


# -- damage ------------------------------------------------------------------------------------------------------------


def damaged_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes flipped, cut off, doubled, or replaced by numbers nobody would write."""
    found = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        near = rng.choice([1, 1, 8, 40])  # anywhere, or near the beginning, where the header is
        at = rng.randrange(max(len(found) // near, 1))
        kind = rng.randrange(6)
        if kind == 0 and found:
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del found[at : at + rng.choice([1, 4, 8, 100])]
        elif kind == 2:
            found[at:at] = found[at : at + rng.choice([1, 8, 64])]
        elif kind == 3:
            del found[at:]
        elif kind == 4:
            found[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2**31, 2**32, 2**63, 2**64 - 1]))
        else:
            found[at : at + 1] = rng.choice([b"{", b"}", b"[", b'"', b",", b"-", b"9", b"\x00", b"\xff", b"\\"])
    return bytes(found)


def damaged_json(value: Any, rng: random.Random) -> Any:
    """The same JSON with one thing in it replaced, dropped or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice([*value, *("__metadata__",) * (5 if "__metadata__" in value else 0)])
        copy = dict(value)
        if rng.random() < 0.1:
            del copy[key]
        elif rng.random() < 0.1:
            copy[rng.choice(["", "x", "__metadata__", "q"])] = copy.pop(key)
        else:
            copy[key] = damaged_json(value[key], rng)
        return copy
    if isinstance(value, list) and value and rng.random() < 0.9:
        copy = list(value)
        at = rng.randrange(len(copy))
        if rng.random() < 0.1:
            copy *= 2
        else:
            copy[at] = damaged_json(copy[at], rng)
        return copy
    if isinstance(value, int) and rng.random() < 0.5:
        return value + rng.choice([-1, 1, 8, -8, 2**40])
    if isinstance(value, str) and value.startswith("{"):  # metadata are JSON within a string
        return json.dumps(damaged_json(json.loads(value), rng))
    return rng.choice(ABSURD)


def damaged_header(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file whose header is well-formed JSON that says something else."""
    return with_header(data, lambda header: damaged_often(header, rng))


def damaged_metadata(data: bytes, rng: random.Random) -> bytes:
    """A valid safetensors file that describes its leaves or its structure otherwise."""

    def damage(header: dict[str, Any]) -> dict[str, Any]:
        described = json.loads(header["__metadata__"]["eformer"])
        part = rng.choice(["leaves", "leaves", "structure", "aliases"])
        described[part] = damaged_often(described[part], rng)
        return {**header, "__metadata__": {"eformer": json.dumps(described)}}

    return with_header(data, damage)


def damaged_often(value: Any, rng: random.Random) -> Any:
    for _ in range(rng.choice([1, 1, 2, 4])):
        value = damaged_json(value, rng)
    return value


def with_header(data: bytes, change: Callable[[Any], Any]) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header = change(json.loads(data[8 : 8 + length]))
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


# -- reading -----------------------------------------------------------------------------------------------------------


def read_safetensors(path: Path) -> None:
    lazy = files.open_lazy(path)
    for name in lazy:
        info = lazy.info(name)
        assert info.nbytes <= path.stat().st_size
    files.load(path)


def read_like(path: Path) -> None:
    files.load(path, like=small_tree(), strict=False)


def read_gguf(path: Path) -> None:
    files.load_gguf(path)
    files.load_gguf(path, dense=True)


def read_index(path: Path) -> None:
    files.load(path)


def read_packed(path: Path) -> None:
    """Every weight, also after one that was refused."""
    opened, refused = files.open_checkpoint(path.with_name(FOREIGN)), None
    for name in opened:
        try:
            assert opened.info(name).shape == opened[name].shape
        except files.CheckpointError as err:
            refused = err
    if refused is not None:
        raise refused


def damaged_config(data: bytes, rng: random.Random) -> bytes:
    return json.dumps(damaged_often(json.loads(data), rng)).encode()


Reader = tuple[str, bytes, Callable[[bytes, random.Random], bytes], Callable[[Path], None]]


def readers(folder: Path) -> list[Reader]:
    whole = safetensors_bytes(folder)
    config = json.dumps(foreign_config(folder)).encode()
    (folder / "config.json").write_bytes(config)
    foreign = (folder / FOREIGN).read_bytes()
    index = {"metadata": {"total_size": 3}, "weight_map": dict.fromkeys(files.open_lazy(folder / SEED)._owners, SEED)}
    return [
        ("m.safetensors", whole, damaged_bytes, read_safetensors),
        ("m.safetensors", whole, damaged_header, read_safetensors),
        ("m.safetensors", whole, damaged_metadata, read_safetensors),
        ("m.safetensors", whole, damaged_metadata, read_like),
        ("m.safetensors.index.json", json.dumps(index).encode(), damaged_bytes, read_index),
        ("m.gguf", gguf_bytes(), damaged_bytes, read_gguf),
        ("config.json", config, damaged_config, read_packed),
        ("config.json", config, damaged_bytes, read_packed),
        (FOREIGN, foreign, damaged_header, read_packed),
        (FOREIGN, foreign, damaged_bytes, read_packed),
    ]


def fuzz(folder: Path, count: int, seed: int = 0) -> Counter[str]:
    """Read damaged files; anything but success and CheckpointError is raised, with the file left for a look."""
    outcomes: Counter[str] = Counter()
    for name, data, damage, read in readers(folder):
        rng = random.Random(seed)
        for _ in range(count // 3 if read is read_packed else count):  # that one reads ten weights
            (folder / name).unlink(missing_ok=True)  # arrays may still read the old file, which is mapped
            (folder / name).write_bytes(damage(data, rng))
            begun = time.process_time()
            try:
                read(folder / name)
                outcomes[f"{read.__name__}: read"] += 1
            except files.CheckpointError as err:
                said = str(err)
                outcomes[f"{read.__name__}: refused"] += 1
                if len(said) > 2000 or str(folder) not in said:
                    raise AssertionError(f"too long, or no file in it: {said[:2000]}") from err
            assert time.process_time() - begun < 5, "took too long"
        (folder / name).unlink()
        (folder / name).write_bytes(data)
    return outcomes


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as where:
        for outcome, number in sorted(
            fuzz(Path(where), int(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 0).items()
        ):
            print(f"{number:8,} {outcome}")
