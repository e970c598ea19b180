"""Quantized arrays for JAX that behave like arrays everywhere.

Everything a user needs is a name of this module. Each is imported when it is first used: importing eformer loads
neither JAX nor any optional package, and starts no backend.

>>> import jax.numpy as jnp
>>> import eformer as ef
>>> ef.quantize(jnp.ones((64, 32)), dtype="nf4")
ArrayNF4(float32[64,32], nf4, 4.50 bits per weight)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eformer import errors as errors
    from eformer import integrations as integrations
    from eformer import jaximus as jaximus
    from eformer import models as models
    from eformer import ops as ops
    from eformer import serialization as serialization
    from eformer._calibrate import calibrate as calibrate
    from eformer._calibrate.bits import plan_bits as plan_bits
    from eformer._calibrate.distill import distill as distill
    from eformer._calibrate.evaluate import evaluate as evaluate
    from eformer._formats.base import Part as Part
    from eformer._formats.base import QuantizedArray as QuantizedArray
    from eformer._formats.cache.array import QuantizedCache as QuantizedCache
    from eformer._quantize.statistics import Statistics as Statistics
    from eformer.jaximus import Explanation as Explanation
    from eformer.jaximus import ImplicitArray as ImplicitArray
    from eformer.jaximus import aux_field as aux_field
    from eformer.jaximus import explain as explain
    from eformer.jaximus import implicit as implicit
    from eformer.jaximus import materialization_policy as materialization_policy
    from eformer.jaximus import materialize as materialize
    from eformer.jaximus import register as register
    from eformer.jaximus import ste as ste
    from eformer.ops.quantization import ActivationArray as ActivationArray
    from eformer.ops.quantization import Array1B as Array1B
    from eformer.ops.quantization import Array8B as Array8B
    from eformer.ops.quantization import ArrayFloat as ArrayFloat
    from eformer.ops.quantization import ArrayInt as ArrayInt
    from eformer.ops.quantization import ArrayNF4 as ArrayNF4
    from eformer.ops.quantization import DoraArray as DoraArray
    from eformer.ops.quantization import LoraArray as LoraArray
    from eformer.ops.quantization import QuantizationConfig as QuantizationConfig
    from eformer.ops.quantization import QuantizationType as QuantizationType
    from eformer.ops.quantization import Report as Report
    from eformer.ops.quantization import add_lora as add_lora
    from eformer.ops.quantization import dequantize as dequantize
    from eformer.ops.quantization import dequantize_tree as dequantize_tree
    from eformer.ops.quantization import fake_quantize_tree as fake_quantize_tree
    from eformer.ops.quantization import lora_dropout as lora_dropout
    from eformer.ops.quantization import lora_mask as lora_mask
    from eformer.ops.quantization import merge as merge
    from eformer.ops.quantization import merge_lora as merge_lora
    from eformer.ops.quantization import plan_tree as plan_tree
    from eformer.ops.quantization import quant_delay as quant_delay
    from eformer.ops.quantization import quantize as quantize
    from eformer.ops.quantization import quantize_tree as quantize_tree
    from eformer.ops.quantization import report as report
    from eformer.ops.quantization import size as size
    from eformer.ops.quantization import split_trainable as split_trainable
    from eformer.ops.quantization import straight_through as straight_through
    from eformer.ops.quantization.kernels import kernels as kernels
    from eformer.serialization import inspect as inspect
    from eformer.serialization import load as load
    from eformer.serialization import load_checkpoint as load_checkpoint
    from eformer.serialization import load_gguf as load_gguf
    from eformer.serialization import open_checkpoint as open_checkpoint
    from eformer.serialization import open_gguf as open_gguf
    from eformer.serialization import open_lazy as open_lazy
    from eformer.serialization import quantize_file as quantize_file
    from eformer.serialization import quantize_folder as quantize_folder
    from eformer.serialization import save as save

__version__ = "0.1.0"

# The block above for the interpreter; a test compares the two.
_NAMES = {
    "eformer": "errors integrations jaximus models ops serialization",
    "eformer._calibrate": "calibrate",
    "eformer._calibrate.bits": "plan_bits",
    "eformer._calibrate.distill": "distill",
    "eformer._calibrate.evaluate": "evaluate",
    "eformer._formats.base": "Part QuantizedArray",
    "eformer._formats.cache.array": "QuantizedCache",
    "eformer._quantize.statistics": "Statistics",
    "eformer.jaximus": (
        "Explanation ImplicitArray aux_field explain implicit materialization_policy materialize register ste"
    ),
    "eformer.ops.quantization": (
        "ActivationArray Array1B Array8B ArrayFloat ArrayInt ArrayNF4 DoraArray LoraArray QuantizationConfig "
        "QuantizationType Report add_lora dequantize dequantize_tree fake_quantize_tree lora_dropout lora_mask merge "
        "merge_lora plan_tree quant_delay quantize quantize_tree report size split_trainable straight_through"
    ),
    "eformer.ops.quantization.kernels": "kernels",
    "eformer.serialization": (
        "inspect load load_checkpoint load_gguf open_checkpoint open_gguf open_lazy quantize_file quantize_folder save"
    ),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'eformer' has no attribute {name!r}; dir(eformer) lists what it has")
    home = _HOMES[name]
    if home == "eformer":
        return importlib.import_module(f"eformer.{name}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *_HOMES})
