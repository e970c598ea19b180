"""Checkpoints written by compressed-tensors, and GGUF blocks by the `gguf` package, on fresh random tensors.

Needs the `oracle` extra: `make oracle`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import eformer as ef
from eformer._core import ImplicitArray

torch = pytest.importorskip("torch", reason="needs the oracle extra: make oracle")
compressors = pytest.importorskip("compressed_tensors.compressors", reason="needs the oracle extra: make oracle")
gguf = pytest.importorskip("gguf", reason="needs the oracle extra: make oracle")

INT = {"type": "int", "strategy": "group", "group_size": 32}
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("pack-quantized", {**INT, "num_bits": 4, "symmetric": True}),
    "int4, zero points": ("pack-quantized", {**INT, "num_bits": 4, "symmetric": False}),
    "int8 in groups": ("pack-quantized", {**INT, "num_bits": 8, "symmetric": True}),
    "int3": ("pack-quantized", {**INT, "num_bits": 3, "symmetric": True}),
    "int8": ("int-quantized", {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
}


def parameters(weight: Any, args: Any, kind: str) -> dict[str, Any]:
    """A scale for every group, and zero points where there are any: whatever they are, both sides must agree."""
    from compressed_tensors.quantization.utils import calculate_qparams

    group = args.group_size or weight.shape[1]
    low, high = (getattr(weight.reshape(weight.shape[0], -1, group), f)(-1) for f in ("amin", "amax"))
    if kind == "nvfp4":
        whole = torch.tensor([2688.0]) / weight.abs().max()
        scale = (torch.maximum(-low, high) / 6 * whole).to(torch.float8_e4m3fn)
        return {"weight_scale": scale.float(), "weight_global_scale": whole}
    if kind == "mxfp4":
        return {"weight_scale": torch.exp2(torch.floor(torch.log2(torch.maximum(-low, high))) - 2)}
    scale, zero = calculate_qparams(low, high, args)
    return {"weight_scale": scale, "weight_zero_point": zero}


@pytest.mark.parametrize("kind", FORMATS)
def test_compressed_tensors(kind: str, tmp_path: Path):
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from safetensors.torch import save_file

    form, stated = FORMATS[kind]
    args = QuantizationArgs(**stated)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    compressor = compressors.BaseCompressor.get_value_from_registry(form)
    torch.manual_seed(len(kind))
    weight = torch.randn(48, 128)
    stored = compressor.compress({"weight": weight, **parameters(weight, args, kind)}, scheme)
    decoded = compressor.decompress(dict(stored), scheme)["weight"]
    stored = {k: v.contiguous() for k, v in stored.items() if v is not None}
    save_file({f"m.{name}": tensor for name, tensor in stored.items()}, tmp_path / "model.safetensors")
    groups = {"group_0": {"targets": ["Linear"], "weights": stated}}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    found = ef.load_checkpoint(tmp_path)
    array = found["m.weight"]
    assert isinstance(array, ImplicitArray)
    values, wanted = np.asarray(array.materialize(), np.float32), decoded.float().numpy()
    # It decodes 4-bit floats in bf16, and divides where NVFP4 here multiplies.
    np.testing.assert_allclose(values, wanted, rtol=2**-7 if "fp4" in kind else 0, atol=0)
    assert np.abs(values - weight.numpy()).max() < np.abs(weight.numpy()).max() / 2


EXPORTED: dict[str, dict[str, Any]] = {
    "int4": {"dtype": "int4", "block_size": 32},
    "int4, zero points": {"dtype": "int4", "block_size": 32, "symmetric": False},
    "int4, rows": {"dtype": "int4", "block_size": None},
    "int2": {"dtype": "int2", "block_size": 32},
    "int3": {"dtype": "int3", "block_size": 32},
    "int5, zero points": {"dtype": "int5", "block_size": 32, "symmetric": False},
    "int8 in groups": {"dtype": "int8", "block_size": 64},
    "int8": {"dtype": "int8", "axis": -2},
    "fp8": {"dtype": "fp8"},
    "fp8, tensor": {"dtype": "fp8", "axis": (-2, -1)},
    "fp8, tiles": {"dtype": "fp8", "block_size": 128},
    "mxfp4": {"dtype": "mxfp4"},
    "mxfp8": {"dtype": "mxfp8"},
}


@pytest.mark.parametrize("kind", EXPORTED)
def test_compressed_tensors_decodes_exports(kind: str, tmp_path: Path):
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file

    w = np.random.default_rng(len(kind)).standard_normal((128, 64)).astype(np.float32)
    q = ef.quantize(w, **EXPORTED[kind])
    folder = ef.serialization.export({"m": {"kernel": q}}, tmp_path, "compressed-tensors")
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(stated).config_groups.values()
    compressor = compressors.BaseCompressor.get_value_from_registry(scheme.format)
    stored = {name.removeprefix("m."): x for name, x in load_file(folder / "model.safetensors").items()}
    decoded = compressor.decompress(stored, scheme)["weight"].float().numpy()
    np.testing.assert_array_equal(decoded, np.asarray(q.materialize()).T)


@pytest.mark.parametrize(
    "kind", ["Q4_0", "Q4_1", "Q8_0", "Q5_0", "MXFP4", "IQ4_NL", "Q6_K", "IQ4_XS", "TQ1_0", "TQ2_0"]
)
def test_gguf(kind: str, tmp_path: Path):
    """Blocks it writes where it can, else random ones; all of them it decodes."""
    number = gguf.GGMLQuantizationType[kind]
    rng = np.random.default_rng(0)
    try:
        raw = gguf.quants.quantize(rng.standard_normal((6, 512)).astype(np.float32), number)
    except NotImplementedError:
        values, nbytes = gguf.GGML_QUANT_SIZES[number]
        raw = rng.integers(0, 256, (6, 512 // values * nbytes), dtype=np.uint8)
        raw[:, 1::2] &= 0xBF
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("w", raw, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = ef.load_checkpoint(tmp_path / "m.gguf")["w"]
    assert isinstance(found, ImplicitArray) == (kind in ("Q4_0", "Q4_1", "Q8_0", "MXFP4", "IQ4_NL"))
    dense = found.materialize() if isinstance(found, ImplicitArray) else found
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(np.asarray(dense), gguf.quants.dequantize(raw, number))
