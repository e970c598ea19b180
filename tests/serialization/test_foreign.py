"""Checkpoints of other programs become packed arrays with exactly the values their equations give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import eformer as ef
from eformer import serialization as files
from eformer._core import ImplicitArray
from eformer.serialization.foreign import layouts

from . import foreign_files as made


def pieced_axes(case: Any) -> Any:
    tensors, stated, values = case
    return {**tensors, "m.weight_scale": tensors["m.weight_scale"][:, None, :, None]}, stated, values


CASES: dict[str, Any] = {
    "gptq": lambda rng: made.gptq(rng),
    "gptq v2": lambda rng: made.gptq(rng, v2=True),
    "gptq, symmetric": lambda rng: made.gptq(rng, sym=True),
    "gptq, 2 bits": lambda rng: made.gptq(rng, bits=2, group=16),
    "gptq, 3 bits": lambda rng: made.gptq(rng, bits=3),
    "gptq, 24 outputs": lambda rng: made.gptq(rng, out=24),  # as many words of zero points as with 3 bits
    **{f"gptq, {b} bits": lambda rng, b=b: made.gptq(rng, bits=b, v2=b < 8) for b in (5, 6, 8)},
    **{f"gptq, {b} bits in planes": lambda rng, b=b: made.gptq(rng, bits=b, planes=True) for b in (3, 4, 5, 6)},
    "gptq, one group": lambda rng: made.gptq(rng, group=96),
    "gptq, ragged": lambda rng: made.gptq(rng, group=64),
    "gptq, act order": lambda rng: made.gptq(rng, act_order=True),
    "gptq, no config": lambda rng: made.gptq(rng, config=False),
    "awq": lambda rng: made.awq(rng),
    "awq, no config": lambda rng: made.awq(rng, config=False),
    **{f"mlx, {b} bits": lambda rng, b=b: made.mlx(rng, bits=b) for b in (2, 3, 4, 5, 6, 8)},
    "mlx, groups of 32": lambda rng: made.mlx(rng, group=32, bits=8),
    "mlx, experts": lambda rng: made.mlx(rng, lead=(3,)),
    **{f"mlx {k}": lambda rng, k=k: made.in_blocks(k)(rng, by="mlx") for k in ("mxfp4", "mxfp8", "nvfp4")},
    "pack-quantized": lambda rng: made.pack_quantized(rng),
    "pack-quantized, 8 bits": lambda rng: made.pack_quantized(rng, bits=8),
    "pack-quantized, 3 bits": lambda rng: made.pack_quantized(rng, bits=3),
    "pack-quantized, 3 bits of old": lambda rng: made.pack_quantized(rng, bits=3, crossing=False, zeros=True),
    "pack-quantized, zero points": lambda rng: made.pack_quantized(rng, zeros=True),
    "pack-quantized, ragged": lambda rng: made.pack_quantized(rng, size=90),
    "pack-quantized, one group": lambda rng: made.pack_quantized(rng, group=96, zeros=True),
    "pack-quantized, old": lambda rng: made.pack_quantized(rng, zeros=True, old=True),
    "pack-quantized, act order, zero points": lambda rng: made.pack_quantized(rng, zeros=True, act_order=True),
    "pack-quantized, a zero point": lambda rng: made.pack_quantized(rng, tensor=True),
    "pack-quantized, act order": lambda rng: made.pack_quantized(rng, act_order=True),
    "int-quantized": lambda rng: made.int_quantized(rng),
    "int-quantized, zero points": lambda rng: made.int_quantized(rng, zeros=True),
    "int-quantized, groups": lambda rng: made.int_quantized(rng, groups=2),
    "int-quantized, act order": lambda rng: made.int_quantized(rng, groups=2, zeros=True, act_order=True),
    **{
        f"{by} {kind}": lambda rng, kind=kind, by=by: made.in_blocks(kind)(rng, by=by)
        for kind, by in (("mxfp4", "compressed-tensors"), ("mxfp8", "compressed-tensors"),
                         ("nvfp4", "compressed-tensors"), ("nvfp4", "modelopt"))
    },
    "fp8, tiles": lambda rng: made.fp8(rng),
    "fp8, tensor": lambda rng: made.fp8(rng, name="weight_scale", scale=(1,)),
    "fp8, scalar": lambda rng: made.fp8(rng, name="weight_scale", scale=()),
    "fp8, rows": lambda rng: made.fp8(rng, name="weight_scale", scale=(200, 1)),
    "fp8, inverse": lambda rng: made.fp8(rng, inverse=True),
    "fp8, inverse, rows": lambda rng: made.fp8(rng, inverse=True, scale=(200,)),
    "fp8, tiles of ModelOpt": lambda rng: pieced_axes(made.fp8(rng, name="weight_scale")),
    "fp8, exponents": lambda rng: made.fp8(rng, e8m0=True),
    "LLM.int8": made.llm_int8,
    "awq, one group": lambda rng: made.awq(rng, group=64),
    "fp8, e5m2": lambda rng: made.fp8(rng, e5m2=True),
    "mxfp4 experts": made.mxfp4_experts,
}  # fmt: skip


CORE = ("gptq", "gptq, 3 bits", "gptq, act order", "awq", "mlx, 3 bits", "mlx mxfp4", "pack-quantized, zero points",
        "pack-quantized, ragged", "int-quantized, zero points", "compressed-tensors nvfp4", "fp8, tiles", "fp8, rows",
        "gptq, 5 bits in planes", "fp8, inverse", "pack-quantized, a zero point", "mxfp4 experts")  # fmt: skip


def marked(cases: Any, core: Any) -> list[Any]:
    return [pytest.param(case, marks=() if case in core else pytest.mark.thorough) for case in cases]


@pytest.mark.parametrize("case", marked(CASES, CORE))
def test_arrays_are_packed_and_exact(case: str, tmp_path: Path):
    tensors, stated, values = CASES[case](np.random.default_rng(len(case)))
    folder = made.written(tmp_path / "m", (tensors, stated, values))
    loaded = ef.load_checkpoint(folder)
    assert set(loaded) == {"m.weight", "norm.weight", *({"m.bias"} & set(tensors))}
    array = loaded["m.weight"]
    assert isinstance(array, ImplicitArray)
    assert array.shape == values.shape
    assert array.dtype == values.dtype
    np.testing.assert_array_equal(np.asarray(array.materialize()), values)
    assert array.nbytes <= 1.3 * sum(t.nbytes for n, t in tensors.items() if n != "m.bias") + 64
    lazy = ef.open_checkpoint(folder)
    info = lazy.info("m.weight")
    assert (info.shape, info.dtype, info.format) == (array.shape, array.dtype, array.format)


def changed(case: str, seed: int = 0, **changes: Any) -> Any:
    """A case with some tensors changed, or dropped (None), and some entries of the configuration replaced."""
    tensors, stated, values = CASES[case](np.random.default_rng(seed))
    stated = {**stated, **changes.pop("config", {})}
    for name, change in changes.items():
        key = f"m.{name}"
        found = change(tensors[key]) if callable(change) else change
        tensors = {**tensors, key: found} if found is not None else {k: v for k, v in tensors.items() if k != key}
    return tensors, stated, values


def last(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x[..., :-1])


# As older versions of compressed-tensors wrote it.
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "96x128"}
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "a group beyond the last": ("gptq", {"g_idx": lambda g: g + 1}, r"'m\.g_idx'.*groups 1 to 3, but there are only 3"),
    "a negative group": ("gptq", {"g_idx": lambda g: g - 1}, r"'m\.g_idx'.*groups -1 to 1"),
    "groups of other sizes": ("gptq", {"g_idx": lambda g: g // 2}, r"'m\.g_idx'.*puts 0 to 64 rows into a group of 32"),
    "one group that is sorted": (
        "gptq, act order",
        {"g_idx": lambda g: g * 0},
        r"'m\.g_idx'.*puts 0 to 96 rows into a group of 32",
    ),
    "groups for other rows": ("gptq", {"g_idx": last}, r"'m\.g_idx'.*int32\[95\].*needs the shape \[96\]"),
    "other bits": ("gptq", {"config": {"bits": 8}}, r"'m\.qzeros'.*fits bits=4, but .*bits=8.*{'bits': 4}"),
    "absurd bits": ("gptq", {"config": {"bits": "4"}}, r"bits='4'.*allowed are \(2, 3, 4, 5, 6, 8\)"),
    "bits that lie": (
        "pack-quantized",
        {"config": {"config_groups": {"a": {"weights": {"num_bits": 8}}}}},
        r"'m\.weight_packed'.*no number of bits in .* fits; config_groups says \[8\]",
    ),
    "groups that lie": ("gptq", {"config": {"group_size": 64}}, r"'m\.scales'.*3 groups for 96.*'group_size': 32"),
    "another layout": ("gptq", {"config": {"quant_method": "awq"}}, r"'m\.qweight'.*layout of gptq.*'awq'.*Pass quant"),
    "an order without groups": ("gptq, act order", {"g_idx": None}, r"'m\.qweight'.*desc_act=True, but g_idx"),
    "tiles of a GPU": ("LLM.int8", {"weight_format": lambda f: f + 1}, r"'m\.weight_format'.*is 1"),
    "an unknown convention": ("gptq", {"config": {"checkpoint_format": "v9"}}, r"checkpoint_format='v9'.*'gptq_v2'"),
    "zero points that are not symmetric": (
        "gptq",
        {"config": {"sym": True}},
        r"'m\.qzeros'.*sym=True means 8.*'sym': Fal",
    ),
    "zero points that are symmetric as stored": (
        "gptq",
        {"config": {}, "qzeros": lambda z: np.full_like(z, 0x88888888 - 2**32)},
        r"'m\.qzeros'.*holds 8 everywhere.*'checkpoint_format': 'gptq_v2'",
    ),
    "scales of other columns": ("gptq", {"scales": last}, r"'m\.(qweight|qzeros|g_idx)'.*part of a quantized weight"),
    "no scales": ("gptq", {"scales": None}, r"'m\.(qweight|qzeros|g_idx)'.*makes none of gptq"),
    "no zero points": ("awq", {"qzeros": None}, r"'m\.qweight'.*makes none of awq"),
    "another version": ("awq", {"config": {"version": "gemv"}}, r"'m\.qweight'.*version='gemv'"),
    "groups that do not divide": (
        "awq",
        {"qweight": lambda w: w[:-1], "config": {"group_size": 128}},
        r"'m\.scales'.*2 groups for 63",
    ),
    "words that fit twice": (
        "mlx, 4 bits",
        {"config": {"m": {}, "bits": None, "group_size": None}},
        r"'m\.weight'.*\(4, 64\).*\(8, 32\)",
    ),
    "biases of another shape": ("mlx, 4 bits", {"biases": last}, r"'m\.biases'.*needs the shape \[6, 2\]"),
    "words without scales": ("mlx, 4 bits", {"scales": None}, r"'m\.weight'.*uint32.*makes none of mlx"),
    "another mode": ("mlx mxfp4", {"config": {"mode": "nvfp4"}}, r"'m\.scales'.*belongs to mode='mxfp4'"),
    "a shape that lies": (
        "pack-quantized",
        {"weight_shape": lambda s: s[::-1].copy()},
        r"'m\.weight_shape'.*says \[96, 10\]",
    ),
    "a shape that is absurd": ("pack-quantized", {"weight_shape": lambda s: s * -1}, r"'m\.weight_shape'"),
    "no bits fit": (
        "pack-quantized",
        {"weight_packed": lambda w: w[:, :1].copy()},
        r"'m\.weight_packed'.*no number of bits",
    ),
    "zero points of another shape": (
        "pack-quantized, zero points",
        {"weight_zero_point": last},
        r"'m\.weight_zero_point'.*needs",
    ),
    "no shape": ("pack-quantized", {"weight_shape": None}, r"'m\.weight_packed'.*makes none of"),
    "tiles of another size": (
        "fp8, tiles",
        {"weight_scale_inv": last},
        r"'m\.weight_scale_inv'.*has one scale, 200, or \[2, 3\]",
    ),
    "stated blocks": ("fp8, tiles", {"config": {"config_groups": {"a": {"weights": BLOCKS}}}}, r"block of '96x128'"),
    "scales of another kind": (
        "fp8, inverse",
        {"config": {"weight_scale_semantics": "log"}},
        r"'m\.weight_scale_inv'.*weight_scale_semantics='log'",
    ),
    "planes of ragged outputs": (
        "gptq, 24 outputs",
        {"config": {"checkpoint_format": "gptq_p", "bits": 3, "group_size": 60}, "g_idx": None},
        r"'m\.qweight'.*bits=3, with 128 inputs and 24 outputs; both",
    ),
    "5 bits of nobody": (
        "gptq, 5 bits",
        {"config": {"checkpoint_format": None, "quant_method": None}},
        r"'m\.qweight'.*AutoRound.*GPTQModel.*'gptq_p'",
    ),
    "zero points that are lost": (
        "pack-quantized, zero points",
        {"weight_zero_point": None},
        r"'m\.weight_packed'.*needs a weight_zero_point.*symmetric=False.*'config_groups': None",
    ),
    "zero points that should not be": (
        "pack-quantized, zero points",
        {"config": {"config_groups": {"a": {"weights": {"num_bits": 4, "symmetric": True}}}}},
        r"'m\.weight_zero_point'.*symmetric=True",
    ),
    "zero points of int8 that are lost": (
        "int-quantized",
        {"config": {"config_groups": {"a": {"weights": {"symmetric": False}}}}},
        r"'m\.weight'.*needs a weight_zero_point",
    ),
    "an order without the groups of inputs": (
        "pack-quantized, act order",
        {"weight_g_idx": None},
        r"'m\.weight_packed'.*actorder='group', but weight_g_idx.*'config_groups': None",
    ),
    "stated tiles": ("fp8, tiles", {"config": {"weight_block_size": [64, 64]}}, r"block of \[64, 64\]"),
    "scales alone": ("fp8, tiles", {"weight": None}, r"'m\.weight_scale_inv'.*nothing.* beside it"),
    "exponents of another shape": (
        "compressed-tensors mxfp4",
        {"weight_scale": last},
        r"'m\.weight_scale'.*needs the shape \[6, 3\]",
    ),
    "two tensor scales": (
        "modelopt nvfp4",
        {"weight_scale_2": lambda s: np.tile(s, 2)},
        r"'m\.weight_scale_2'.*one number",
    ),
    "blocks of 15 bytes": ("mxfp4 experts", {"weight_blocks": last}, r"'m\.weight_blocks'.*16 bytes"),
    "the layout of a known method under another name": (
        "gptq",
        {"config": {"quant_method": "hqq"}},
        r"'m\.qweight'.*layout of gptq.*'hqq'.*Pass quantization=\{'quant_method': 'gptq'\}",
    ),
    "an unknown method": (
        "fp8, tiles",
        {"weight": None, "weight_scale_inv": None, "config": {"quant_method": "hqq"}},
        r"quantized by 'hqq'.*of what is read \(awq.*open_lazy",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_named(what: str, tmp_path: Path):
    case, changes, message = WRONG[what]
    folder = made.written(tmp_path / "m", changed(case, **changes))
    with pytest.raises(ef.errors.CheckpointError, match=message) as caught:
        ef.load_checkpoint(folder)
    assert str(folder) in str(caught.value)
    assert len(str(caught.value)) < 1200
    assert set(ef.open_lazy(folder)) >= {"norm.weight"}  # what is stored can be seen all the same


def test_groups_that_were_never_set_are_in_order(tmp_path: Path):
    """Zeros, with desc_act=False: of GPTQ-for-LLaMa, as vLLM and text-generation-inference read them."""
    tensors, stated, values = changed("gptq", g_idx=lambda g: g * 0)
    found = ef.load_checkpoint(made.written(tmp_path / "m", (tensors, stated, values)))["m.weight"]
    np.testing.assert_array_equal(np.asarray(found.materialize()), values)


def test_numbers_can_be_given(tmp_path: Path):
    """Where the configuration is missing or wrong, the caller knows better."""
    tensors, _, values = made.mlx(np.random.default_rng(0), bits=4)
    folder = made.written(tmp_path / "m", (tensors, {}, values))
    with pytest.raises(ef.errors.CheckpointError, match=r"Pass quantization="):
        ef.load_checkpoint(folder)
    found = ef.load_checkpoint(folder, quantization={"bits": 4, "group_size": 64})["m.weight"]
    np.testing.assert_array_equal(np.asarray(found.materialize()), values)
    wide = ef.load_checkpoint(folder, quantization={"bits": 4, "group_size": 64, "dtype": "float32"})["m.weight"]
    assert wide.dtype == jnp.float32
    with pytest.raises(ValueError, match="fallback='maybe'"):
        ef.open_checkpoint(folder, fallback="maybe")


def test_dtype_of_the_model(tmp_path: Path):
    tensors, stated, values = made.fp8(np.random.default_rng(0))
    folder = made.written(tmp_path / "m", (tensors, stated, values), torch_dtype="bfloat16")
    found = ef.load_checkpoint(folder)["m.weight"]
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(found.materialize()), values.astype(found.dtype))


@pytest.mark.parametrize("name", ["quantize_config", "quantization_config"])
def test_files_beside_say_it(name: str, tmp_path: Path):
    """Before `quantization_config`, GPTQ wrote `quantize_config.json`; AutoRound writes another file."""
    tensors, stated, values = made.gptq(np.random.default_rng(1), v2=True)
    folder = made.written(tmp_path / "m", (tensors, {}, values))
    (folder / f"{name}.json").write_text(json.dumps(stated))
    np.testing.assert_array_equal(np.asarray(ef.load_checkpoint(folder)["m.weight"].materialize()), values)
    (folder / "config.json").write_text("{")
    with pytest.raises(ef.errors.CheckpointError, match=r"config\.json: is not JSON"):
        ef.load_checkpoint(folder)


def test_layouts_against_bytes_written_by_hand():
    """Eight codes 0 to 7: in a word of GPTQ, in one of AWQ, and as three bytes of a stream of 3 bits."""
    codes = np.arange(8, dtype=np.uint8)
    word = jnp.asarray([0x76543210], jnp.uint32)
    assert layouts.word_fields(word, 4).tolist() == codes.tolist()
    assert layouts.awq_columns(jnp.asarray([0x75316420], jnp.uint32), 4).tolist() == codes.tolist()
    stream = np.frombuffer(bytes.fromhex("88c6fa") * 4, "<u4")
    assert layouts.bit_stream(jnp.asarray(stream), 3).tolist() == [*codes] * 4
    halves = jnp.arange(16, dtype=jnp.uint8) * 17  # ggml: value i and value 16 + i in one byte
    assert layouts.ggml_nibbles(halves).tolist() == [*range(16)] * 2


def test_other_tensors_stay_as_they_are(tmp_path: Path):
    """Names that look like parts of a quantized weight, but are none."""
    rng = np.random.default_rng(0)
    tensors = {
        "layer.scales": rng.standard_normal((4, 8)).astype(np.float32),
        "q.weight": rng.standard_normal((8, 8)).astype(np.float32),  # rounded, but not packed
        "q.weight_scale": np.ones((8, 1), np.float32),
        "res_blocks": np.ones(3, np.float32),
    }
    folder = made.written(tmp_path / "m", (tensors, {"quant_method": "compressed-tensors"}, np.zeros(1)))
    assert type(ef.open_checkpoint(folder)) is files.LazyCheckpoint
    assert set(ef.load_checkpoint(folder)) == {*tensors, "norm.weight"}
