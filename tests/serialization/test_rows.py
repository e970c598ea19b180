"""Weights of other programs in pieces of rows: what `quantize_file` writes of them is what `load_checkpoint` gives."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import eformer as ef
from eformer import serialization as files
from eformer.serialization.safetensors.reading import aligned_empty, let_go

from . import foreign_files as made
from .gguf_files import gguf_bytes
from .test_foreign import marked
from .trees import assert_same

# What makes a checkpoint, and how many pieces there should be.
CASES: dict[str, tuple[Any, int]] = {
    "gptq": (lambda rng: made.gptq(rng, out=128), 16),
    "gptq, symmetric": (lambda rng: made.gptq(rng, out=256, sym=True), 32),
    "gptq, act order": (lambda rng: made.gptq(rng, out=128, act_order=True), 16),
    "gptq, act order, square": (lambda rng: made.gptq(rng, size=128, out=128, act_order=True), 16),
    "gptq, 3 bits": (lambda rng: made.gptq(rng, out=128, bits=3), 1),  # zero points cross words
    "gptq, planes": (lambda rng: made.gptq(rng, out=512, bits=6, planes=True), 1),
    "gptq, 4 bits in planes": (lambda rng: made.gptq(rng, out=128, bits=4, planes=True), 16),
    "gptq, 8 bits": (lambda rng: made.gptq(rng, out=128, bits=8), 32),
    "gptq, 2 bits": (lambda rng: made.gptq(rng, out=128, bits=2, group=16), 8),
    "gptq, 8 outputs": (lambda rng: made.gptq(rng, out=8), 1),  # all zero points in one word
    "gptq, 24 outputs": (lambda rng: made.gptq(rng, out=24), 1),
    "awq": (lambda rng: made.awq(rng, out=128), 16),
    "awq, 48 outputs": (lambda rng: made.awq(rng), 1),
    "mlx": (lambda rng: made.mlx(rng, out=12), 4),
    "mlx, one row": (lambda rng: made.mlx(rng, out=1), 1),
    "mlx, experts": (lambda rng: made.mlx(rng, lead=(4,)), 4),
    "mlx mxfp4": (lambda rng: made.in_blocks("mxfp4")(rng, by="mlx", out=16), 16),
    "nvfp4": (lambda rng: made.in_blocks("nvfp4")(rng, by="compressed-tensors", out=16), 16),
    "pack-quantized": (lambda rng: made.pack_quantized(rng, out=32), 32),
    "pack-quantized, zero points": (lambda rng: made.pack_quantized(rng, out=128, zeros=True), 16),
    "pack-quantized, 12 rows": (lambda rng: made.pack_quantized(rng, out=12, zeros=True), 1),
    "pack-quantized, 3 bits of old": (lambda rng: made.pack_quantized(rng, bits=3, crossing=False, zeros=True), 1),
    "pack-quantized, 640 of them": (
        lambda rng: made.pack_quantized(rng, bits=3, out=640, crossing=False, zeros=True), 32,
    ),
    "pack-quantized, act order": (
        lambda rng: made.pack_quantized(rng, size=128, out=128, zeros=True, act_order=True), 16,
    ),
    "pack-quantized, old": (lambda rng: made.pack_quantized(rng, size=128, out=128, zeros=True, old=True), 32),
    "int-quantized": (made.int_quantized, 2),
    "LLM.int8": (made.llm_int8, 2),
    "fp8, tiles": (lambda rng: made.fp8(rng, out=512, scale=(4, 3)), 4),
    "fp8, one tile": (lambda rng: made.fp8(rng, out=128, scale=(1, 3)), 32),
    "fp8, 200 rows": (lambda rng: made.fp8(rng), 1),
    "fp8, tensor": (lambda rng: made.fp8(rng, name="weight_scale", scale=()), 8),
    "mxfp4 experts": (made.mxfp4_experts, 1),
}  # fmt: skip
CORE = ("gptq, act order", "awq", "mlx", "pack-quantized, zero points", "pack-quantized, 12 rows", "LLM.int8",
        "gptq, 8 outputs",
        "fp8, tiles", "fp8, 200 rows")  # fmt: skip


@pytest.mark.parametrize("case", marked(CASES, CORE))
def test_pieces_make_the_weight(case: str, tmp_path: Path):
    make, count = CASES[case]
    folder = made.written(tmp_path / "m", make(np.random.default_rng(len(case))))
    opened: Any = ef.open_checkpoint(folder)
    assert len(list(opened.read_rows("m.weight"))) == count
    report = files.quantize_file(folder, tmp_path / "out.safetensors", min_size=0)
    assert_same(ef.load(report.path), ef.load_checkpoint(folder))


@pytest.mark.parametrize("kind", ["Q4_0", pytest.param("Q8_0", marks=pytest.mark.thorough), "MXFP4"])
def test_pieces_of_gguf(kind: str, tmp_path: Path):
    path = tmp_path / "m.gguf"
    tensors = {"a.weight": (kind, (48, 64)), "b.weight": (kind, (3, 64)), "c.weight": (kind, (4, 2, 64))}
    path.write_bytes(gguf_bytes(tensors))
    opened: Any = ef.open_checkpoint(path)
    assert [len(list(opened.read_rows(name))) for name in tensors] == [16, 1, 4]
    report = files.quantize_file(path, tmp_path / "out.safetensors", min_size=0)
    assert_same(ef.load(report.path), ef.load_checkpoint(path))


def test_memory_is_let_go_of():
    """What was computed with is freed at once; what somebody still holds is not waited for for long."""
    arrays = {"a": aligned_empty(1 << 16), "b": np.ones(1 << 16, np.uint8)}
    weak = [weakref.ref(array if array.base is None else array.base) for array in arrays.values()]
    jax.block_until_ready(jax.jit(lambda x: jax.tree.map(lambda a: a + 1, x))(arrays))
    let_go(arrays)
    assert not arrays
    assert [ref() for ref in weak] == [None, None]
    kept = {"a": aligned_empty(1 << 16)}
    held = kept["a"]
    let_go(kept)
    assert held.size == 1 << 16
