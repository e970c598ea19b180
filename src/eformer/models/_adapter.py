"""Adapters and trained models as folders: LoRA factors as `peft` stores them, and whole models as they were loaded."""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from eformer._core import ImplicitArray
from eformer._lora.array import LoraArray
from eformer._lora.dora import DoraArray
from eformer._lora.parts import ADAPTERS, low_rank
from eformer._quantize.leaves import open_tree
from eformer.errors import CheckpointError
from eformer.serialization import open_lazy, save
from eformer.serialization.foreign.configuration import read_json
from eformer.serialization.safetensors.writing import write_json
from eformer.serialization.streaming.quantize_folder import CONFIG, SHARD, WEIGHTS, other_files

from . import _llama_file as llama_file
from ._families import MATRICES, described
from ._fused import JOINED
from ._generate import Model

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# What is read: values of the configuration that change what an adapter computes, or what else its folder holds.
_ADAPTER = {"peft_type": "LORA", "bias": "none"} | dict.fromkeys(
    ("modules_to_save", "trainable_token_indices", "alora_invocation_tokens", "use_qalora", "lora_bias")
)
_PREFIX, _MAGNITUDE = "base_model.model.", "lora_magnitude_vector"


def save_adapter(folder: str | os.PathLike[str], model: Model) -> Path:
    """Write the LoRA factors of a model as a folder that `peft` reads; the weights under them are not written.

    Args:
        folder: gets `adapter_config.json` and `adapter_model.safetensors`.
        model: with a `LoraArray` in place of some matrices of its layers, as `add_lora` puts them.
    """
    adapters = {name: q for name, our, q in _matrices(model) if isinstance(q, ADAPTERS)}
    if not adapters:
        raise ValueError("the model has no adapter; add_lora(model.params, ...) makes them.")
    found = {name: low_rank(q) for name, q in adapters.items()}
    magnitudes = {name: q.magnitude for name, q in adapters.items() if isinstance(q, DoraArray)}
    dropouts = {q.dropout for q in found.values()}
    if len(dropouts) > 1 or len(magnitudes) not in (0, len(found)):
        raise ValueError("peft has one dropout for all adapters, and DoRA for all or none; these differ.")
    ranks = {name: q.a.shape[-1] for name, q in found.items()}
    alphas = {name: float(q.scale) * ranks[name] for name, q in found.items()}
    rank, alpha = (collections.Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    short, layers = {name.rsplit(".", 1)[-1] for name in found}, model.config.layers
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if model.folder is None else str(model.folder),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropouts.pop(),
        "use_dora": bool(magnitudes),
        "bias": "none",
        "target_modules": sorted(short if len(found) == len(short) * layers else found),
        "rank_pattern": {name: r for name, r in ranks.items() if r != rank},
        "alpha_pattern": {name: a for name, a in alphas.items() if a != alpha},
        "inference_mode": True,
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    factors = {f"{_PREFIX}{name}.lora_A.weight": np.asarray(q.a).T for name, q in found.items()}
    factors |= {f"{_PREFIX}{name}.lora_B.weight": np.asarray(q.b).T for name, q in found.items()}
    factors |= {f"{_PREFIX}{name}.{_MAGNITUDE}": np.asarray(x) for name, x in magnitudes.items()}
    save(folder / _WEIGHTS, factors, metadata={"format": "pt"})
    write_json(folder / _CONFIG, config)
    return folder


def load_adapter(model: Model, folder: str | os.PathLike[str]) -> Model:
    """The model with the LoRA factors of a folder that `save_adapter` or `peft` wrote, over the weights it has."""
    if not isinstance(model, Model):
        raise TypeError(f"an adapter goes over a Model, as load(path) gives it; got {type(model).__name__}.")
    config = read_json(Path(folder) / _CONFIG)
    if not config:
        what, fix = f"has no {_CONFIG}, which says how the factors are scaled.", "Fetch it from where they came from."
        raise CheckpointError(what, file=Path(folder), fix=fix)
    for key, allowed in _ADAPTER.items():
        if config.get(key, allowed) not in (allowed, [], False):
            what = f"says {config[key]!r} for {key}; adapters are read where it is {allowed!r}."
            raise CheckpointError(what, file=Path(folder) / _CONFIG)
    opened = open_lazy(Path(folder) / _WEIGHTS)
    left = set(opened)
    layers = [dict(layer) for layer in model.params["layers"]]
    for name, our, w in _matrices(model):
        a, b = (f"{_PREFIX}{name}.lora_{part}.weight" for part in "AB")
        if a in left and b in left:
            factors = jnp.asarray(opened[a]).T, jnp.asarray(opened[b]).T
            _check_factors(Path(folder), config, name, {a: opened[a].shape, b: opened[b].shape}, w.shape)
            rank, alpha = factors[0].shape[1], _pattern(config, "alpha_pattern", name, config.get("lora_alpha", 8))
            scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            made = LoraArray(w, *factors, scale, dropout=config.get("lora_dropout") or 0.0)
            if config.get("use_dora"):
                made = DoraArray.over(made, magnitude=_magnitude(opened, name, made.shape[1]))
            layers[int(name.split(".")[2])][our] = made
            left -= {a, b, f"{_PREFIX}{name}.{_MAGNITUDE}"}
    if left:
        what = "belongs to no matrix of a layer of this model."
        raise CheckpointError(what, file=Path(folder) / _WEIGHTS, tensor=min(left))
    return dataclasses.replace(model, params={**model.params, "layers": layers})


def _check_factors(folder: Path, config: dict[str, Any], name: str, shapes: dict[str, Any], of: Sequence[int]) -> None:
    """Refuse factors that do not fit the matrix, or whose rank is not the one that the configuration scales by."""
    (first, a), (second, b) = shapes.items()
    rank = _pattern(config, "rank_pattern", name, config.get("r", a[0] if a else 1))
    for tensor, shape, wanted in ((first, a, (rank, of[0])), (second, b, (of[1], rank))):
        if tuple(shape) != wanted:
            what = f"has the shape {list(shape)}; {_CONFIG} (rank {rank}) and the model ask for {list(wanted)}."
            raise CheckpointError(what, file=folder / _WEIGHTS, tensor=tensor)


def _magnitude(opened: Any, name: str, size: int) -> Any:
    """The lengths of the columns; early files have them as a matrix of one row or column."""
    tensor = f"{_PREFIX}{name}.{_MAGNITUDE}"
    if tensor not in opened or opened[tensor].size != size:
        there = f"has the shape {list(opened[tensor].shape)}" if tensor in opened else "is missing"
        what = f"{there}; with use_dora every matrix has one of [{size}]."
        raise CheckpointError(what, file=getattr(opened, "path", None), tensor=tensor)
    return jnp.asarray(opened[tensor]).reshape(size)


def _pattern(config: dict[str, Any], key: str, name: str, default: Any) -> Any:
    """What a table of `peft` says of a module: its keys are ends of names."""
    hits = [value for end, value in config.get(key, {}).items() if re.fullmatch(rf"(.*\.)?({end})", name)]
    return hits[0] if hits else default


def _matrices(model: Model) -> Iterator[tuple[str, str, Any]]:
    """Every matrix of a layer that is one module of the checkpoint: its name there, and ours."""
    for number, layer in enumerate(model.params["layers"]):
        for our, theirs in MATRICES.items():
            if our in layer and ("router" not in layer or our in "qkvo"):
                yield f"model.layers.{number}.{theirs}", our, layer[our]
            elif isinstance(layer.get(our), ADAPTERS):
                raise ValueError(f"layer {number}: adapters of experts cannot be written; add them to others only.")


def save_folder(folder: str | os.PathLike[str], model: Model, *, max_shard_size: int | str | None = SHARD) -> Path:
    """Write a model as a folder like the one it was loaded from: after training and `merge_lora`, for example.

    Weights are written as they are, dense or quantized; `load` reads both. The files of the tokenizer are copied.
    """
    if model.folder is None:
        raise ValueError("the model was not loaded from a folder, so its config.json is not known.")
    folder = Path(folder)
    if folder.resolve() == model.folder.resolve():
        raise CheckpointError("is the folder the model was loaded from; write to another one.", file=folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = read_json(model.folder / CONFIG)
    tensors = dict(_tensors(model, config))
    (folder / CONFIG).unlink(missing_ok=True)
    save(folder / WEIGHTS, tensors, max_shard_size=max_shard_size, metadata={"format": "pt"})
    for path in other_files(model.folder):
        shutil.copyfile(path, folder / path.name)
    config.pop("quantization_config", None)
    if any(isinstance(leaf, ImplicitArray) for leaf in tensors.values()):
        config["quantization_config"] = {"quant_method": "eformer"}
    write_json(folder / CONFIG, config)
    return folder


def save_file(
    file: str | os.PathLike[str], model: Model, metadata: Mapping[str, str], max_shard_size: int | str | None = None
) -> Path:
    """Write a model that was read from a GGUF file as a safetensors file, which `load` reads.

    `metadata` holds what the GGUF file says of the model and its tokenizer.
    """
    save(file, dict(llama_file.tensors(model.params, _turned)), metadata=metadata, max_shard_size=max_shard_size)
    return Path(file)


def _named(model: Model) -> Iterator[tuple[str, Any]]:
    if model.folder is None:
        return llama_file.tensors(model.params, _turned)
    return _tensors(model, read_json(model.folder / CONFIG))


def _tensors(model: Model, config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """All weights under the names of the checkpoint."""
    family = described(config).family
    router, experts, parts = family.experts
    yield "model.embed_tokens.weight", model.params["embedding"]
    yield "model.norm.weight", model.params["norm"]
    if "head" in model.params:
        yield "lm_head.weight", _turned(model.params["head"])
    for number, layer in enumerate(model.params["layers"]):
        at = f"model.layers.{number}."
        for our, value in layer.items():
            if isinstance(value, ADAPTERS):
                raise ValueError(
                    f"{at}{our} has an adapter; merge_lora folds it into the weight, save_adapter writes it."
                )
            if our.removesuffix("_bias") in JOINED:
                raise ValueError(
                    f"{at}{our} holds several matrices that `fuse` joined, and folders keep them apart. Save the model "
                    "before `fuse`, or the tree of its parameters with `eformer.save`."
                )
            if our in family.norms:
                yield f"{at}{family.norms[our]}.weight", value
            elif our == "router":
                yield f"{at}{router}.weight", _turned(value)
            elif "router" in layer and our in parts:
                for i in range(value.shape[0]):
                    yield f"{at}{experts}.{i}.{parts[our]}.weight", _turned(value[i])
            elif our.endswith("_bias"):
                yield f"{at}{MATRICES[our.removesuffix('_bias')]}.bias", value
            else:
                yield f"{at}{MATRICES[our]}.weight", _turned(value)


def file_names(model: Model) -> dict[str, str]:
    """For every leaf of a model, by its path, the name of its tensor in the file; of experts that of the first."""
    tree = open_tree(model.params)
    numbered = tree.rebuild(np.full((*x.value.shape[:-2], 1, 1), i) for i, x in enumerate(tree.leaves))
    names: dict[str, str] = {}
    for name, number in _named(dataclasses.replace(model, params=numbered)):
        names.setdefault(tree.leaves[int(number.flat[0])].path, name)
    return names


def _turned(w: Any) -> Any:
    """(out, in), without a copy of a dense matrix on the CPU."""
    return (np.asarray(w) if not isinstance(w, ImplicitArray) else w).T  # pyright: ignore[reportAttributeAccessIssue]
