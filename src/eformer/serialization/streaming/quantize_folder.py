"""`quantize_folder`: from a folder as Hugging Face has them to a quantized one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eformer._quantize.plan import MIN_SIZE, SKIP, Choice, Plan
from eformer._quantize.tree import Reporter
from eformer.errors import CheckpointError

from ..checkpoint.index import INDEX_SUFFIX, SUFFIX
from ..checkpoint.torch_file import SUFFIXES
from ..foreign.configuration import CONFIG_KEYS, read_json
from ..foreign.gguf import gguf_at
from ..safetensors.writing import write_json
from .quantize_file import Source, StreamReport, open_source, plan_source, write_quantized

CONFIG, WEIGHTS, SHARD = "config.json", f"model{SUFFIX}", "5GB"
# Weights in any form, which are not copied: the quantized ones take their place.
_WEIGHTS = (SUFFIX, *SUFFIXES, INDEX_SUFFIX, ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt")


def quantize_folder(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    rules: Any = None,
    *,
    default: Choice = "nf4",
    min_size: int = MIN_SIZE,
    skip: Iterable[str] = SKIP,
    max_shard_size: int | str | None = SHARD,
    overwrite: bool = False,
    progress: Reporter | None = None,
) -> StreamReport:
    """Quantize a checkpoint folder into another one that `eformer.models.load` reads.

    The target gets the quantized weights, in shards with an index if they are large, a `config.json` whose
    `quantization_config` says how they were made, and the other files of the source, such as those of the tokenizer.
    `config.json` comes last: a folder without it is not complete. A run that was stopped continues when it is started
    again with the same arguments.

    Args:
        source: a folder with `config.json` and weights: safetensors, in one file or several, with or without an index,
            or files of PyTorch, which need torch.
        target: the folder to write. One that holds anything else than an unfinished run is refused.
        rules: as for `quantize_file`; so are `default`, `min_size`, `skip` and `progress`.
        max_shard_size: as for `save`.
        overwrite: replace a checkpoint in the target.
    """
    source, target = Path(source), Path(target)
    check_folders(source, target, overwrite=overwrite)
    opened = open_source(source)
    planned = plan_source(opened, rules, default=default, min_size=min_size, skip=skip)
    return write_folder(opened, planned, source, target, max_shard_size=max_shard_size, progress=progress)


def check_folders(source: Path, target: Path, *, overwrite: bool) -> None:
    """Refuse what would destroy something, before any work is done."""
    if not (source / CONFIG).is_file():
        what = f"has no {CONFIG}, so it is not a model that could become another folder."
        raise CheckpointError(what, file=source, fix=f"Write to a file, such as out{SUFFIX}.")
    if (gguf := gguf_at(source)) is not None:
        fix = f"Quantize {gguf.name} to a file, such as out{SUFFIX}."
        raise CheckpointError(
            f"holds a GGUF file, whose tensors have other names than {CONFIG} says.", file=source, fix=fix
        )
    if target.suffix == ".gguf":
        raise CheckpointError("would be a GGUF file, which is not written.", file=target, fix="Name a folder.")
    if target.exists() and not target.is_dir():
        raise CheckpointError("is a file.", file=target, fix="Name a folder.")
    if source.resolve() in (target.resolve(), *target.resolve().parents):
        raise CheckpointError("is the source, or in it; write to another folder.", file=target)
    if target.is_dir() and not overwrite and not _is_ours(source, target):
        raise CheckpointError(
            "holds files already.", file=target, fix="Name another folder, or overwrite it (--force)."
        )


def _is_ours(source: Path, target: Path) -> bool:
    """Does the target hold nothing but what an unfinished run leaves there?"""
    copied = {path.name for path in other_files(source)}
    there = [path.name for path in target.iterdir()]
    return CONFIG not in there and all(
        name in copied or name.startswith((WEIGHTS, f".{WEIGHTS}", "model-", ".model-", f".{CONFIG}."))
        for name in there
    )


def other_files(source: Path) -> list[Path]:
    """Files to copy: all but the weights, the configuration, and what is hidden."""
    files = [path for path in sorted(source.iterdir()) if path.is_file() and not path.name.startswith(".")]
    return [path for path in files if path.name != CONFIG and not path.name.endswith(_WEIGHTS)]


def write_folder(
    opened: Source,
    planned: Plan,
    source: Path,
    target: Path,
    *,
    max_shard_size: int | str | None = SHARD,
    progress: Reporter | None = None,
) -> StreamReport:
    """Do what was planned for an open source; arguments as for `quantize_folder`, which checks the folders first."""
    config = read_json(source / CONFIG)
    target.mkdir(parents=True, exist_ok=True)
    (target / CONFIG).unlink(missing_ok=True)
    done = write_quantized(opened, planned, target / WEIGHTS, max_shard_size=max_shard_size, progress=progress)
    for path in other_files(source):
        shutil.copyfile(path, target / path.name)
    kept = {key: value for key, value in config.items() if key not in CONFIG_KEYS}
    write_json(target / CONFIG, {**kept, "quantization_config": described(planned)})
    return done


def described(planned: Plan) -> dict[str, Any]:
    """How a checkpoint was quantized: the configurations, each with the tensors it was used for."""
    kinds: dict[str, list[str]] = {}
    for decision in planned.decisions:
        if decision.config is not None:
            kinds.setdefault(decision.config.to_json(), []).append(".".join(decision.leaf.names))
    groups = [{**json.loads(text), "tensors": len(names), "first": names[0]} for text, names in kinds.items()]
    matrices = [d for d in planned.decisions if len(getattr(d.leaf.value, "shape", ())) > 1]
    dense = [".".join(d.leaf.names) for d in matrices if d.config is None]
    return {"quant_method": "eformer", "groups": groups, "modules_to_not_convert": dense}
